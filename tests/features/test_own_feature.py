"""Test that a feature of rounds can be written in one file, with a column and a refusal, and that the round needs no change."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from compared_runs import MakeTrainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from toys import Perceptron, federation

from lightning_fl import UserError
from lightning_fl.algorithms import LocalOnly
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.errors import require
from lightning_fl.features.privacy import ClientPrivacy


@dataclass
class Lossy(Observer):
    """Loses every k-th upload, and reports how many have come."""

    k: int
    num_uploads: int = field(default=0, init=False)

    def around(self, roles: Roles, engine: Engine) -> Roles:
        method = engine.algorithm
        require(method.exchange.uses_link, f"Lossy loses uploads, and clients of {method.name} send none.")
        return replace(roles.watched_by(self), accept=lambda upload: roles.accept(upload) or self.reason())

    def reason(self) -> str:
        self.num_uploads += 1
        return "" if self.num_uploads % self.k else "lost"

    def end_round(self, finished: Round) -> dict[str, float]:
        return {"lossy/uploads": self.num_uploads}


class Adds(Callback):
    """Adds the feature to a fit."""

    tells_of_clients = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.engine.features.append(Lossy(3))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_feature_in_one_file(runner: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3, clients_per_round=2, callbacks=Adds(), runner=runner)
    trainer.fit(Perceptron(), federation())
    history = trainer.history
    assert history["lossy/uploads"].tolist() == [2, 4, 6]
    assert history["clients/rejected"].tolist() == [0, 1, 1]


@pytest.mark.parametrize(("public", "shows"), [(frozenset(), False), (frozenset({"lossy/uploads"}), True)])
def test_a_private_run_without_side_channels_shows_what_a_feature_declares(
    public: frozenset[str], shows: bool, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lossy, "public", public)
    privacy = ClientPrivacy(noise_multiplier=0, side_channels="drop")

    def rows_of(*callbacks: Callback) -> list[dict[str, float]]:
        trainer = make_trainer(max_rounds=2, callbacks=[Adds(), *callbacks], privacy=privacy)
        trainer.fit(Perceptron(), federation())
        return trainer.fit_loop.rows

    assert [("lossy/uploads" in row) for row in rows_of()] == [shows] * 2
    if shows:
        rows_of(EarlyStopping("lossy/uploads"))
    else:
        with pytest.raises(
            UserError, match="EarlyStopping acts on lossy/uploads, which Lossy reports of clients, without"
        ):
            rows_of(EarlyStopping("lossy/uploads"))


def test_its_refusal(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"^Lossy loses uploads, and clients of LocalOnly send none\.$"):
        make_trainer(callbacks=Adds()).fit(Perceptron(), federation(), LocalOnly())
