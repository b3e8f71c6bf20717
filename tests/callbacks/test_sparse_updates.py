"""Test sparse updates in a stock `L.Trainer`, against a hand-written loop; under DDP; and in a federation."""

import pickle
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import processes
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fl import FederatedTrainer, UserError
from lightning_fl.callbacks import MagnitudePruning, SparseUpdates
from lightning_fl.coding.top_k import positions_bits
from lightning_fl.data import Arrays
from lightning_fl.pruning import Plan, prune

D = 4 * 3 + 3 + 3 + 1
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


class Regression(L.LightningModule):
    """Module x (B, 4) → (B, 1)."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True).sin()


def loader() -> DataLoader:
    return DataLoader(TensorDataset(*samples()), batch_size=6)


def by_hand(
    optimizer_name: str, k: int, epochs: int, leader: str = "", feedback: bool = False, every: int = 1
) -> tuple[Tensor, int]:
    """Train a loop whose updates are undone coordinate by coordinate; return the model and the number of moments."""
    module = Regression(optimizer_name)
    optimizer, params = module.configure_optimizers(), list(module.parameters())
    residual = torch.zeros(D)
    names: list[str] = []

    def vector(name: str) -> Tensor:
        parts = [p if not name else optimizer.state[p].get(name, torch.zeros_like(p)) for p in params]
        return torch.cat([x.detach().flatten() for x in parts]).clone()

    for _ in range(epochs):
        for step, batch in enumerate(loader()):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            if step % every == 0:
                before = {name: vector(name) for name in ("", "momentum_buffer", "exp_avg", "exp_avg_sq")}
            optimizer.step()
            if (step + 1) % every and step + 1 < len(loader()):
                continue
            names = [name for name in before if not name or name in optimizer.state[params[0]]]
            change = vector(leader) - before[leader] + (residual if not leader else 0)
            kept = sorted(range(D), key=lambda i: (-abs(change[i].item()), i))[:k]
            for name in names:
                new = vector(name) + (residual if not name else 0)
                residual = new - before[""] if not name and feedback else residual
                for i in kept:
                    before[name][i] = new[i]
                    residual[i] = 0 if not name else residual[i]
                start = 0
                for p in params:
                    target = p.data if not name else optimizer.state[p][name]
                    target.copy_(before[name][start : start + p.numel()].view_as(p))
                    start += p.numel()
    return vector(""), len(names)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "mask", "leader"),
    [
        ("sgd", "parameters", ""),
        ("momentum", "parameters", ""),
        ("momentum", "first_moment", "momentum_buffer"),
        ("adam", "parameters", ""),
        ("adam", "first_moment", "exp_avg"),
        ("adam", "second_moment", "exp_avg_sq"),
    ],
)
def test_matches_a_hand_written_loop(optimizer: str, mask: Any, leader: str, feedback: bool) -> None:
    callback = SparseUpdates(alpha=0.2, mask=mask, error_feedback=feedback)
    module = Regression(optimizer)
    trainer = L.Trainer(max_epochs=3, callbacks=callback, **QUIET)
    trainer.fit(module, loader())
    k = 3  # ⌊0.2 · 19⌋
    expected, num_vectors = by_hand(optimizer, k, 3, leader, feedback)
    assert torch.allclose(flat(module), expected, rtol=0, atol=1e-6)
    bits = 12 * (num_vectors * 32 * k + positions_bits(k, D))
    assert callback.sent_bits == bits
    assert trainer.callback_metrics["sparse/bytes"] == bits / 8


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_an_update_is_of_several_steps(optimizer: str, feedback: bool) -> None:
    callback = SparseUpdates(alpha=0.2, error_feedback=feedback, every_n_steps=3)
    module = Regression(optimizer)
    L.Trainer(max_epochs=3, callbacks=callback, **QUIET).fit(module, loader())  # of 4 batches: 3 steps and 1
    expected, num_vectors = by_hand(optimizer, 3, 3, feedback=feedback, every=3)
    assert torch.allclose(flat(module), expected, rtol=0, atol=1e-6)
    assert callback.sent_bits == 6 * (num_vectors * 32 * 3 + positions_bits(3, D))


def test_a_training_that_ends_within_an_epoch_ends_with_an_update() -> None:
    callback, module = SparseUpdates(alpha=0.2, every_n_steps=3), Regression("sgd")
    trainer = L.Trainer(max_epochs=-1, max_steps=2, callbacks=callback, **QUIET)
    before = flat(module)
    trainer.fit(module, loader())
    bits = 32 * 3 + positions_bits(3, D)
    assert int((flat(module) != before).sum()) == 3
    assert callback.sent_bits == bits
    assert trainer.callback_metrics["sparse/bytes"] == bits / 8


class Pair(L.LightningModule):
    """Two regressions with one optimiser each, which alternate in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.members = nn.ModuleList([Regression("adam"), Regression("momentum")])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for member, optimizer in zip(self.members, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(member.training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [member.configure_optimizers() for member in self.members]


@pytest.mark.parametrize("every", [1, 3])
def test_every_optimiser_has_its_own_mask_and_remainder(every: int) -> None:
    pair = Pair()
    callback = SparseUpdates(alpha=0.2, error_feedback=True, every_n_steps=every)
    L.Trainer(max_epochs=2, callbacks=callback, **QUIET).fit(pair, loader())
    for member, name in zip(pair.members, ["adam", "momentum"], strict=True):
        assert torch.allclose(flat(member), by_hand(name, 3, 2, feedback=True, every=every)[0], rtol=0, atol=1e-6)


class Watched(Pair):
    """Pair that notes how many numbers of each member a batch has changed, and pickles a callback within it."""

    def __init__(self, callback: L.Callback) -> None:
        super().__init__()
        self.callback, self.changed = callback, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        before = [flat(member) for member in self.members]
        super().training_step(batch, batch_idx)
        self.changed += [int((flat(m) != b).sum()) for m, b in zip(self.members, before, strict=True)]
        pickle.dumps(self.callback)


def test_the_next_optimiser_and_averages_see_the_sparse_step() -> None:
    average, sparse = EMAWeightAveraging(decay=0.5), SparseUpdates(alpha=0.2)
    pair = Watched(sparse)
    start = flat(pair)
    L.Trainer(max_steps=2, callbacks=[average, sparse], **QUIET).fit(pair, loader())
    assert pair.changed == [3, 3]
    assert int((flat(average._average_model.module) != start).sum()) == 6


class WithUnusedLayer(Regression):
    """A regression with a layer that training_step does not use; it stands before the others in the optimiser."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.unused = nn.Linear(5, 2)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer]([*self.unused.parameters(), *self.net.parameters()])


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("optimizer", "mask", "leader"),
    [
        ("momentum", "first_moment", "momentum_buffer"),
        ("adam", "parameters", ""),
        ("adam", "second_moment", "exp_avg_sq"),
    ],
)
def test_a_parameter_without_gradient_leaves_the_others_masked_and_counted(
    optimizer: str, mask: Any, leader: str, every: int, feedback: bool
) -> None:
    callback = SparseUpdates(alpha=3.5 / (D + 12), mask=mask, error_feedback=feedback, every_n_steps=every)
    module = WithUnusedLayer(optimizer)
    unused = flat(module.unused)
    L.Trainer(max_epochs=2, callbacks=callback, **QUIET).fit(module, loader())
    expected, num_vectors = by_hand(optimizer, 3, 2, leader, feedback, every)
    assert torch.allclose(flat(module.net), expected, rtol=0, atol=1e-6)
    assert torch.equal(flat(module.unused), unused)
    num_updates = {1: 8, 3: 4}[every]
    assert callback.sent_bits == num_updates * (num_vectors * 32 * 3 + positions_bits(3, D + 12))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def fit_with(callbacks: list[Any], optimizer: str = "adam") -> Tensor:
    module = Regression(optimizer)
    L.Trainer(max_epochs=2, callbacks=callbacks, **QUIET).fit(module, loader())
    return flat(module)


def test_alpha_one_changes_nothing() -> None:
    plain = fit_with([])
    assert torch.equal(fit_with([SparseUpdates(alpha=1.0)]), plain)
    assert torch.equal(fit_with([SparseUpdates(alpha=1.0, error_feedback=True)]), plain)
    assert not torch.allclose(fit_with([SparseUpdates(alpha=0.5)]), plain, atol=1e-3)


def test_bad_input_is_refused() -> None:
    with pytest.raises(UserError, match=r"alpha, .* \(0, 1\], got 0"):
        SparseUpdates(alpha=0)
    with pytest.raises(UserError, match="'second' is unknown; did you mean 'second_moment'"):
        SparseUpdates(mask="second")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="every_n_steps must be a whole number of at least 1, got 0"):
        SparseUpdates(every_n_steps=0)
    with pytest.raises(UserError, match="needs a moment that SGD does not keep"):
        fit_with([SparseUpdates(mask="second_moment")], "sgd")


@pytest.mark.parametrize(("every", "steps"), [(1, 8), (3, 8), (3, 6)])  # 6 steps end within an epoch and an update
def test_resumes_with_what_was_left_out(every: int, steps: int, tmp_path: Path) -> None:
    x, y = samples()
    # Lightning resumes an epoch at the loader's first batch, so all batches are equal here.
    batches = DataLoader(TensorDataset(x[:6].repeat(4, 1), y[:6].repeat(4, 1)), batch_size=6)
    settings: dict[str, Any] = {"alpha": 0.2, "error_feedback": True, "every_n_steps": every}
    whole, counted = Regression("adam"), SparseUpdates(**settings)
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="half", every_n_train_steps=steps, save_top_k=-1)
    flags = {**QUIET, "enable_checkpointing": True, "max_epochs": 4, "default_root_dir": tmp_path}
    L.Trainer(callbacks=[counted, checkpoint], **flags).fit(whole, batches)
    resumed, callback = Regression("adam"), SparseUpdates(**settings)
    L.Trainer(callbacks=callback, **flags).fit(resumed, batches, ckpt_path=tmp_path / "half.ckpt")
    assert callback.sent_bits == counted.sent_bits
    assert torch.equal(flat(whole), flat(resumed))


@pytest.mark.parametrize("resumed", [False, True])
def test_what_was_left_out_is_cut_with_the_network(resumed: bool, tmp_path: Path) -> None:
    callback, left_out = SparseUpdates(0.2, error_feedback=True), {}
    kept = torch.tensor([0, 2])
    plan = Plan(axes={"net.0.weight": {0: kept}, "net.0.bias": {0: kept}, "net.2.weight": {1: kept}})

    class Cut(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                left_out["before"] = callback.state_dict()["updates"][0]["left_out"]
                prune(pl_module, plan, trainer.optimizers)

        def on_before_optimizer_step(self, *arguments: Any) -> None:
            if "before" in left_out:
                left_out.setdefault("after", callback.state_dict()["updates"][0]["left_out"])

    if resumed:
        first = L.Trainer(max_epochs=1, callbacks=SparseUpdates(0.2, error_feedback=True), **QUIET)
        first.fit(Regression("adam"), loader())
        first.save_checkpoint(tmp_path / "half.ckpt")
    trainer = L.Trainer(max_epochs=2, callbacks=[callback, Cut()], **QUIET)
    trainer.fit(Regression("adam"), loader(), ckpt_path=tmp_path / "half.ckpt" if resumed else None)
    weight, bias, output, last = left_out["before"].split([12, 3, 3, 1])
    assert left_out["before"].any()
    parts = [weight.view(3, 4)[kept].flatten(), bias[kept], output[kept], last]
    assert torch.equal(left_out["after"], torch.cat(parts))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("prunes_first", [True, False])
def test_what_was_left_out_of_pruned_weights_does_not_bring_them_back(prunes_first: bool, every: int) -> None:
    callbacks = [MagnitudePruning(0.5, prune_epoch=2), SparseUpdates(0.2, error_feedback=True, every_n_steps=every)]
    module = Regression("adam")
    trainer = L.Trainer(max_epochs=4, callbacks=callbacks if prunes_first else callbacks[::-1], **QUIET)
    trainer.fit(module, loader())
    assert int(flat(module).count_nonzero()) == trainer.callback_metrics["prune/kept"]


@pytest.mark.parametrize("every", [1, 3])
def test_what_was_left_out_follows_parameters_that_are_unfrozen_and_frozen(every: int) -> None:
    class Thaw(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net[0].weight.requires_grad_(trainer.current_epoch > 0)
            pl_module.net[2].bias.requires_grad_(trainer.current_epoch < 2)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            left_out.append(callback.state_dict()["updates"][0]["left_out"])

    left_out: list[Tensor] = []
    callback, module = SparseUpdates(0.2, error_feedback=True, every_n_steps=every), Regression("sgd")
    L.Trainer(max_epochs=3, callbacks=[Thaw(), callback], **QUIET).fit(module, loader())
    assert [len(x) for x in left_out] == [D - 12, D, D - 1]
    assert flat(module).isfinite().all()


class Closure(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_steps_of_several_gradients_are_refused() -> None:
    trainer = L.Trainer(max_epochs=1, callbacks=SparseUpdates(), **QUIET)
    with pytest.raises(UserError, match="LBFGS computes several gradients within a step: use another"):
        trainer.fit(Closure("sgd"), loader())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_makes_every_local_step_of_a_federation_sparse(optimizer: str) -> None:
    x, y = samples()
    changed = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.before = flat(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            changed.append(int((flat(pl_module) != self.before).sum()))

    callback = SparseUpdates(0.2, error_feedback=True)
    trainer = FederatedTrainer(
        max_rounds=2, clients_per_round=2, num_sanity_val_steps=0, callbacks=[callback, Watch()], **QUIET
    )
    trainer.fit(Regression(optimizer), Arrays(train=(x, y), test=(x[:4], y[:4]), num_clients=2, batch_size=6))
    assert len(changed) == 2 * 2 * 2
    assert max(changed) <= 3
    assert callback.sent_bits == 8 * ((3 if optimizer == "adam" else 1) * 32 * 3 + positions_bits(3, D))


class SavesInTheSecondRound(L.Callback):
    def on_client_upload(self, trainer: Any, pl_module: Any, *upload: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "within.ckpt")


def test_a_round_that_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    x, y = samples()
    bits = []
    for resumes in (False, True):
        callback = SparseUpdates(0.2)
        trainer = FederatedTrainer(
            max_rounds=3,
            clients_per_round=2,
            num_sanity_val_steps=0,
            callbacks=[callback, SavesInTheSecondRound()],
            default_root_dir=tmp_path,
            **QUIET,
        )
        data = Arrays(train=(x, y), test=(x[:4], y[:4]), num_clients=2, batch_size=6)
        trainer.fit(Regression("sgd"), data, ckpt_path=tmp_path / "within.ckpt" if resumes else None)
        bits.append(callback.sent_bits)
    assert bits[0] == bits[1] == 3 * 2 * 2 * (32 * 3 + positions_bits(3, D))


def test_a_federation_exchanges_by_itself() -> None:
    trainer = FederatedTrainer(max_rounds=1, clients_per_round=1, callbacks=SparseUpdates(every_n_steps=2), **QUIET)
    with pytest.raises(UserError, match="SparseUpdates needs every_n_steps 1 in a federation, got 2"):
        trainer.fit(Regression("sgd"), Arrays(train=samples(), test=samples(), num_clients=2))


def train_in_two_processes(folder: Path) -> None:
    """Train in one of the two processes."""
    module = Regression("adam")
    callback = SparseUpdates(0.2, error_feedback=True)
    trainer = L.Trainer(max_epochs=2, callbacks=callback, devices=2, strategy="ddp", **QUIET)
    trainer.fit(module, loader())
    mine = flat(module)
    all_of_them = trainer.strategy.all_gather(mine)
    assert torch.equal(all_of_them[0], all_of_them[1])
    (folder / str(trainer.global_rank)).write_text(f"{callback.sent_bits} {float(mine.abs().sum())}")


@pytest.mark.process
def test_two_processes_of_a_stock_trainer_stay_alike(tmp_path: Path) -> None:
    processes.run(train_in_two_processes, tmp_path, num_processes=2)
    results = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert len(results) == 2
    assert results[0] == results[1]
    assert int(results[0][0]) == 4 * (3 * 32 * 3 + positions_bits(3, D))  # two of the four batches each, twice
