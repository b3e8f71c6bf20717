"""Test modules that make their steps themselves, with one optimiser or several."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import oracle
import processes
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from compared_runs import MakeTrainer
from quiet import QUIET
from scheduled import ONLY_BY_EPOCH, SCHEDULERS, ByHand, ByHandAnew, Halves, Scheduled, check, sgd
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Subset, TensorDataset
from toys import Served, Sizes, federation, samples

from lightning_fl import FederatedTrainer, UserError, algorithms
from lightning_fl.algorithms import SCAFFOLD, Algorithm, FedAvg, FedBN, FedBuff, FedDP, FedDU, FedLDF, FedOpt, FedPAQ
from lightning_fl.callbacks import ClientEvaluation, MagnitudePruning
from lightning_fl.codecs import TopK
from lightning_fl.data import Arrays
from lightning_fl.features.loss_guard import LossGuard
from lightning_fl.flat_module.optimizers.manual_optimizers import check_manual
from lightning_fl.slots import Gradients

SIZE = 4


class Manual(L.LightningModule):
    """Base of the modules; keeps the number of steps that it sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        self.seen.append(self.global_step)

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(-1)

    def on_after_backward(self) -> None:
        self.seen.append(-2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(-3)


class GAN(Manual):
    """Generator and discriminator of points, as in Lightning's example: two optimisers, toggled one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch[0], torch.randn(len(batch[0]), 2)
        of_generator, of_discriminator = self.optimizers()
        self.toggle_optimizer(of_generator)
        made = self.discriminator(self.generator(noise))
        loss = F.binary_cross_entropy_with_logits(made, torch.ones_like(made))
        self.log("g_loss", loss)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        with of_discriminator.toggle_model():
            fake, true = self.discriminator(self.generator(noise).detach()), self.discriminator(real)
            loss = F.softplus(fake).mean() + F.softplus(-true).mean()
            self.manual_backward(loss)
            self.clip_gradients(of_discriminator, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            of_discriminator.step()
            of_discriminator.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.9)), torch.optim.Adam(
            self.discriminator.parameters(), lr=0.01
        )


class SimSiam(Manual):
    """Two views, a predictor and stopped gradients; one optimiser, which steps every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = nn.Linear(3, 4), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        first, second = (self.encoder(batch[0] + 0.1 * torch.randn_like(batch[0])) for _ in range(2))
        pairs = ((self.predictor(first), second.detach()), (self.predictor(second), first.detach()))
        loss = -sum(F.cosine_similarity(p, z).mean() for p, z in pairs) / 2
        self.manual_backward(loss)
        if batch_idx % 2 == 1:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class VAE(Manual):
    """Encoder and decoder with an optimiser each, one of them with a closure, and gradients left from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(2, 3)

    def loss(self, x: Tensor) -> Tensor:
        mean, log_scale = self.encoder(x).chunk(2, 1)
        z = mean + log_scale.exp() * torch.randn_like(mean)
        return F.mse_loss(self.decoder(z), x) + 0.1 * (mean.square() + log_scale.exp() - log_scale).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        of_encoder, of_decoder = self.optimizers()
        of_encoder.zero_grad()
        loss = self.loss(batch[0])
        self.manual_backward(loss)
        of_encoder.step()

        def closure() -> Tensor:
            of_decoder.zero_grad()
            again = self.loss(batch[0])
            self.manual_backward(again)
            return again

        of_decoder.step(closure=closure)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(0)
        self.log("val/loss", self.loss(batch[0]))
        self.log("val/accuracy", 1 / (1 + self.loss(batch[0])))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.RMSprop(self.encoder.parameters(), lr=0.01),
            torch.optim.Adagrad(self.decoder.parameters(), 0.1),
        ]


MODULES = [GAN, SimSiam, VAE]


@pytest.mark.parametrize("kind", MODULES)
def test_one_client_is_a_stock_trainer(kind: type[Manual], make_trainer: MakeTrainer, make_stock_trainer: Any) -> None:
    ours, stock = kind(), kind()
    data = federation((14,))
    trainer = make_trainer(max_rounds=1, clients_per_round=1)
    trainer.fit(ours, data, FedAvg())
    indices = data.client_indices[0]
    problem = oracle.Problem([indices], [indices], SIZE, cohort_size=1, rounds=1)
    order = [int(index) for batch, _ in problem.batches(0, 0) for index in batch]
    expected = make_stock_trainer(max_epochs=1)
    expected.fit(stock, DataLoader(Subset(TensorDataset(*samples(14)), order), batch_size=SIZE))
    assert any(not torch.equal(value, kind().state_dict()[name]) for name, value in stock.state_dict().items())
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert ours.seen == stock.seen, "hooks come in the same order, and steps of all optimisers count"
    assert trainer.run.num_steps == expected.global_step


METHODS: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "server's Adam": lambda: FedOpt(partial(torch.optim.Adam, lr=0.01)),
    "fewer bits": FedPAQ,
    "TopK": lambda: FedAvg(uplink=TopK(0.3)),
    "layers": lambda: FedLDF(n=2),
    "FedBN": FedBN,
    "personal layers": lambda: FedAvg(personal=["encoder"]),
    "server data": FedDU,
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_read_the_weights_train_and_resume(
    method: str, make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    kind = {"FedBN": GAN, "FedAvg": GAN, "TopK": SimSiam}.get(method, VAE)

    def fit(rounds: int, folder: str, **options: Any) -> Manual:
        module, algorithm = kind(), METHODS[method]()
        data = Served(9) if method == "server data" else federation()
        trainer = make_trainer(max_rounds=rounds, default_root_dir=tmp_path / folder, **keeps_files)
        trainer.fit(module, data, algorithm, **options)
        assert trainer.run.num_steps > 0
        return module

    whole = fit(3, "whole").state_dict()
    fit(2, "half")
    resumed = fit(3, "half", ckpt_path="last").state_dict()
    before = kind().state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in whole.items())
    for name, value in whole.items():
        assert torch.equal(resumed[name], value)


def test_clients_start_with_fresh_optimisers(make_trainer: MakeTrainer) -> None:
    """Compare the mean over two clients with each client's own training."""
    module, alone = VAE(), [VAE(), VAE()]
    data = federation((8, 8))
    make_trainer(max_rounds=1, clients_per_round=2).fit(module, data)
    indices = [data.client_indices[k] for k in range(2)]
    problem = oracle.Problem(indices, indices, SIZE, cohort_size=2, rounds=1)
    x = samples(16)[0]
    for client, own in enumerate(alone):
        optimizers = own.configure_optimizers()
        own.optimizers = lambda given=optimizers: given  # type: ignore[method-assign,misc]
        own.manual_backward = lambda loss: loss.backward()  # type: ignore[method-assign]
        for number, (batch, _) in enumerate(problem.batches(0, client)):
            torch.manual_seed(number)
            own.training_step([x[torch.as_tensor(batch)]], number)
    first, second = (own.state_dict() for own in alone)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2, rtol=1e-5, atol=1e-6)


class Stateless(Halves):
    """Scheduler that keeps nothing in checkpoints."""

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        assert state is None


@pytest.mark.parametrize("runner", ["serial", "lightning"])
@pytest.mark.parametrize(
    ("by_epoch", "by_step"),
    [
        ("LambdaLR", "SequentialLR"),
        ("ReduceLROnPlateau", "OneCycleLR"),
        ("Halves", "ChainedScheduler"),
        ("CyclicLR", "Halves"),
        ("stateless", "StepLR"),
    ],
)
def test_schedulers_that_a_module_steps_are_those_of_a_stock_trainer(
    by_epoch: str, by_step: str, runner: str, make_trainer: MakeTrainer, make_stock_trainer: Any
) -> None:
    of_the_user = {"Halves": Halves, "stateless": Stateless}
    made = [{**SCHEDULERS, **ONLY_BY_EPOCH, **of_the_user}[name] for name in (by_epoch, by_step)]
    check(ByHand(*made), make_trainer, make_stock_trainer, runner, ByHandAnew(*made))


class Decays(ByHand):
    """Module whose rate follows the rounds, and falls within a client's training."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), lambda o: lr_scheduler.ExponentialLR(o, 0.1))
        self.lr = lr

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [self.by_epoch(optimizer), self.by_step(optimizer)]  # type: ignore[misc]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return [super().optimizers(use_pl_optimizer)]


@pytest.mark.parametrize("runner", ["serial", "lightning"])
def test_every_client_starts_with_the_schedulers_of_the_round(
    runner: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    module = Decays()
    make_trainer(max_rounds=3, clients_per_round=2, runner=runner).fit(module, federation((8, 8)))
    rates = [step[0] for step in module.record.steps]
    assert rates == pytest.approx([0.1, 0.01, 0.1, 0.01, 0.05, 0.005, 0.05, 0.005, 0.025, 0.0025, 0.025, 0.0025])
    assert caplog.text.count("ExponentialLR steps while a client trains, and the next client begins again") == 1


def test_late_clients_train_with_the_schedulers_of_the_round_that_they_saw(make_trainer: MakeTrainer) -> None:
    module = Decays()
    make_trainer(max_rounds=4, clients_per_round=2).fit(module, federation((8, 8, 8, 8)), FedBuff(buffer_size=1))
    rates = [step[0] for step in module.record.steps]
    assert rates[1::2] == pytest.approx([rate / 10 for rate in rates[::2]]), "ExponentialLR begins anew with each"
    versions = [round(-math.log2(rate / 0.1)) for rate in rates[::2]]
    assert versions != list(range(4))
    assert all(version <= update for update, version in enumerate(versions))


def test_a_resumed_run_goes_on_with_its_schedulers(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: dict[str, Any]
) -> None:
    def fit(rounds: int, folder: str, lr: float = 0.1, **options: Any) -> Decays:
        torch.manual_seed(0)
        module = Decays(lr)
        trainer = make_trainer(max_rounds=rounds, default_root_dir=tmp_path / folder, **keeps_files)
        trainer.fit(module, federation(), **options)
        return module

    whole = fit(3, "whole")
    fit(2, "half")
    resumed = fit(3, "half", ckpt_path="last")
    assert resumed.record.steps == whole.record.steps[-len(resumed.record.steps) :]
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)
    with pytest.raises(
        UserError, match=r"StepLR cannot go on with other rates .*, because its rates depend on where the"
    ):
        fit(4, "half", lr=0.2, ckpt_path="last")


def test_clients_are_not_fine_tuned_at_a_rate_that_the_module_moves(make_trainer: MakeTrainer) -> None:
    data = Arrays(train=samples(40), test=samples(10, seed=1), num_clients=6, partition=Sizes(), val_fraction=0.2)
    evaluation = ClientEvaluation(finetune_epochs=1, finetune_lr=0.1)
    with pytest.raises(UserError, match=r"finetune_lr is 0\.1, but Decays steps its schedulers itself"):
        make_trainer(callbacks=evaluation).fit(Decays(), data)


def test_a_scheduler_that_cannot_go_on_with_the_optimizers_is_refused(make_trainer: MakeTrainer) -> None:
    def of_another(optimizer: Any) -> Any:
        return lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 1)

    class Stepless:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with pytest.raises(
        UserError, match=r"Stepless of \w+.configure_optimizers doesn't follow PyTorch's LRScheduler API"
    ):
        make_trainer().fit(Scheduled(sgd, Stepless, Halves), federation())
    for kind in (ByHand, Scheduled):
        first: Any = [] if kind is ByHand else [sgd]
        for make, sentence in (
            (lambda _: object(), r"object of \w+.configure_optimizers has no state_dict or load_state_dict"),
            (of_another, r"StepLR of \w+.configure_optimizers is attached with an optimizer that wasn"),
        ):
            with pytest.raises(UserError, match=sentence):
                make_trainer().fit(kind(*first, make, Halves), federation())


def test_what_does_not_reach_manual_steps_is_refused(make_trainer: MakeTrainer) -> None:
    class Late(VAE):
        def on_train_epoch_end(self) -> None:
            self.optimizers()[0].step()  # type: ignore[index,union-attr]

    class Nothing(VAE):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            return None

    for flags, sentence in (
        ({"accumulate_grad_batches": 2}, "which accumulate_grad_batches=2 does not reach: leave it out"),
        ({"gradient_clip_val": 0.5}, "which gradient_clip_val=0.5 does not reach"),
        ({"client_optimizer": "sgd"}, "which client_optimizer=sgd does not reach"),
        ({"loss_guard": LossGuard(clients=5.0)}, r"which loss_guard=LossGuard\(clients=5.0.* does not reach"),
        ({"runner": "stacked"}, "runner 'stacked' cannot train VAE, which makes its steps itself"),
    ):
        with pytest.raises(UserError, match=sentence):
            make_trainer(**flags).fit(VAE(), federation())
    with pytest.raises(
        UserError, match=r"VAE has automatic_optimization = False, so .* needs the gradients or makes the steps"
    ):
        make_trainer().fit(VAE(), federation(), SCAFFOLD())
    with pytest.raises(UserError, match=r"so it makes .* FedDP \(Thresholded\) needs the gradients or makes the steps"):
        make_trainer().fit(VAE(), federation(), FedDP(FedAvg(), variant="threshold"))
    with pytest.raises(UserError, match="Late steps an optimizer outside a client's training"):
        make_trainer().fit(Late(), federation())
    with pytest.warns(UserWarning, match="training_step of Nothing made no step of an optimizer"):
        make_trainer().fit(Nothing(), federation())


@pytest.mark.long
def test_every_method_is_allowed_or_refused_in_a_sentence() -> None:
    """Those that are allowed make the steps of the module's own optimiser in all of their trainings."""
    allowed = set()
    for name in algorithms.__all__:
        try:
            method = getattr(algorithms, name)()
        except (TypeError, UserError):
            continue
        parts = [*method.rules(), *method.personal]
        if any(part.reads != Gradients.NONE or part.own_step or getattr(part, "has_phases", False) for part in parts):
            with pytest.raises(UserError, match="VAE has automatic_optimization = False"):
                check_manual(VAE(), method.name, parts, {})
        else:
            check_manual(VAE(), method.name, parts, {})
            allowed.add(name)
    assert {"FedAvg", "FedOpt", "FedDU", "FedLDF", "FedBN", "FedPAQ"} <= allowed
    assert not {"SCAFFOLD", "FedProx", "FedNova", "FedAdam", "FedDUM", "Ditto", "APFL", "FedRep"} & allowed


def test_a_pruning_mask_holds(make_trainer: MakeTrainer) -> None:
    module = VAE()
    make_trainer(callbacks=MagnitudePruning(0.5, prune_epoch=0)).fit(module, federation())
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert int((weights == 0).sum()) >= len(weights) // 2 - 2


def train(folder: str, num_processes: int) -> None:
    module = GAN()
    trainer = FederatedTrainer(
        **QUIET,
        max_rounds=2,
        clients_per_round=4,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        devices=num_processes,
    )
    trainer.fit(module, federation(), FedAvg())
    if trainer.is_global_zero:
        torch.save(module.state_dict(), Path(folder) / "model.pt")


@pytest.mark.process
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    found = []
    for count in (1, 2):
        (folder := tmp_path / str(count)).mkdir()
        processes.run(train, str(folder), count, num_processes=count)
        found.append(torch.load(folder / "model.pt"))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)
