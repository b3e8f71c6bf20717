"""Test that a feature of rounds can be written in one file, with a column and a refusal, and that the round needs no change."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from compared_runs import MakeTrainer
from lightning.pytorch.callbacks import Callback
from toys import Perceptron, federation

from lightning_fl import UserError
from lightning_fl.algorithms import LocalOnly
from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Observer, Roles, Round
from lightning_fl.errors import require


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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.engine.features.append(Lossy(3))


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_feature_in_one_file(runner: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3, clients_per_round=2, callbacks=Adds(), runner=runner)
    trainer.fit(Perceptron(), federation())
    history = trainer.history
    assert history["lossy/uploads"].tolist() == [2, 4, 6]
    assert history["clients/rejected"].tolist() == [0, 1, 1]


def test_its_refusal(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"^Lossy loses uploads, and clients of LocalOnly send none\.$"):
        make_trainer(callbacks=Adds()).fit(Perceptron(), federation(), LocalOnly())
