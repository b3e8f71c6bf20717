"""Test FedLDF and its baselines: layers of networks, parts of models, chosen clients, costs."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import yaml
from compared_runs import MakeTrainer, agree, bits_of, ran
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from roster import problem
from torch import Tensor, nn
from toys import SIZES, Normalised, Perceptron, Poisoned, federation, reordered, samples, vector

from lightning_fl import UserError
from lightning_fl.aggregators import MaskedMean, WeightedMean
from lightning_fl.algorithms import HDFL, Algorithm, FedADP, FedAvg, FedLDF, RandomLayers
from lightning_fl.codecs import Dense
from lightning_fl.engine.population import Population
from lightning_fl.exchanges import DrawnClients, DrawnLayers, LayerDivergence, PrunedUnits, layer_choice
from lightning_fl.link.ledger import Ledger
from lightning_fl.link.link import Link
from lightning_fl.modules import network
from lightning_fl.rules import Proximal
from lightning_fl.slots import Codec, Exchange, Message, Packed, Payload, Result, RoundContext, State, Upload
from lightning_fl.steps import Apply, Momentum
from lightning_fl.vectors.layer_groups import Group, layer_groups, norms, resolve
from lightning_fl.vectors.layout import Layout
from lightning_fl.vectors.submodel import Submodel


def setting_of(module: nn.Module, num_clients: int = 6, is_reordered: bool = False) -> RoundContext:
    """Return the context that parts of a federation of `module` get."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    layout = Layout.of(reordered(dict(module.named_parameters()), is_reordered))
    return RoundContext(layout, Layout.of(buffers), num_clients, layer_groups(module))


def link_of(context: RoundContext, uplink: Codec = Dense(), memory: dict[int, State] | None = None) -> Link:  # noqa: B008
    return Link(context, uplink, Dense(), Ledger(), {} if memory is None else memory, {})


def result(client: int, message: Message, weight: float = 1.0) -> Result:
    return Result(client, message, weight, state={}, counters={}, logs={}, num_steps=1)


def collected(exchange: Exchange, context: RoundContext, deltas: dict[int, Tensor]) -> dict[int, Upload]:
    """Return an exchange's uploads of some deltas (d,), by client."""
    results = [result(client, {"model": delta}) for client, delta in deltas.items()]
    return {upload.result.client: upload for upload in exchange.collect(results, link_of(context))}


def layers_sent(upload: Upload, context: RoundContext) -> set[str]:
    """Return the layers that a client has sent, each whole."""
    masks = context.layout.views(upload.sent["model"])
    found = set()
    for group in context.groups:
        sent = torch.cat([masks[name].flatten() for name in group.parameters])
        assert sent.all() or not sent.any()
        found |= {group.name} if sent.any() else set()
    return found


# ------------------------------------------------------------------------------------------------- layers


@pytest.mark.long
def test_vgg9_has_the_nine_layers_of_the_paper() -> None:
    groups = layer_groups(network("vgg9", num_classes=10))
    assert [group.name for group in groups] == [*(f"conv{i}" for i in range(1, 9)), "fc"]
    assert groups[2] == Group(
        "conv3",
        ("conv3.weight", "conv3.bias", "bn3.weight", "bn3.bias"),
        ("bn3.running_mean", "bn3.running_var"),
        kernels=("conv3.weight",),
    )
    assert groups[8] == Group("fc", ("fc.weight", "fc.bias"))


@pytest.mark.long
@pytest.mark.parametrize(("name", "layers"), [("lenet5", 5), ("vgg11", 11), ("resnet18", 21), ("resnet32", 32)])
def test_layers_are_a_partition_of_any_network(name: str, layers: int) -> None:
    module = network(name, num_classes=10)
    groups = layer_groups(module)
    assert len(groups) == layers
    assert sorted(n for group in groups for n in group.parameters) == sorted(n for n, _ in module.named_parameters())
    floats = [n for n, buffer in module.named_buffers() if buffer.is_floating_point()]
    assert sorted(n for group in groups for n in group.buffers) == sorted(floats)


class Odd(nn.Module):
    """Module beyond chains of convolutions and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.alone = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 4)
        self.up = nn.ConvTranspose2d(4, 8, 3)
        self.norm = nn.BatchNorm2d(8, affine=False)
        self.narrow = nn.Linear(8, 3)
        self.not_its = nn.BatchNorm1d(8)
        self.behind = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.BatchNorm1d(3))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.embedding = nn.Embedding(5, 4)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(3))


def test_what_is_no_convolution_is_a_layer_too() -> None:
    found = {group.name: group for group in layer_groups(Odd())}
    assert found["token"].parameters == ("token",)
    assert found["alone"].buffers == ("alone.running_mean", "alone.running_var")
    assert len(found["lstm"].parameters) == 4
    assert found["up"] == Group(
        "up", ("up.weight", "up.bias"), ("norm.running_mean", "norm.running_var"), axis=1, kernels=("up.weight",)
    )
    assert found["narrow"].parameters == ("narrow.weight", "narrow.bias"), (
        "a batch norm of eight features does not follow three outputs"
    )
    assert found["behind.0"].buffers == (), "a ReLU lies between"
    assert found["behind.2"].parameters == ("behind.2.weight", "behind.2.bias")
    assert found["embedding"].parameters == ("embedding.weight",)
    assert not {"frozen", "tied", "mean"} & set(found)


def test_a_map_of_groups_takes_running_statistics_along() -> None:
    context = setting_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2)))
    asked = {"a": ["0.weight", "2.bias"], "b": ["2.weight", "0.bias", "2.running_var"]}
    a, b = resolve(asked, context.groups, context.layout, context.buffer_layout)
    assert a.buffers == ("1.running_mean", "1.running_var"), (
        "buffers belong to the first parameter of the layer before them"
    )
    assert b == Group("b", ("2.weight", "0.bias"), ("2.running_mean", "2.running_var"))


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ("layr", ["'layr'", "'layer'", "tensor"]),
        ({"a": ["hidden.weight", "hidden.bias"]}, ["'output.weight'", "1 more"]),
        ({"a": ["hidden.weight", "hidden.bias", "output.weight"]}, ["'output.bias'"]),
        (
            {"a": ["hidden.weight", "hidden.bias"], "b": ["output.weight", "output.bias", "hidden.bias"]},
            ["'hidden.bias'"],
        ),
        ({"a": ["hidden.weight", "hidden.weight"]}, ["'hidden.weight'", "'a'"]),
        ({"a": ["hiden.weight"]}, ["'hiden.weight'", "'hidden.weight'"]),
        ({"a": "hidden.weight"}, ["'a'", "list", "'hidden.weight'"]),
        ({"a": []}, ["'a'", "list"]),
        ({"a": 3}, ["'a'", "list", "3"]),
        (["hidden.weight"], ["hidden.weight", "tensor", "map"]),
    ],
)
@pytest.mark.parametrize("algorithm", [FedLDF, RandomLayers, FedADP])
def test_groups_that_do_not_fit_are_refused(
    algorithm: Callable[..., Algorithm], groups: Any, named: list[str], make_trainer: MakeTrainer
) -> None:
    options = {} if algorithm is FedADP else {"n": 2}
    with pytest.raises(UserError) as error:
        make_trainer(max_rounds=1).fit(Perceptron(), federation(), algorithm(groups=groups, **options))
    assert [name for name in named if name not in str(error.value)] == [], error.value


def test_groups_are_printed_as_a_map_that_can_be_given_back(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Perceptron()
    second = copy.deepcopy(first)
    make_trainer().fit(first, federation(), FedLDF(n=1, print_groups=True), verbose=False)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == {"hidden": ["hidden.weight", "hidden.bias"], "output": ["output.weight", "output.bias"]}
    make_trainer().fit(second, federation(), FedLDF(n=1, groups=printed))
    assert np.array_equal(vector(first), vector(second))


class Hollow(Perceptron):
    """Perceptron with parameters without elements, of which one has a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.hidden.columns = nn.Parameter(torch.zeros(0, 2)), nn.Parameter(torch.zeros(4, 0))
        self.nothing = nn.ParameterList([torch.zeros(0, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows.sum() + self.hidden.columns.sum() + self.nothing[0].sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedLDF(n=1),
        lambda: FedLDF(n=1, groups="tensor"),
        lambda: FedLDF(n=1, groups={"a": ["hidden.weight", "output.bias"], "b": ["output.weight", "hidden.bias"]}),
        lambda: RandomLayers(n=2),
        lambda: FedADP(keep=0.4),
        lambda: FedADP(keep=0.4, score="magnitude", per_layer=True, groups="tensor"),
    ],
)
def test_parameters_without_elements_are_in_no_layer(make: Callable[[], Algorithm], make_trainer: MakeTrainer) -> None:
    hollow, whole = Hollow(), Perceptron()
    whole.load_state_dict(hollow.state_dict(), strict=False)
    found = []
    for module in (hollow, whole):
        trainer = make_trainer(max_rounds=2)
        trainer.fit(module, federation(), make(), verbose=False)
        found.append((trainer.run.params.tolist(), trainer.run.ledger.total_bits))
    assert found[0] == found[1]


def test_a_map_of_groups_may_name_parameters_without_elements() -> None:
    context = setting_of(Hollow())
    sized = {"a": ["hidden.weight", "hidden.bias"], "b": ["output.weight", "output.bias"]}
    asked = {"a": [*sized["a"], "hidden.columns"], "b": sized["b"], "c": ["rows", "nothing.0"]}
    found = resolve(asked, context.groups, context.layout, context.buffer_layout)
    assert {group.name: [*group.parameters] for group in found} == sized


# ------------------------------------------------------------------------------------------- parts of models


class Convolutional(nn.Module):
    """Module with rows of every kind: kernels with BatchNorm, a transposed kernel, a matrix, a token, a single scale."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 3, 2)
        self.fc = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(2))


@pytest.mark.long
@settings(max_examples=50)
@given(bits=st.lists(st.booleans(), min_size=14, max_size=14), is_reordered=st.booleans())
def test_a_submodel_is_the_smaller_model_that_it_says(bits: list[bool], is_reordered: bool) -> None:
    module = Convolutional()
    context = setting_of(module, is_reordered=is_reordered)
    sizes = [group.num_units(context.layout) for group in context.groups]
    assert dict(zip([group.name for group in context.groups], sizes, strict=True)) == {
        "conv": 4,
        "up": 3,
        "fc": 6,
        "scale": 1,
    }
    kept = torch.tensor(bits).split(sizes)
    submodel = Submodel.from_groups(context.layout, context.buffer_layout, context.groups, kept)
    whole = torch.randn(context.layout.numel)
    statistics = torch.randn(context.buffer_layout.numel)
    message = {"model": whole, "buffers": statistics, "scalars/loss": torch.tensor(2.0)}
    shorter = submodel.gather(message)
    of_conv, of_up, of_fc, of_scale = (
        dict(zip([g.name for g in context.groups], kept, strict=True))[name] for name in ("conv", "up", "fc", "scale")
    )
    views, expected = context.layout.views(whole), {}
    for name, rows, axis in [
        ("conv.weight", of_conv, 0),
        ("conv.bias", of_conv, 0),
        ("norm.weight", of_conv, 0),
        ("norm.bias", of_conv, 0),
        ("up.weight", of_up, 1),
        ("up.bias", of_up, 0),
        ("fc.weight", of_fc, 0),
        ("fc.bias", of_fc, 0),
    ]:
        if rows.any():
            expected[name] = views[name].index_select(axis, rows.nonzero()[:, 0])
    if of_scale.any():
        expected["scale"] = views["scale"]
    assert set(submodel.layout.names) == set(expected)
    for name, value in (submodel.layout.views(shorter["model"]) if expected else {}).items():
        assert torch.equal(value, expected[name]), name
    running = context.buffer_layout.views(statistics)
    parts = submodel.buffer_layout.views(shorter["buffers"])
    assert torch.equal(parts["mean"], running["mean"]), "a buffer without a layer is always sent"
    if of_conv.any():
        assert torch.equal(parts["norm.running_var"], running["norm.running_var"][of_conv])
    masks = submodel.masks(message)
    back = submodel.scatter(shorter, {})
    assert torch.equal(back.get("model", torch.zeros_like(whole)), whole * masks["model"])
    assert torch.equal(back["buffers"], statistics * masks["buffers"])
    assert back["scalars/loss"] == 2.0
    assert torch.equal(submodel.scatter(shorter, message)["model"], whole)


class TopHalf(Codec):
    """Codec that sends the larger half of each vector and keeps the rest: a toy of top-k with error feedback."""

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        payload, rest = {}, {}
        for name, x in message.items():
            assert len(x) == (context.buffer_layout if name == "buffers" else context.layout).numel
            wanted = x + memory.get(f"error/{name}", 0)
            kept = torch.zeros_like(wanted, dtype=torch.bool)
            kept[wanted.abs().topk((len(x) + 1) // 2).indices] = True
            payload[name] = Packed(wanted * kept, int(kept.sum()) * 32 + len(x))
            rest[f"error/{name}"] = wanted * ~kept
        return payload, rest

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


def test_a_codec_with_memory_works_inside_the_layers_that_are_sent() -> None:
    context = setting_of(Perceptron())
    memory: dict[int, State] = {}
    link = link_of(context, TopHalf(), memory)
    first, second = context.groups
    hidden, output = torch.arange(26) < 16, torch.arange(26) >= 16
    generator = torch.Generator().manual_seed(0)
    kept_back = torch.zeros(26)
    for layer, where in ((first, hidden), (second, output), (first, hidden)):
        delta = torch.randn(26, generator=generator)
        chosen = [torch.tensor([group is layer]) for group in context.groups]
        before = sum(link.ledger.round_bits["up"].values())
        seen = link.send_up(
            3, {"model": delta}, Submodel.from_groups(context.layout, context.buffer_layout, context.groups, chosen)
        )["model"]
        memory[3] = link.commit(3)
        wanted = (delta + kept_back)[where]
        size = len(wanted)
        largest = torch.zeros(size, dtype=torch.bool)
        largest[wanted.abs().argsort(descending=True)[: size // 2]] = True
        torch.testing.assert_close(seen[where], wanted * largest)
        assert not seen[~where].any()
        assert sum(link.ledger.round_bits["up"].values()) - before == size // 2 * 32 + size
        kept_back[where] = wanted * ~largest
        torch.testing.assert_close(memory[3]["error/model"], kept_back)


def test_a_lossy_codec_leaves_divergences_and_masks_alone(make_trainer: MakeTrainer) -> None:
    """Test a run with the toy codec: the feedback is exact, and each client has its own memory."""
    algorithm = Algorithm(uplink=TopHalf(), exchange=LayerDivergence(n=1), aggregator=MaskedMean())
    trainer = make_trainer(max_rounds=4, clients_per_round=6)
    trainer.fit(Normalised(), federation(), algorithm)
    hidden, output, norm = 16, 10, 6
    halves = sum((size // 2) * 32 + size for size in (hidden, output, norm))
    up = bits_of(trainer, "up")
    assert up["scalars"] == 32 * 6 * 3
    assert up["buffers"] == 3 * 32 + 6
    # A client with several layers sends the larger half of all of them together: at least `halves`, at most one number more each.
    assert halves <= up["model"] <= halves + 32 * 2
    assert bits_of(trainer, "down")["mask"] == 6 * 3
    assert trainer.run.client_memory, "clients that sent something keep the rest"
    assert all(state["error/model"].shape == (32,) for state in trainer.run.client_memory.values())


def test_a_mask_crosses_a_lossy_codec_unharmed(make_trainer: MakeTrainer) -> None:
    """Check with the toy codec, which refuses other vectors than the model; clients' neurons hardly ever coincide."""
    algorithm = Algorithm(uplink=TopHalf(), exchange=PrunedUnits(keep=0.46), aggregator=MaskedMean())
    trainer = make_trainer(max_rounds=2)
    trainer.fit(Perceptron(), federation(), algorithm)
    # Nine numbers a client: five are sent in full, and each of the nine has a bit.
    assert bits_of(trainer, "up") == {"model": 3 * (5 * 32 + 9), "mask": 3 * 6}


# ------------------------------------------------------------------------------------------------- the choice


@settings(max_examples=40)
@given(
    n=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    order=st.permutations(range(5)),
    client=st.integers(0, 4),
    layer=st.integers(0, 1),
    factor=st.floats(1.0, 50.0),
)
@pytest.mark.matrix
def test_the_choice_of_layers(n: int, seed: int, order: list[int], client: int, layer: int, factor: float) -> None:
    context = setting_of(Perceptron())
    stacked = torch.randn(5, 26, generator=torch.Generator().manual_seed(seed))
    deltas = {k: stacked[k] for k in range(5)}
    exchange = LayerDivergence(n=n)
    uploads = collected(exchange, context, deltas)
    chosen = {k: layers_sent(upload, context) for k, upload in uploads.items()}
    for group in context.groups:
        senders = {k for k in chosen if group.name in chosen[k]}
        assert len(senders) == n, "exactly n clients must send each layer"
        lengths = {k: float(norms([group], deltas[k], context.layout)) for k in deltas}
        assert min(lengths[k] for k in senders) >= max((lengths[k] for k in set(deltas) - senders), default=0.0)
    for k, upload in uploads.items():
        assert torch.equal(upload.message["model"], deltas[k] * upload.sent["model"])
    permuted = collected(exchange, context, {k: deltas[k] for k in order})
    assert {k: layers_sent(upload, context) for k, upload in permuted.items()} == chosen
    scaled = deltas[client].clone()
    name = context.groups[layer].name
    scaled[slice(0, 16) if layer == 0 else slice(16, 26)] *= factor
    larger = collected(exchange, context, deltas | {client: scaled})
    for k in deltas:
        now = layers_sent(larger[k], context)
        assert now ^ chosen[k] <= {name}, "the other layer must not change"
        assert k != client or now >= chosen[k], "a client whose layer grew must stay chosen"
        assert k == client or now <= chosen[k], "and no other client may be added"


def test_a_client_that_is_chosen_for_nothing_keeps_its_old_state() -> None:
    context = setting_of(Perceptron())
    results = [
        replace(result(k, {"model": torch.full((26,), 1.0 + k)}), state={"age": torch.ones(1)}) for k in range(3)
    ]
    uploads = LayerDivergence(n=1).collect(results, link_of(context))
    assert {upload.result.client: list(upload.result.state) for upload in uploads} == {0: [], 1: [], 2: ["age"]}


@pytest.mark.parametrize("exchange", [DrawnLayers(n=2), DrawnClients(n=2)], ids=["layers", "clients"])
@pytest.mark.matrix
def test_draws_are_uniform_and_n(exchange: DrawnLayers | DrawnClients) -> None:
    context = setting_of(Perceptron())
    deltas = {k: torch.ones(26) for k in range(5)}
    counts = np.zeros((5, 2))
    together = 0
    for round_index in range(200):
        link = Link(
            context, Dense(), Dense(), Ledger(), {}, {}, random=lambda k, t=round_index: np.random.default_rng([t, k])
        )
        results = [result(client, {"model": delta}) for client, delta in deltas.items()]
        sent = [layers_sent(upload, context) for upload in exchange.collect(results, link)]
        table = np.array([["hidden" in layers, "output" in layers] for layers in sent])
        assert (table.sum(0) == 2).all()
        together += int((table[:, 0] == table[:, 1]).all())
        counts += table
    # 80 of 200 expected, with standard deviation 7.
    assert np.abs(counts - 80).max() < 32
    assert together == 200 if isinstance(exchange, DrawnClients) else together < 50, "each layer must have its own draw"


def test_of_equal_divergences_the_earlier_client_is_chosen() -> None:
    context = setting_of(Perceptron())
    uploads = collected(LayerDivergence(n=2), context, {k: torch.ones(26) for k in (5, 1, 4)})
    assert [bool(uploads[k].sent["model"].any()) for k in (5, 1, 4)] == [True, True, False]


def test_divergences_of_a_small_dtype_are_told_apart() -> None:
    """Check that divergences of bfloat16 numbers, of which 256 stand for all between 4 and 8, cross as float32."""
    context = replace(setting_of(Perceptron()), dtype=torch.bfloat16)
    near, far = torch.ones(26), torch.ones(26)
    far[[0, -1]] += 2**-7
    uploads = collected(LayerDivergence(n=1), context, {5: near.bfloat16(), 1: far.bfloat16()})
    assert [bool(uploads[k].sent["model"].any()) for k in (5, 1)] == [False, True]


@pytest.mark.parametrize("arrival", list(permutations([5, 1, 4])), ids=repr)
@pytest.mark.parametrize("n", [1, 2])
def test_equal_divergences_are_chosen_in_the_order_of_the_cohort(arrival: tuple[int, ...], n: int) -> None:
    """Test that whoever is chosen still has its delta, also if others with the same divergence have come before."""
    context, cohort = setting_of(Perceptron()), [4, 5, 1]

    def gather(mine: dict[int, Any]) -> dict[int, Any]:
        return {client: mine[client] for client in cohort}

    results = [result(client, {"model": torch.ones(26)}) for client in arrival]
    link = Link(context, Dense(), Dense(), Ledger(), {}, {}, gather)
    uploads = {upload.result.client: upload for upload in LayerDivergence(n=n).collect(results, link)}
    for place, client in enumerate(cohort):
        assert (uploads[client].message["model"] == float(place < n)).all()
        assert (uploads[client].sent["model"] == (place < n)).all()


def test_a_layer_is_the_mean_by_samples_over_those_that_sent_it() -> None:
    """Check a case computed by hand: three clients, two layers of one number each, n = 2."""
    context = replace(setting_of(nn.Linear(1, 1)), groups=(Group("weight", ("weight",)), Group("bias", ("bias",))))
    deltas = {0: [3.0, 0.1], 1: [-5.0, 2.0], 2: [1.0, -4.0]}
    weights = {0: 10.0, 1: 30.0, 2: 50.0}
    results = [result(k, {"model": torch.tensor(delta)}, weights[k]) for k, delta in deltas.items()]
    by_sender, by_everyone = MaskedMean(), WeightedMean()
    sums: list[dict[str, Any]] = [{}, {}]
    for upload in LayerDivergence(n=2).collect(results, link_of(context)):
        by_sender.add(sums[0], upload)
        by_everyone.add(sums[1], upload)
    # Weight: clients 0 and 1, (10·3 − 30·5)/40 = −3; bias: clients 1 and 2, (30·2 − 50·4)/80 = −1.75.
    assert by_sender.finish(sums[0])["model"].tolist() == [-3.0, -1.75]
    assert by_everyone.finish(sums[1])["model"].tolist() == pytest.approx([-120 / 90, -140 / 90])


def test_what_nobody_sent_stays_as_it_was() -> None:
    aggregator, accumulator = MaskedMean(), {}
    for client, sent in enumerate([[True, False, False], [True, True, False]]):
        message = {"model": torch.tensor([2.0, 6.0, 0.0]) * torch.tensor(sent)}
        aggregator.add(
            accumulator, Upload(result(client, {}, 1.0 + 2 * client), message, {"model": torch.tensor(sent)})
        )
    assert aggregator.finish(accumulator)["model"].tolist() == [2.0, 6.0, 0.0]
    assert not aggregator.keeps_uploads
    assert all(isinstance(total, Tensor) and total.dtype == torch.float64 for total in accumulator.values())


ALL_IN = [
    FedLDF(n=6),
    FedLDF(n=6, groups="tensor"),
    RandomLayers(n=6),
    HDFL(n=6),
    FedADP(keep=1),
    FedADP(keep=1, score="magnitude"),
    FedADP(keep=1, per_layer=True),
]


@pytest.mark.parametrize("limit", ALL_IN, ids=lambda algorithm: algorithm.name)
def test_everybody_sending_everything_is_fedavg_bit_for_bit(limit: Algorithm, make_trainer: MakeTrainer) -> None:
    average = Normalised()
    other = copy.deepcopy(average)
    make_trainer(max_rounds=4, clients_per_round=6, local_epochs=2).fit(average, federation(), FedAvg())
    make_trainer(max_rounds=4, clients_per_round=6, local_epochs=2).fit(other, federation(), limit)
    for name, value in average.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize(
    "algorithm", [FedLDF(n=1), RandomLayers(n=1), HDFL(n=1), FedADP(keep=0.4)], ids=lambda a: a.name
)
def test_running_statistics_go_with_their_layer(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    """Test one client per layer: the server's layer and its statistics must come from the same client."""
    trained: dict[int, dict[str, Tensor]] = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            trained[len(trained)] = copy.deepcopy(pl_module.state_dict())

    module = Normalised()
    start = copy.deepcopy(module.state_dict())
    make_trainer(max_rounds=1, local_steps=1, callbacks=Watch()).fit(module, federation(), algorithm)
    assert len(trained) == 3
    after = module.state_dict()
    if isinstance(algorithm.exchange, PrunedUnits):
        # Only statistics of units that moved may move on the server.
        moved = after["norm.weight"] != start["norm.weight"]
        assert torch.equal(after["norm.running_mean"] != start["norm.running_mean"], moved)
        return
    owners = {
        name: [k for k, state in trained.items() if torch.allclose(state[name], after[name], rtol=0, atol=1e-7)]
        for name in after
        if name.startswith("norm.") and name != "norm.num_batches_tracked"
    }
    assert all(len(found) == 1 for found in owners.values()), owners
    assert len({found[0] for found in owners.values()}) == 1, owners


def test_divergence_leaves_running_statistics_out() -> None:
    context = setting_of(Normalised())
    results = [
        result(k, {"model": torch.full((32,), 1.0 + k), "buffers": torch.full((6,), 100.0 - k)}) for k in range(3)
    ]
    uploads = {u.result.client: u for u in LayerDivergence(n=1).collect(results, link_of(context))}
    assert uploads[2].sent["model"].all()
    assert uploads[2].sent["buffers"].all()
    assert not uploads[0].sent["buffers"].any()


# -------------------------------------------------------------------------------------------------- what it costs


@pytest.mark.matrix
def test_bits_of_vgg9_as_in_the_paper() -> None:
    """Check 20 clients, 4 a layer: a fifth of FedAvg's uplink, and 5,760 bits of feedback."""
    module = network("vgg9", num_classes=10)
    context = setting_of(module, num_clients=50)
    d, n_clients, n, layers = 9_231_114, 20, 4, 9
    one = torch.zeros(d)
    one[::1000] = 1.0
    link = link_of(context)
    exchange = LayerDivergence(n=n)
    exchange.check(context, cohort_size=n_clients)
    for upload in exchange.collect((result(k, {"model": one}) for k in range(n_clients)), link):
        assert len(upload.message["model"]) == d
    bits = link.ledger.round_bits
    assert bits["up"]["model"] == 32 * n * d == 1_181_582_592
    assert bits["up"]["scalars"] == 32 * n_clients * layers == 5_760
    assert bits["down"]["mask"] == n_clients * layers
    assert 1 - bits["up"]["model"] / (32 * n_clients * d) == 1 - n / n_clients == 0.8


def test_statistics_of_chosen_layers_are_charged_as_buffers(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Normalised(), federation(), FedLDF(n=2))
    assert bits_of(trainer, "up") == {"model": 32 * 32 * 2, "buffers": 32 * 6 * 2, "scalars": 32 * 3 * 3}
    assert bits_of(trainer, "down") == {"model": 32 * 32 * 3, "buffers": 32 * 6 * 3, "mask": 3 * 3}


def test_the_model_may_be_charged_to_everyone(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=1)
    trainer.fit(Perceptron(), federation(), FedLDF(n=1, broadcast="all"))
    assert bits_of(trainer, "down") == {"model": 32 * 26 * 6, "mask": 3 * 2}
    assert bits_of(trainer, "up") == {"model": 32 * 26, "scalars": 32 * 3 * 2}


@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("keep", [0.05, 0.7, 0.85])
def test_bits_and_coordinates_of_pruned_neurons(keep: float, magnitude: bool, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    trace: list[dict[int, list[int]]] = []
    expected = oracle.pruned_neurons(problem(rounds=3), vector(module), keep, magnitude, trace=trace)
    score = "magnitude" if magnitude else "delta"
    trainer = make_trainer(max_rounds=3, precision="64-true")
    trainer.fit(module, federation(), FedADP(keep=keep, score=score))
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    kept = [len(sent) for sent in trace[-1].values()]
    assert bits_of(trainer, "up") == {"model": 64 * sum(kept), "mask": 6 * 3}
    assert max(kept) <= max(keep * 26, 9)


# ----------------------------------------------------------------------------------- clients that go missing


@pytest.mark.parametrize(
    ("algorithm", "reference"),
    [
        (FedLDF(n=3), lambda p, w: oracle.fedldf(p, w, n=3)),
        (RandomLayers(n=3), lambda p, w: oracle.drawn_layers(p, w, n=3)),
        (HDFL(n=3), lambda p, w: oracle.drawn_layers(p, w, n=3, layers=[list(range(26))])),
    ],
    ids=["FedLDF", "RandomLayers", "HDFL"],
)
def test_where_fewer_than_n_are_left_all_of_them_send(
    algorithm: Algorithm,
    reference: Callable[..., np.ndarray],
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = frozenset({0, 2, 3, 5})
    monkeypatch.setattr(Population, "answering", lambda self, run, selected: [k for k in selected if k not in absent])
    module = Perceptron()
    expected = reference(problem(rounds=2, cohort_size=6, absent=absent), vector(module))
    trainer = make_trainer(max_rounds=2, clients_per_round=6, precision="64-true")
    trainer.fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), expected, rtol=0, atol=1e-10)
    assert bits_of(trainer, "up")["model"] == 64 * 26 * 2


def test_a_client_whose_divergence_is_not_finite_sends_no_layer(make_trainer: MakeTrainer) -> None:
    x, y = samples(sum(SIZES))
    data = federation()
    data.setup("fit")
    x[data.client_indices[1][0]] = 1000.0
    counts: list[tuple[int, ...]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            metrics = trainer.callback_metrics
            counts.append(tuple(int(metrics[f"clients/{name}"]) for name in ("accepted", "rejected")))

    trainer = make_trainer(max_rounds=2, clients_per_round=6, callbacks=Watch())
    trainer.fit(Poisoned(), federation(train=(x, y)), FedLDF(n=6))
    assert counts == [(5, 1)] * 2, "unlike clients that are chosen for no layer, this one is not accepted"
    assert bits_of(trainer, "up") == {"model": 32 * 26 * 5, "scalars": 32 * 6 * 2}
    assert bits_of(trainer, "down") == {"model": 32 * 26 * 6, "mask": 5 * 2}


def test_one_layer_that_is_not_finite_rejects_the_whole_client() -> None:
    context = setting_of(Perceptron())
    broken = torch.full((26,), 100.0)
    broken[20] = torch.inf
    uploads = collected(LayerDivergence(n=1), context, {0: broken, 1: torch.ones(26)})
    assert uploads[1].sent["model"].all()
    assert not any(torch.isfinite(x).all() for x in uploads[0].message.values())


def test_deltas_are_let_go_once_as_soon_as_they_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    context = setting_of(Perceptron())
    alive: list[int] = []
    let_go: list[Message] = []
    let_go_of = layer_choice._without_delta
    monkeypatch.setattr(layer_choice, "_without_delta", lambda message: let_go.append(message) or let_go_of(message))

    def results() -> Any:
        for k in range(5):
            yield result(k, {"model": torch.full((26,), 1.0 + k)})

    def gather(mine: dict[int, Any]) -> dict[int, Any]:
        alive.append(len(mine))
        return mine

    exchange = LayerDivergence(n=1)
    link = Link(context, Dense(), Dense(), Ledger(), {}, {}, gather)
    stored = [upload.result.message["model"].untyped_storage().nbytes() for upload in exchange.collect(results(), link)]
    assert alive == [5]
    assert stored == [4, 4, 4, 4, 4 * 26]
    assert len(let_go) == 4


# -------------------------------------------------------------------------------------------------- composition


def test_layer_divergence_composes_with_any_rule_and_server_momentum(make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    w, m = vector(module), np.zeros(26)
    for t in range(4):
        one = problem(rounds=4, epochs=2)
        models = {k: oracle.proximal_sgd(0.5)(w, one.batches(t, k), 0.1) for k in one.cohort(t)}
        following = w.copy()
        for layer in oracle.LAYERS:
            lengths = {k: float(np.linalg.norm((y - w)[layer])) for k, y in models.items()}
            senders = oracle.the_largest(lengths, 2)
            following[layer] = np.average(
                [models[k][layer] for k in senders], axis=0, weights=[len(one.x[k]) for k in senders]
            )
        m = 0.4 * m + 0.6 * (following - w)
        w = w + 1.3 * m
    algorithm = Algorithm(
        rule=Proximal(mu=0.5),
        exchange=LayerDivergence(n=2),
        aggregator=MaskedMean(),
        steps=(Apply(), Momentum(beta=0.4, learning_rate=1.3)),
    )
    make_trainer(max_rounds=4, local_epochs=2, precision="64-true").fit(module, federation(), algorithm)
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "method",
    [pytest.param("FedLDF", marks=pytest.mark.process), pytest.param("RandomLayers", marks=pytest.mark.slow)],
)
def test_two_processes_choose_as_one(method: str, tmp_path: Path) -> None:
    """Test unequal clients with drop-outs; the counts of bits are exactly equal."""
    words, algorithm = ("--model.network", "lenet5"), f"{method} --algorithm.n 2"
    one = ran(tmp_path / "one", *words, algorithm=algorithm)
    assert any(int(row["clients/dropped"]) for row in one[0])
    two = ran(tmp_path / "two", *words, num_processes=2, algorithm=algorithm)
    agree(one, two)


# ----------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FedLDF(n=0), ["n, the number of clients", "0"]),
        (lambda: HDFL(n=-1), ["n, the number of clients", "-1"]),
        (lambda: FedLDF(broadcast="evryone"), ["'evryone'", "all", "selected"]),  # type: ignore[arg-type]
        (lambda: FedADP(keep=0), ["keep", "(0, 1]", "0"]),
        (lambda: FedADP(keep=1.2), ["keep", "(0, 1]", "1.2"]),
        (lambda: FedADP(keep=float("nan")), ["keep", "nan"]),
        (lambda: FedADP(score="magnitud"), ["'magnitud'", "'magnitude'"]),  # type: ignore[arg-type]
    ],
)
def test_hyper_parameters_outside_their_range_are_refused(make: Callable[[], Algorithm], named: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert [name for name in named if name not in str(error.value)] == [], error.value


@pytest.mark.parametrize("algorithm", [FedLDF(n=4), RandomLayers(n=4), HDFL(n=4)], ids=lambda a: a.name)
def test_n_beyond_the_cohort_is_refused_before_training(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(clients_per_round=3)
    with pytest.raises(UserError, match=r"n=4 .* \[1, 3\]"):
        trainer.fit(Perceptron(), federation(), algorithm)
    assert trainer.run.round == 0
