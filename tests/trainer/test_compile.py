"""Test `trainer.compile`: steps train as without it, each shape is compiled once, and what a graph cannot hold is said."""

import copy
import csv
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from compared_runs import MakeTrainer, resumed_like_whole
from lightning.pytorch import Callback
from roster import ROSTER
from torch import Tensor, nn
from torchmetrics import MeanMetric
from toys import (
    Convolved,
    Measuring,
    Normalised,
    Perceptron,
    Pruning,
    Sizes,
    Statistics,
    Tied,
    federation,
    reordered,
    samples,
    vector,
)

from lightning_fl import FederatedTrainer
from lightning_fl.algorithms import MOON, SCAFFOLD, Algorithm, Ditto, FedAvg, FedBN
from lightning_fl.callbacks import ClientEvaluation
from lightning_fl.clients.stacked import Stacked
from lightning_fl.codecs import Cast
from lightning_fl.data import Arrays
from lightning_fl.errors import UserError
from lightning_fl.flat_module import compiled_evaluation, compiled_graphs, graph
from lightning_fl.modules import ImageClassifier
from lightning_fl.trainer.checkpointing import execution

EXACT = {"precision": "64-true", "runner": "serial", "local_epochs": 2}
SMALLER = {"FederatedDropout", "FederatedDropout-client", "FjORD", "HeteroFL", "HeteroFL-drawn"}
"""Methods whose clients train smaller networks, which are not compiled."""
NOT_STACKED = {"LocalOnly", "Ditto", "APFL", "PFedMe", "IFCA", "MOON"}
"""Methods of which no client trains in a stack."""
EVEN = partial(federation, (4, 8, 4), batch_size=4)
"""Data whose batches have one shape, since each is compiled."""


class Traced(list[Any]):
    """Traced graphs of training steps; `evaluations` has those of other steps."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[Any] = []


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Let dynamo trace the steps, but run the traced operations as they are; returns the traced graphs."""
    return trace_only(monkeypatch)


def trace_only(monkeypatch: pytest.MonkeyPatch) -> Traced:
    traced = Traced()

    def backend(captures: bool) -> Callable[[Any, Any], Any]:
        def keep(found: Any, inputs: Any) -> Any:
            (traced if torch.is_grad_enabled() else traced.evaluations).append(found)
            return found

        return keep

    monkeypatch.setattr(graph, "_backend", backend)
    monkeypatch.setattr(graph, "BACKEND", "eager")  # which needs no compiler
    return traced


def pair(
    make_trainer: MakeTrainer, module: Any, data: Any = EVEN, algorithm: Any = None, **flags: Any
) -> list[tuple[Any, FederatedTrainer]]:
    """Train copies of a module, eagerly and compiled."""
    trained = []
    for compiles in (None, True):
        fitted = copy.deepcopy(module)
        trainer = make_trainer(**{**EXACT, "compile": compiles, **flags})
        trainer.fit(fitted, data(), copy.deepcopy(algorithm))
        trained.append((fitted, trainer))
    return trained


def assert_equal(trained: list[tuple[Any, FederatedTrainer]]) -> None:
    (eager, by_eager), (compiled, by_compiled) = trained
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=0, atol=1e-12)
    columns = by_eager.callback_metrics.keys() - {"time/round_seconds"}
    assert columns == by_compiled.callback_metrics.keys() - {"time/round_seconds"}
    for name in columns:
        torch.testing.assert_close(
            by_compiled.callback_metrics[name], by_eager.callback_metrics[name], rtol=1e-9, atol=1e-12
        )


def compare_method(name: str, make_trainer: MakeTrainer) -> None:
    flags = {"clients_per_round": 4, "dropout_rate": 0.2, "straggler_rate": 0.3}
    assert_equal(pair(make_trainer, Perceptron(), ROSTER[name].federation, ROSTER[name].algorithm(), **flags))


@pytest.mark.parametrize("name", ["SCAFFOLD"])
def test_some_methods_train_as_without_the_compiler(name: str, graphs: Traced, make_trainer: MakeTrainer) -> None:
    compare_method(name, make_trainer)
    assert graphs
    assert graphs.evaluations


@pytest.mark.slow
@pytest.mark.parametrize("name", ROSTER)
def test_every_method_trains_as_without_the_compiler(name: str, graphs: Traced, make_trainer: MakeTrainer) -> None:
    compare_method(name, make_trainer)


@pytest.mark.matrix
def test_weights_in_another_order_train_as_without_the_compiler(graphs: Traced, make_trainer: MakeTrainer) -> None:
    module = Perceptron()
    for name, other in reordered(dict(module.named_parameters())).items():
        module.get_parameter(name).data = other
    assert not module.hidden.weight.is_contiguous()
    assert_equal(pair(make_trainer, module))
    assert graphs


def compare_stacks(name: str, graphs: Traced, make_trainer: MakeTrainer) -> None:
    def data() -> Any:
        data = ROSTER[name].federation()
        data.batch_size = 2  # so that the first steps of all have full minibatches
        return data

    flags = {
        "clients_per_round": 4,
        "dropout_rate": 0.2,
        "straggler_rate": 0.3,
        "runner": "stacked",
        "clients_at_once": 2,
    }
    trained = pair(make_trainer, Perceptron(), data, ROSTER[name].algorithm(), **flags)
    assert_equal(trained)
    assert graphs
    assert execution(trained[1][1].fit_loop.engine)["why_not_compiled"] == ""


@pytest.mark.parametrize("name", ["SCAFFOLD"])
@pytest.mark.matrix
def test_some_methods_train_stacks_as_without_the_compiler(
    name: str, graphs: Traced, make_trainer: MakeTrainer
) -> None:
    compare_stacks(name, graphs, make_trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROSTER if name not in NOT_STACKED | SMALLER])
def test_every_method_trains_stacks_as_without_the_compiler(
    name: str, graphs: Traced, make_trainer: MakeTrainer
) -> None:
    compare_stacks(name, graphs, make_trainer)


class Dropping(Perceptron):
    """Module that draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.output(nn.functional.dropout(torch.tanh(self.hidden(x)), training=self.training))


class Telling(Perceptron):
    """Module that logs, and returns more than its loss; one layer of it is not used."""

    def __init__(self) -> None:
        super().__init__(configure=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1))
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"train/double": 2 * loss, "train/constant": 3.0}, batch_size=len(batch[0]))
        self.log("train/most", batch[0].max(), reduce_fx="max", on_epoch=True)
        return {"loss": loss, "largest": batch[0].max()}


def in_place() -> Statistics:
    return Statistics(in_place=True)


@pytest.mark.parametrize(
    "module",
    [Normalised, Telling, *(pytest.param(made, marks=pytest.mark.slow) for made in (Tied, Dropping, in_place))],
)
@pytest.mark.matrix
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_buffers_draws_logs_and_unused_layers_are_those_of_eager_steps(
    runner: str, module: Callable[[], Any], graphs: Traced, make_trainer: MakeTrainer
) -> None:
    trained = pair(make_trainer, module(), accumulate_grad_batches=2, gradient_clip_val=0.5, runner=runner)
    assert_equal(trained)
    assert graphs
    assert execution(trained[1][1].fit_loop.engine)["why_not_compiled"] == ""


@pytest.mark.matrix
def test_a_step_is_compiled_once_for_each_shape(graphs: Traced, make_trainer: MakeTrainer) -> None:
    data = lambda: federation((8, 8, 6, 6, 5), batch_size=4)  # noqa: E731 -- batches of 4, 2 and 1
    assert_equal(pair(make_trainer, Perceptron(), data, max_rounds=3, clients_per_round=5))
    assert len(graphs) == 3
    assert len(graphs.evaluations) == 2, "of batches of 4 and 2"


class Freezing(Callback):
    """Freezes a layer that has been trained for a round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.hidden.requires_grad_(trainer.current_epoch == 0)


@pytest.mark.matrix
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_layer_that_is_frozen_later(runner: str, graphs: Traced, make_trainer: MakeTrainer) -> None:
    """Test it with values that differ from the server's, as the downlink rounds them."""
    flags = {"callbacks": [Freezing()], "max_rounds": 4, "runner": runner}
    assert_equal(pair(make_trainer, Perceptron(), algorithm=Algorithm(downlink=Cast("bfloat16")), **flags))
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("sizes", "shapes"),
    [
        ((6, 6, 6), [4, 2]),
        ((2, 2), [2]),
        ((8, 8, 6), [4]),  # of the batches of two only one client has one, and those of all after the last client's end
        ((8, 3, 3), []),
    ],
)
def test_steps_of_a_whole_stack_are_compiled_once_for_each_size(
    sizes: tuple[int, ...],
    shapes: list[int],
    graphs: Traced,
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = partial(federation, sizes, batch_size=4)
    with caplog.at_level("INFO"):
        flags = {"max_rounds": 3, "clients_per_round": len(sizes), "runner": "stacked"}
        assert_equal(pair(make_trainer, Perceptron(), data, **flags))
    assert len(graphs) == len(shapes)
    assert f"torch compiles the steps of {len(sizes)} clients at once" in caplog.text
    assert ("in which all have a full minibatch" in caplog.text) == (len(set(sizes)) > 1)


@pytest.mark.matrix
def test_stacks_of_one_size_alone_are_compiled_if_the_cohort_varies(graphs: Traced, make_trainer: MakeTrainer) -> None:
    flags = {"clients_per_round": 6, "clients_at_once": 2, "dropout_rate": 0.4, "max_rounds": 6, "runner": "stacked"}
    assert_equal(pair(make_trainer, Perceptron(), partial(federation, (4,) * 6, batch_size=4), **flags))
    assert len(graphs) == 1


@pytest.mark.matrix
def test_auto_compiles_small_stacks_of_one_size(graphs: Traced, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(clients_per_round=24, compile=True, runner="auto")
    trainer.fit(Perceptron(), federation((4,) * 24, batch_size=4))
    assert trainer.fit_loop.engine.runner == Stacked(8, may_end=True)
    assert len(graphs) == 1


@pytest.mark.matrix
def test_auto_stacks_larger_steps_of_equal_clients_if_they_are_compiled(
    graphs: Traced, make_trainer: MakeTrainer
) -> None:
    for sizes, compiles, is_stacked in (([4] * 10, True, True), ([4] * 10, None, False), ([4] * 9 + [5], True, False)):
        count = sum(sizes)
        images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        data = Arrays(
            train=(images, torch.arange(count) % 4),
            test=(images[:4], torch.arange(4)),
            partition=Sizes(tuple(sizes)),
            num_clients=10,
            batch_size=4,
        )
        module = ImageClassifier("lenet5", num_classes=4)
        trainer = make_trainer(max_rounds=1, clients_per_round=10, compile=compiles, limit_val_batches=0)
        trainer.fit(module, data)
        assert isinstance(trainer.fit_loop.engine.runner, Stacked) == is_stacked


class Watching(Callback):
    """Notes what hooks of single batches see."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.seen.append(loss.detach().clone())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen += [parameter.grad.clone() for parameter in pl_module.parameters() if parameter.grad is not None]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += outputs.values()


@pytest.mark.slow
def test_hooks_of_batches_see_the_same(graphs: Traced, make_trainer: MakeTrainer) -> None:
    seen = []
    for compiles in (None, True):
        torch.manual_seed(0)
        watching = Watching()
        make_trainer(**EXACT, compile=compiles, callbacks=[watching]).fit(Telling(), EVEN())
        seen.append(watching.seen)
    torch.testing.assert_close(*seen, rtol=0, atol=1e-12)
    assert graphs


@pytest.mark.slow
def test_personal_layers(graphs: Traced, make_trainer: MakeTrainer) -> None:
    trained = pair(make_trainer, Normalised(), algorithm=FedBN())
    assert_equal(trained)
    eager, compiled = ({k: trainer.run.clients[k] for k in trainer.run.clients} for _, trainer in trained)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-12)
    assert graphs


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_pruned_model_is_compiled_anew(runner: str, graphs: Traced, make_trainer: MakeTrainer) -> None:
    assert_equal(pair(make_trainer, Convolved(), max_rounds=3, callbacks=[Pruning(1)], runner=runner))
    assert (
        len({tuple(node.meta["example_value"].shape for node in g.graph.find_nodes(op="placeholder")) for g in graphs})
        > 1
    )


class Reading(Perceptron):
    """Module whose step depends on the round."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + self.scale())

    def scale(self) -> float:
        return self.given_round

    def on_train_epoch_start(self) -> None:
        self.given_round = 0.5 * (self.current_epoch // 2)


@pytest.mark.slow
def test_a_step_that_reads_what_changes_goes_on_eagerly_also_when_resumed(
    graphs: Traced, make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        resumed_like_whole(make_trainer, tmp_path, Reading, EVEN, stop=3, end=4, runner="serial", compile=True)
    assert "Reading trains without torch.compile from here on, because training_step reads values" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_resumed_runs_end_as_whole_ones(runner: str, graphs: Traced, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    resumed_like_whole(make_trainer, tmp_path, Normalised, EVEN, algorithm=SCAFFOLD, runner=runner, compile=True)
    assert graphs


class Reporting(Perceptron):
    """Module whose evaluation logs in many ways, and whose hooks read what it returns."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        self.log_dict({"val/double": 2 * self.loss(batch), "val/constant": 0.1}, batch_size=1)
        self.log("val/most", batch[0].max(), reduce_fx="max")
        self.log("val/draw", torch.rand(()), sync_dist=True)
        return {"outputs": self(batch[0]), "labels": batch[1]}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/outputs", outputs["outputs"].sum() + outputs["labels"].sum())


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_evaluations_log_and_return_what_eager_steps_do(
    num_loaders: int, graphs: Traced, make_trainer: MakeTrainer
) -> None:
    def data() -> Arrays:
        made = EVEN()
        single = made.val_dataloader
        made.val_dataloader = lambda: [single() for _ in range(num_loaders)]  # type: ignore[method-assign]
        return made

    assert_equal(pair(make_trainer, Reporting(), data))
    assert len(graphs.evaluations) == 2 * num_loaders, "for batches of 4 and 2"


def held_out() -> Arrays:
    """Return data of clients with validation samples of their own."""
    return Arrays(
        train=samples(48), test=samples(8, seed=1), num_clients=3, batch_size=4, eval_batch_size=4, val_fraction=0.25
    )


@pytest.mark.parametrize("algorithm", [FedAvg, FedBN, Ditto])
@pytest.mark.matrix
def test_models_of_clients_and_tests_are_compiled_too(
    algorithm: Callable[[], Any], graphs: Traced, make_trainer: MakeTrainer
) -> None:
    flags = {"callbacks": [ClientEvaluation()], "test_every_n_rounds": 1, "max_rounds": 3, "clients_per_round": 3}
    assert_equal(pair(make_trainer, Normalised(), held_out, algorithm(), **flags))
    assert len(graphs.evaluations) == 2, "one for batches of validation_step, one for those of test_step"


@pytest.mark.matrix
def test_stacks_and_moon_are_evaluated_by_graphs(graphs: Traced, make_trainer: MakeTrainer) -> None:
    for flags, algorithm in (({"runner": "stacked"}, FedAvg()), ({}, MOON())):
        graphs.clear()
        graphs.evaluations.clear()
        assert_equal(pair(make_trainer, Perceptron(), algorithm=algorithm, **flags))
        assert bool(graphs) == bool(flags)
        assert graphs.evaluations


class Itemised(Perceptron):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch).item())


class Metered(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean(self.loss(batch))
        self.log("val/loss", self.mean)


class Collecting(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", torch.stack(self.losses).mean())
        self.losses.clear()


class Remembering(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.copy_(self.loss(batch))
        self.log("val/loss", self.seen)


class Scheduled(Perceptron):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch) * (1 + self.current_epoch // 2))


class Probing(Perceptron):
    """Module that reads in every second validation what a layer computes."""

    def on_validation_start(self) -> None:
        self.outputs: list[Tensor] = []
        if self.current_epoch % 2:
            self.handle = self.hidden.register_forward_hook(lambda layer, x, output: self.outputs.append(output))

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch % 2:
            self.handle.remove()
            self.log("val/outputs", torch.cat(self.outputs).sum())


class Weighted(Perceptron):
    """Module whose validation weighs the batches by numbers of its own."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.weight = 1 + 9 * (batch_idx % 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=self.weight)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Itemised, "torch cannot compile its validation step"),
        (Metered, "torch cannot compile its validation step"),
        (Collecting, "validation_step changes 'losses' of the module"),
        (Remembering, "validation_step writes to 'seen'"),
        (Scheduled, "validation_step reads values of Python that change between its steps"),
        (Probing, "hooks of its layers see what they compute"),
        (Weighted, "validation_step reads values of Python that change between its steps"),
    ],
)
@pytest.mark.matrix
def test_evaluations_that_a_graph_cannot_hold_run_eagerly_and_a_line_says_why(
    module: Callable[[], Any],
    why: str,
    graphs: Traced,
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    flags: dict[str, Any] = {"num_sanity_val_steps": 0, "runner": "serial"}
    with caplog.at_level("INFO"):
        assert_equal(pair(make_trainer, module(), max_rounds=4, **flags))
        lines = [line for line in caplog.messages if "without torch.compile from here on" in line]
        assert len(lines) == 1
        assert f"{module.__name__} is evaluated without torch.compile from here on, because {why}" in lines[0]
        assert graphs
        _, resumed = resumed_like_whole(make_trainer, tmp_path, module, EVEN, stop=3, end=4, compile=True, **flags)
    assert why in execution(resumed.fit_loop.engine)["why_evaluated_eagerly"]


class Counting(Perceptron):
    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count = self.count + 1
        return self.loss(batch)


class Branching(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if loss.item() < 100 else 0.1 * loss


class Indexed(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) if batch_idx % 2 else 2 * self.loss(batch)


class Hooked(Perceptron):
    def on_fit_start(self) -> None:
        self.hidden.weight.register_hook(lambda gradient: 2 * gradient)


class Reducing(Perceptron):
    """Module whose logs are reduced by the mean or the maximum, in turns of rounds."""

    reduce_fx = "mean"

    def on_train_epoch_start(self) -> None:
        self.reduce_fx = "max" if self.current_epoch % 2 else "mean"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("reduced", loss.detach(), on_step=False, on_epoch=True, reduce_fx=self.reduce_fx)
        return loss


class Rescaled(Perceptron):
    """Module whose batches hold a number of the round."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (*batch, 1.0 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *samples, scale = batch
        return scale * self.loss(samples)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch[:2], batch_idx)


@pytest.mark.parametrize("module", [Reducing, Rescaled])
@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_python_values_of_logs_and_batches_that_change_are_not_those_of_the_first_step(
    runner: str, module: Callable[[], Any], graphs: Traced, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert_equal(pair(make_trainer, module(), runner=runner, max_rounds=3))
    assert "training_step reads values of Python that change between its steps" in caplog.text
    assert graphs


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Counting, "training_step changes 'count' of the module"),
        (Measuring, "torch cannot compile its training step"),
        (Branching, "torch cannot compile its training step"),
        (Indexed, "training_step reads values of Python that change between its steps"),
        (Hooked, "hooks of its parameters see their gradients"),
        (lambda: Statistics(in_place=False), "training_step replaces the buffer 'mean' instead of writing to it"),
    ],
    ids=lambda given: given.__name__ if callable(given) else "",
)
@pytest.mark.matrix
def test_what_a_graph_cannot_hold_runs_eagerly_and_a_line_says_why(
    module: Callable[[], Any], why: str, graphs: Traced, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert_equal(pair(make_trainer, module()))
    lines = [line for line in caplog.messages if "without torch.compile from here on" in line]
    assert len(lines) == 1
    assert why in lines[0]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("MOON", "MOON compares what layers read within a step"),
        ("HeteroFL", "clients of HeteroFL train networks of several sizes"),
    ],
)
def test_clients_that_are_not_compiled(
    name: str, line: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert_equal(pair(make_trainer, Perceptron(), ROSTER[name].federation, ROSTER[name].algorithm()))
    assert line in caplog.text


class Putting(Perceptron):
    """Module whose step uses an operation that has no deterministic implementation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0 * torch.zeros(4).put(torch.tensor([1]), torch.tensor([2.0])).sum()


@pytest.mark.matrix
def test_deterministic_algorithms_are_asked_for_within_graphs(graphs: Traced, make_trainer: MakeTrainer) -> None:
    assert_equal(pair(make_trainer, Perceptron(), deterministic=True))
    assert graphs
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        make_trainer(**EXACT, compile=True, deterministic=True).fit(Putting(), EVEN())
    graphs.clear()
    make_trainer(**EXACT, compile=True).fit(Putting(), EVEN())
    assert graphs, "without the flag a graph holds the operation"


class Failing(Perceptron):
    """Module whose step raises an error."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ValueError("no step")


def test_a_failed_graph_leaves_torch_as_it_was(graphs: Traced, make_trainer: MakeTrainer) -> None:
    """Test the hooks of saved tensors, which stacks use to measure their memory."""
    for module in (Failing(), Putting()):
        with pytest.raises((ValueError, RuntimeError)):
            make_trainer(**EXACT, compile=True, deterministic=True).fit(module, EVEN())
    make_trainer(runner="stacked").fit(Perceptron(), EVEN())


class Manual(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "flags", "sentence"),
    [
        (Manual, {}, "Manual makes its steps itself"),
        (Perceptron, {"runner": "lightning"}, "Lightning's own loop makes them"),
        (Perceptron, {"detect_anomaly": True}, "trainer.detect_anomaly looks into autograd's own graph"),
    ],
)
def test_refusals(module: Any, flags: dict[str, Any], sentence: str, graphs: Traced, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=sentence):
        make_trainer(compile=True, **flags).fit(module(), federation())


def test_a_missing_compiler_is_said(make_trainer: MakeTrainer) -> None:
    from torch._inductor import config

    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        make_trainer(compile=True).fit(Perceptron(), federation())


class Picky(Telling):
    """Module whose step a graph cannot hold for a batch of one sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if len(batch[0]) > 1 or output["loss"].item() < 100 else None


SEVERAL = {"serial": (Telling, Picky), "stacked": (Telling,)}  # no stack trains the second one's batch of one
UNEQUAL = partial(federation, (12, 9), batch_size=4)
"""Data whose second client, which the second process trains, has a last batch of one."""


def fit_compiled(folder: str, together: int, runner: str) -> None:
    """Fit in one of several processes; write the weights, the metrics, why steps are not compiled, and how many are traced."""
    found = []
    for made in SEVERAL[runner]:
        traced = trace_only(pytest.MonkeyPatch())
        torch.manual_seed(0)
        module, quiet = made(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = FederatedTrainer(
            **{**EXACT, "runner": runner}, **quiet, max_rounds=2, clients_per_round=2, compile=True, accelerator="cpu",
            devices=2, devices_per_client=together, default_root_dir=folder, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, UNEQUAL())
        metrics = {
            name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("time/")
        }
        why_not = execution(trainer.fit_loop.engine)["why_not_compiled"]
        found.append((vector(module).tolist(), metrics, why_not, len(traced)))
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.process
@pytest.mark.parametrize(("together", "runner"), [(1, "serial"), (2, "serial"), (1, "stacked")])
def test_two_processes_compile_and_agree_on_what_a_graph_cannot_hold(
    together: int, runner: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Test clients and batches that are divided; of a client's last batch of one, only one process has the sample."""
    processes.run(fit_compiled, str(tmp_path), together, runner, num_processes=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for made, (weights, metrics, why_not, num_traced) in zip(SEVERAL[runner], found, strict=True):
            torch.manual_seed(0)
            module, trainer = made(), make_trainer(**EXACT, clients_per_round=2)
            trainer.fit(module, UNEQUAL())
            assert num_traced
            assert ("torch cannot compile its training step" in why_not) == (made is Picky)
            assert weights == pytest.approx(vector(module).tolist(), rel=0, abs=1e-12)
            assert metrics.keys() == trainer.callback_metrics.keys() - {"time/round_seconds", "time/simulated_seconds"}
            for name in metrics.keys() - {"train/most_step"}:  # which each process has of its own rows
                assert metrics[name] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-9), name


@pytest.mark.matrix
def test_compiling_in_the_sanity_check_is_not_part_of_the_first_round(
    graphs: Traced, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(compiled_evaluation.EvaluationGraph):
        def prepare(self, batch: Any, more: Any) -> None:
            super().prepare(batch, more)
            time.sleep(1)

    monkeypatch.setattr(compiled_evaluation, "EvaluationGraph", Slow)
    trainer = make_trainer(**EXACT, compile=True, num_sanity_val_steps=-1, max_rounds=1)
    with caplog.at_level("INFO"):
        trainer.fit(Perceptron(), EVEN())
    (line,) = [line for line in caplog.messages if "Compiling the evaluation for 2 shapes of batches took" in line]
    assert caplog.messages.index(line) < min(i for i, said in enumerate(caplog.messages) if "training step for" in said)
    assert trainer.fit_loop.rows[0]["time/round_seconds"] > 0


def test_compiling_is_not_part_of_the_rounds_seconds(
    graphs: Traced, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled_graphs.CompiledGraphs, "take_times", lambda step: (1e6, 0))
    make_trainer(**EXACT, compile=True, logger=True).fit(Perceptron(), EVEN())
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert all(float(row["time/round_seconds"]) < 0 for row in csv.DictReader(file))


@pytest.mark.matrix
def test_the_seconds_of_compiling_are_said(
    graphs: Traced, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make_trainer(**EXACT, compile=True).fit(Perceptron(), EVEN())
    assert len([line for line in caplog.messages if "for one shape of batches took" in line]) == 1


@pytest.mark.process
@pytest.mark.parametrize(("precision", "runner"), [("32-true", "stacked"), ("64-true", "serial")])
def test_torchs_own_compiler(precision: str, runner: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    logging.getLogger("torch").setLevel("ERROR")
    torch.manual_seed(0)
    images, labels = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
    start = ImageClassifier("lenet5", in_channels=1, image_size=28, learning_rate=0.05)

    def data() -> Arrays:
        return Arrays(
            train=(images, labels), test=(images[:8], labels[:8]), num_classes=10, num_clients=4, batch_size=8
        )

    flags: dict[str, Any] = {"precision": precision, "runner": runner, "local_epochs": None, "local_steps": 3}
    flags["deterministic"] = precision == "64-true"
    (eager, by_eager), (compiled, by_compiled) = pair(make_trainer, start, data, **flags)
    update, distance = (
        torch.cat(
            [(a.double() - b.double()).flatten() for a, b in zip(one.parameters(), other.parameters(), strict=True)]
        )
        for one, other in ((eager, start), (compiled, eager))
    )
    tolerance = 1e-5 if precision == "32-true" else 1e-12
    assert distance.norm() <= tolerance * update.norm()
    for name in ("val/loss", "val/accuracy"):
        by_graph, by_steps = (trainer.callback_metrics[name] for trainer in (by_compiled, by_eager))
        torch.testing.assert_close(by_graph, by_steps, rtol=tolerance, atol=0)
    _, (again, _) = pair(make_trainer, start, data, **flags)
    assert all(map(torch.equal, compiled.parameters(), again.parameters()))
    resumed_like_whole(
        make_trainer,
        tmp_path,
        lambda: copy.deepcopy(start),
        data,
        FedAvg,
        stop=1,
        end=2,
        compile=True,
        **flags,
    )
