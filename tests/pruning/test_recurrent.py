"""Test networks with recurrent layers behind convolutions, and with layers that torch-pruning does not know."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_fl.errors import UserError
from lightning_fl.pruning import plan_for
from lightning_fl.pruning.graph import Network
from lightning_fl.pruning.recurrent import as_one_operation


class Sequences(nn.Module):
    """Two convolutions in front of a recurrent layer, of which the second gives its inputs."""

    def __init__(self, kind: Any, reads: str = "last", **options: Any) -> None:
        super().__init__()
        self.reads = reads
        self.first, self.second, self.norm = nn.Conv1d(3, 6, 3), nn.Conv1d(6, 16, 3), nn.BatchNorm1d(16)
        self.layer = kind(16, 8, batch_first=True, **options)
        self.output = nn.Linear(8 * (1 + options.get("bidirectional", False)), 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x).relu())).relu().transpose(1, 2)
        if self.reads == "packed":
            lengths = torch.full((len(x),), x.shape[1])
            return self.output(self.layer(pack_padded_sequence(x, lengths, batch_first=True))[1][-1])
        outputs, states = self.layer(x, self.layer(x)[1]) if self.reads == "twice" else self.layer(x)
        if self.reads == "last":
            return self.output(outputs[:, -1])
        state = states[0] if isinstance(states, tuple) else states
        return self.output(state[-1])


@pytest.mark.long
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_convolution_in_front_stays_whole_and_others_lose_filters(kind: Any, bidirectional: bool) -> None:
    module, x = Sequences(kind, bidirectional=bidirectional), torch.randn(2, 3, 70)
    network = Network(module, x)
    assert network.layers == ("first",)
    with pytest.raises(UserError, match=r"'second' cannot lose filters: .*layer"):
        plan_for(module, {"second": [0]}, x)
    plan = plan_for(module, {"first": [0, 2]}, x)
    assert plan.axes.keys() == {"first.weight", "first.bias", "second.weight"}


@pytest.mark.parametrize("reads", ["states", "twice", "packed"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_whatever_is_read_of_the_layer(kind: Any, reads: str) -> None:
    assert Network(Sequences(kind, reads), torch.randn(2, 3, 9)).layers == ("first",)


def test_a_network_that_can_lose_nothing_says_why() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 16, 3), nn.BatchNorm1d(16)
            self.layer = nn.LSTM(16, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(self.conv(x)).relu().transpose(1, 2))[0][:, -1]

    network = Network(Short(), torch.randn(2, 3, 64))
    assert network.layers == ()
    assert network.first_obstacles == "'conv' cannot because 'layer' (LSTM), a recurrent layer, reads its outputs"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_one_operation_of_the_graph(kind: Any) -> None:
    layer, x = kind(3, 4), torch.randn(50, 2, 3, requires_grad=True)
    expected, _ = layer(x)
    with as_one_operation(layer):
        outputs, states = layer(x)
        again, _ = layer(x, hx=states)
    assert torch.allclose(outputs, expected, rtol=0, atol=1e-6)
    assert outputs.grad_fn.next_functions[0][0].variable is x
    assert again.grad_fn.next_functions[1][0] is outputs.grad_fn
    assert "forward" not in vars(layer)


def test_a_layer_that_is_unknown_is_named() -> None:
    class Deformed(nn.Module):
        """Convolution with weights of its own, as DeformConv2d of torchvision."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.conv2d(x, self.weight)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(3, 6, 3), nn.Parameter(torch.ones(6, 1, 1))
            self.output = nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.conv(x) * self.scale)

    x = torch.randn(2, 3, 8, 8)
    behind = Network(nn.Sequential(nn.Conv2d(3, 6, 3), Deformed()), x)
    assert behind.first_obstacles.startswith("'0' cannot because its outputs are combined with '1.weight' of Deformed")
    scaled = Network(Scaled(), x)
    assert scaled.first_obstacles.startswith("'conv' cannot because its outputs are combined with 'scale' of Scaled")
