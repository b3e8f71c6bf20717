"""Test torch's optimisers as a step of the server: against torch itself, their state, and those that are refused."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from compared_runs import MakeTrainer, equal_states
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, Optimizer
from toys import Perceptron, Pruning, federation, reordered

from lightning_fl import UserError
from lightning_fl.aggregators import MajorityVote
from lightning_fl.algorithms import Algorithm, FedOpt
from lightning_fl.callbacks import FilterPruning
from lightning_fl.cli import main
from lightning_fl.codecs import ErrorFeedback, OneBit, Uniform
from lightning_fl.data import Digits
from lightning_fl.modules import ImageClassifier
from lightning_fl.outputs import checkpoint_file
from lightning_fl.steps import Apply, ServerOptimizer
from lightning_fl.vectors.layout import Layout

Make = Callable[[Iterable[Tensor]], Optimizer]
SHAPES = {"scale": (), "bias": (1,), "weight": (3, 2), "filters": (2, 3, 2, 2)}
ROUNDS = 4


def by_dimension(params: Iterable[Tensor]) -> Optimizer:
    """Return SGD that decays weights and no biases."""
    of = list(params)
    groups = [
        {"params": [p for p in of if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in of if p.dim() <= 1], "lr": 0.2},
    ]
    return SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Make] = {
    name: partial(getattr(torch.optim, name), lr=0.1, weight_decay=0.1)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "SGD",
    )
} | {
    "Rprop": partial(torch.optim.Rprop, lr=0.1),
    "Adam, amsgrad": partial(Adam, lr=0.1, amsgrad=True),
    "Adagrad, decay": partial(Adagrad, lr=0.1, lr_decay=0.3, initial_accumulator_value=0.1),
    "RMSprop, centred": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "SGD, groups": by_dimension,
}


def turn(layout: Layout, params: Tensor, change: Tensor) -> Any:
    server = SimpleNamespace(untrained=[])
    return SimpleNamespace(
        params=params, proposal=params + change, context=SimpleNamespace(layout=layout), server=server
    )


def changes(layout: Layout) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(layout.numel, generator=generator, dtype=torch.float64) for _ in range(ROUNDS)]


def test_every_optimiser_of_torch_is_tried_or_refused() -> None:
    named = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    kinds = {name for name, kind in named.items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert kinds - {"Optimizer", "LBFGS", "SparseAdam", "Muon"} == {name.partition(",")[0] for name in OPTIMIZERS}


@pytest.mark.parametrize("is_reordered", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rounds_are_those_of_torch_with_the_change_as_gradient(name: str, is_reordered: bool) -> None:
    """Check against an optimiser that torch keeps over all rounds; the step makes its own anew in each."""
    layout = Layout.of(reordered({key: torch.empty(shape) for key, shape in SHAPES.items()}, is_reordered))
    w = torch.linspace(-1, 1, layout.numel, dtype=torch.float64)
    theirs = {key: view.clone() for key, view in layout.views(w).items()}
    optimizer = OPTIMIZERS[name](theirs.values())
    step = ServerOptimizer(OPTIMIZERS[name])
    state = step.init(w)
    for change in changes(layout):
        for key, view in layout.views(change).items():
            theirs[key].grad = -view
        optimizer.step()
        before = w.clone(), {key: entry.clone() for key, entry in state.items()}
        given = turn(layout, w, change)
        after = step(given, state)
        assert torch.equal(w, before[0])
        assert equal_states(state, before[1]), "a step that is undone has left its state alone"
        w, state = given.proposal, after
        torch.testing.assert_close(w, layout.flatten(theirs), rtol=0, atol=1e-12)


def test_factored_rounds_are_those_of_the_paper() -> None:
    """Check Adafactor (Shazeer and Stern, ICML 2018, algorithms 4 and 5) in plain arithmetic, on a matrix and a vector."""
    layout, rate = Layout.of({"matrix": torch.empty(3, 2), "vector": torch.empty(4)}), 0.1
    w = torch.linspace(-1, 1, layout.numel, dtype=torch.float64)
    models = {key: view.clone() for key, view in layout.views(w).items()}
    rows, columns, variance = torch.zeros(3), torch.zeros(2), torch.zeros(4)
    step = ServerOptimizer(partial(Adafactor, lr=rate))
    state = step.init(w)
    for t, change in enumerate(changes(layout), start=1):
        gradients = {key: -view for key, view in layout.views(change).items()}
        decay = 1 - t**-0.8
        square = gradients["matrix"].square()
        rows = decay * rows + (1 - decay) * square.mean(1)
        columns = decay * columns + (1 - decay) * square.mean(0)
        variance = decay * variance + (1 - decay) * gradients["vector"].square()
        for key, second in (("matrix", rows[:, None] * columns / rows.mean()), ("vector", variance)):
            update = gradients[key] / second.sqrt()
            size = max(1e-3, float(models[key].square().mean().sqrt())) * min(rate, t**-0.5)
            models[key] -= size * update / max(1.0, float(update.square().mean().sqrt()))
        given = turn(layout, w, change)
        state = step(given, state)
        w = given.proposal
        torch.testing.assert_close(w, layout.flatten(models), rtol=0, atol=1e-9)


def test_the_state_has_vectors_of_the_model_and_everything_else_by_parameter() -> None:
    layout = Layout.of({key: torch.empty(shape) for key, shape in SHAPES.items()})
    states = {}
    for make in (Adam, Adafactor):
        given = turn(layout, torch.zeros(layout.numel, dtype=torch.float64), changes(layout)[0])
        states[make] = ServerOptimizer(make)(given, {})
    assert {key: tuple(entry.shape) for key, entry in states[Adam].items()} == {
        "exp_avg": (layout.numel,),
        "exp_avg_sq": (layout.numel,),
        **{f"scalars/{name}/step": () for name in SHAPES},
    }
    of_adafactor = {key: tuple(entry.shape) for key, entry in states[Adafactor].items()}
    assert of_adafactor["scalars/weight/row_var"] == (3, 1)
    assert of_adafactor["scalars/bias/variance"] == (1,)
    assert all(key.startswith("scalars/") for key in of_adafactor)


class Counting(SGD):
    """SGD that counts its steps where the state is not."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


class Numbering(SGD):
    """SGD that keeps a plain number in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (torch.optim.LBFGS, "cannot use LBFGS, which needs the loss several times in a step"),
        (torch.optim.SparseAdam, "cannot use SparseAdam .*does not support dense gradients"),
        (torch.optim.Muon, "only supports 2D parameters"),
        (partial(SGD, lr=0.0), "lr of SGD on the server must be positive, got 0.0"),
        (partial(Adafactor, lr=None), "fails|lr of Adafactor on the server must be positive, got None"),
        (partial(Adam, lr=-1.0), "Invalid learning rate: -1.0"),
        (partial(Adam, rate=1.0), "unexpected keyword argument 'rate'"),
        (lambda params: params, "must be a torch optimiser, got list"),
        (lambda params: SGD(list(params)[:1], lr=1.0), "must step all parameters that it is given"),
        (SGD([torch.zeros(2)], lr=1.0), "not callable"),
        (Counting, "cannot use Counting, which keeps numbers elsewhere than in tensors"),
        (Numbering, "cannot use Numbering, which keeps numbers elsewhere than in tensors"),
    ],
)
def test_what_the_server_cannot_use_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        FedOpt(make)
    assert "\n" not in str(caught.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "algorithm",
    [
        FedOpt(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)),
        Algorithm(uplink=Uniform(16)),
        Algorithm(uplink=ErrorFeedback(OneBit("l1", "global"))),
        Algorithm(uplink=OneBit("unit"), aggregator=MajorityVote()),
    ],
    ids=["weight decay", "random errors", "error feedback", "vote"],
)
def test_what_the_module_s_optimiser_lacks_stays(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    module = Perceptron(configure=lambda m: SGD(m.output.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    make_trainer(max_rounds=2).fit(module, federation(), algorithm)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("hidden"), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_steps_are_counted_as_torch_counts_them(
    precision: str, make_trainer: MakeTrainer, keeps_files: dict[str, Any]
) -> None:
    """Check that a run which goes on in bfloat16, whose whole numbers end at 256, still counts in float32."""
    algorithm = FedOpt(partial(torch.optim.Adam, lr=0.1))
    make_trainer(max_rounds=1, precision="32-true", **keeps_files).fit(Perceptron(), federation(), algorithm)
    trainer = make_trainer(max_rounds=2, precision=precision, **keeps_files)
    trainer.fit(Perceptron(), federation(), algorithm, ckpt_path="last")
    (state,) = [state for state in trainer.run.server.values() if state]
    counts = [entry for name, entry in state.items() if name.endswith("step")]
    assert [(count.dtype, float(count)) for count in counts] == [(torch.float32, 2.0)] * len(counts) != []


def test_factored_states_are_refused_with_pruning(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check pruning by a callback of ours, before any training, and by another, when it prunes."""
    factored, whole = Adafactor, partial(Adam, lr=0.01)
    sentence = (
        r"would remove filters, but ServerOptimizer\(optimizer=Adafactor\(\)\) keeps .*cannot follow: use another"
    )
    module = ImageClassifier("lenet5", in_channels=1, learning_rate=0.1)
    data = Digits(num_clients=3, image_size=32, client_fraction=0.1)
    trainer = make_trainer(callbacks=FilterPruning(rate=0.3, prune_epoch=1))
    with monkeypatch.context() as patched:
        patched.setattr("lightning_fl.trainer.fit_loop.train_round", None)
        with pytest.raises(UserError, match=f"FilterPruning {sentence}"):
            trainer.fit(module, data, FedOpt(factored))
    with pytest.raises(UserError, match=sentence):
        make_trainer(max_rounds=2, callbacks=Pruning(when=1)).fit(Perceptron(), federation(), FedOpt(factored))
    make_trainer(max_rounds=2, callbacks=Pruning(when=1)).fit(Perceptron(), federation(), FedOpt(whole))


def test_a_resumed_run_may_change_the_rate_and_not_the_optimiser(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    make_trainer(max_rounds=1, **keeps_files).fit(Perceptron(), federation(), FedOpt(partial(Adam, lr=0.1)))

    def resume(make: Make) -> None:
        trainer = make_trainer(max_rounds=2, **keeps_files)
        trainer.fit(Perceptron(), federation(), FedOpt(make), ckpt_path="last")

    with pytest.raises(UserError, match=r"algorithm\.steps\.1\.optimizer Adam → SGD"):
        resume(partial(SGD, lr=0.1))
    with pytest.raises(UserError, match=r"algorithm\.steps\.1\.optimizer\.amsgrad False → True"):
        resume(partial(Adam, lr=0.1, amsgrad=True))
    resume(lambda params: Adam(params, lr=0.2))
    saved = checkpoint_file.load(tmp_path / "checkpoints" / "last.ckpt")["federation"]["settings"]
    assert saved["algorithm.steps.1.optimizer.lr"] == 0.2


def test_a_run_from_python_writes_the_optimiser_with_its_options(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    algorithm = FedOpt(lambda params: Adam(params, lr=0.1), weighting="uniform")
    make_trainer(max_rounds=1, **keeps_files).fit(Perceptron(), federation(), algorithm)
    written = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert written["algorithm"] == "FedOpt"
    assert written["algorithm.server_optimizer"] == "Adam"
    assert written["algorithm.server_optimizer.lr"] == 0.1
    assert written["algorithm.weighting"] == "uniform"


@pytest.mark.usefixtures("types_of_a_new_process")
@pytest.mark.parametrize(
    "algorithm",
    [
        {"class_path": "FedOpt"},
        {"class_path": "FedOpt", "init_args": {"server_optimizer": {"class_path": "Adam", "init_args": {"lr": 0.03}}}},
        {
            "class_path": "Algorithm",
            "init_args": {"steps": ["Apply", {"class_path": "ServerOptimizer", "init_args": {"optimizer": "Adam"}}]},
        },
    ],
    ids=["default", "FedOpt", "Algorithm"],
)
@pytest.mark.matrix
def test_a_printed_configuration_gives_the_same_run(
    algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"max_rounds": 2, "clients_per_round": 2, "local_steps": 1, "enable_progress_bar": False}
    config = {
        "trainer": flags | {"default_root_dir": "first", "enable_model_summary": False},
        "algorithm": algorithm,
        "model": {"class_path": "ImageClassifier", "init_args": {"network": "linear"}},
        "data": {"class_path": "Digits", "init_args": {"num_clients": 20}},
    }
    Path("first.yaml").write_text(yaml.safe_dump(config))

    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["lightning-fl", "fit", *words])
        with suppress(SystemExit):
            main()
        out, err = capsys.readouterr()
        assert "error" not in err
        return out

    printed = said("--config", "first.yaml", "--print_config")
    Path("printed.yaml").write_text(printed)
    assert said("--config", "printed.yaml", "--print_config") == printed
    said("--config", "first.yaml")
    said("--config", "printed.yaml", "--trainer.default_root_dir", "second")
    said("--config", "first/config.yaml", "--trainer.default_root_dir", "third")
    models = [checkpoint_file.load(Path(run) / "model.ckpt")["state_dict"] for run in ("first", "second", "third")]
    assert equal_states(models[0], models[1])
    assert equal_states(models[0], models[2])


def test_the_step_is_made_once_for_all_runs() -> None:
    """Check that a step given to two algorithms wraps its optimiser once."""
    step = ServerOptimizer(partial(SGD, lr=0.5))
    assert Algorithm(steps=(Apply(), step)).steps[1] is step
    assert ServerOptimizer(step.optimizer).optimizer is step.optimizer
    assert repr(step) == "ServerOptimizer(optimizer=SGD(lr=0.5))"
