"""Test `FilterPruning` in a federation with momentum on both sides: against a plain loop, resumed, and loading its files."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compared_runs import MakeTrainer, equal_states
from lightning.pytorch import Callback
from roster import problem
from toys import Convolved, Served, read_rows, vector

from lightning_fl.algorithms import FedDUM
from lightning_fl.callbacks import FilterPruning
from lightning_fl.data import Arrays
from lightning_fl.modules import ImageClassifier
from lightning_fl.pruning import Prunable, load_pruned

method = partial(FedDUM, beta=0.6, local_beta=0.8)


def pruning(when: int = 2, every: int | None = None) -> FilterPruning:
    return FilterPruning(rate=0.5, prune_epoch=when, every_n_epochs=every, importance="magnitude")


def largest_half(w: np.ndarray) -> list[int]:
    """Return the hidden neurons that stay of h: without the ⌊h/2⌋ with the smallest weights."""
    norms = np.abs(oracle.parts(w)[0]).sum(1)
    return sorted(sorted(range(len(norms)), key=lambda j: (norms[j], j))[len(norms) // 2 :])


@pytest.mark.parametrize("runner", ["serial", "stacked"])
@pytest.mark.parametrize(("when", "every"), [(2, None), (0, None), (1, 2)])
def test_the_servers_momentum_is_cut_with_the_network(
    when: int, every: int | None, runner: Any, make_trainer: MakeTrainer
) -> None:
    """Compare with FedDUM in plain numpy, whose w and m lose the same neurons."""
    module = Convolved()
    given, w = problem(rounds=5, num_server=9), vector(module)
    m, bits = np.zeros_like(w), []
    for t in range(5):
        mask_bits = 0
        if t == when or (every and t > when and (t - when) % every == 0):
            mask_bits = 6 * len(oracle.parts(w)[1])
            kept = largest_half(w)
            w, m = oracle.without_neurons(w, kept), oracle.without_neurons(m, kept)
        target = oracle.dynamic_update(given, t, oracle.average(given, t, w, oracle.momentum_sgd(0.8)))
        m = 0.6 * m + 0.4 * (w - target)
        w = w - m
        bits.append((3 * 64 * len(w), mask_bits))
    assert len(w) == (8 if every else 14)

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            down = trainer.run.ledger.round_bits["down"]
            booked.append((down["model"], down["mask"]))

    booked: list[tuple[int, int]] = []
    trainer = make_trainer(max_rounds=5, precision="64-true", runner=runner, callbacks=[pruning(when, every), Watch()])
    trainer.fit(module, Served(9), method())
    np.testing.assert_allclose(vector(module), w, rtol=0, atol=1e-10)
    np.testing.assert_allclose(-trainer.run.server["2:Momentum"]["momentum"], m, rtol=0, atol=1e-10)
    assert booked == bits


@pytest.mark.parametrize("stop", [1, 2, 3, "in the round"])
def test_resumed_across_the_pruning(
    stop: int | str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    class Dies(Callback):
        def on_client_upload(self, trainer: Any, pl_module: Any, client: int, place: int, total: int) -> None:
            if trainer.current_epoch == 2 and stop == "in the round":
                trainer.save_checkpoint(tmp_path / "half" / "checkpoints" / "last.ckpt")
                raise RuntimeError("power failure")

    whole, resumed = Convolved(), Convolved()
    half, root = copy.deepcopy(whole), {"default_root_dir": tmp_path / "half"}
    trainer = make_trainer(max_rounds=5, callbacks=pruning(), default_root_dir=tmp_path / "whole", **keeps_files)
    trainer.fit(whole, Served(9), method())
    rounds = stop if isinstance(stop, int) else 5
    with nullcontext() if isinstance(stop, int) else pytest.raises(RuntimeError, match="power failure"):
        first = make_trainer(max_rounds=rounds, callbacks=[pruning(), Dies()], **root, **keeps_files)
        first.fit(half, Served(9), method())
    again = make_trainer(max_rounds=5, callbacks=pruning(), **root, **keeps_files)
    again.fit(resumed, Served(9), method(), ckpt_path="last")
    assert resumed.hidden.out_channels == 2
    assert equal_states(whole.state_dict(), resumed.state_dict())
    assert equal_states(trainer.run.state_dict(), again.run.state_dict())
    assert read_rows(tmp_path / "whole") == read_rows(tmp_path / "half")


class Loadable(Prunable, Convolved):
    """User's module that can load its pruned checkpoints."""


@pytest.mark.parametrize("file", ["model.ckpt", "checkpoints/last.ckpt"])
def test_what_a_pruned_run_leaves_loads_without_a_trainer(
    file: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    trained = Loadable(lr=0.05)
    trainer = make_trainer(max_rounds=3, callbacks=pruning(when=1, every=1), **keeps_files)
    trainer.fit(trained, Served(9), method())
    assert trained.hidden.out_channels == 1, "it must have been pruned twice"
    x = torch.randn(5, 3)
    for loaded in (
        load_pruned(Convolved, tmp_path / file),
        load_pruned(Loadable, tmp_path / file),
        Loadable.load_from_checkpoint(tmp_path / file),
    ):
        assert loaded.hparams["lr"] == 0.05
        assert loaded.hidden.out_channels == 1
        assert torch.equal(loaded(x), trained(x))


def test_an_image_classifier_loads_from_the_files_of_a_pruned_run(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    images, labels = torch.rand(24, 1, 28, 28), torch.arange(24) % 3
    data = Arrays(
        train=(images, labels),
        test=(images, labels),
        num_clients=4,
        num_classes=3,
        batch_size=6,
        client_fraction=0.8,
        server_fraction=0.2,
    )
    module = ImageClassifier("cnn_mnist", num_classes=3, learning_rate=0.01)
    trainer = make_trainer(max_rounds=2, callbacks=FilterPruning(rate=0.4, prune_epoch=1, num_batches=1), **keeps_files)
    trainer.fit(module, data, method())
    dense, module = ImageClassifier("cnn_mnist", num_classes=3), module.eval()
    sizes = [sum(p.numel() for p in net.parameters()) for net in (dense, module)]
    assert sizes[1] < 0.7 * sizes[0]
    for file in ("model.ckpt", "checkpoints/last.ckpt"):
        loaded = ImageClassifier.load_from_checkpoint(tmp_path / file).eval()
        assert torch.equal(loaded(images), module(images))
    assert (tmp_path / "model.ckpt").stat().st_size < 4 * sizes[1] + 20_000 < 4 * sizes[0]
