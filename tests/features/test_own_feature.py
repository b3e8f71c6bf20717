"""Test that a feature of rounds can be written in one file, and that the round needs no change for it."""

from dataclasses import replace
from typing import Any

import pytest
from compared_runs import MakeTrainer
from lightning.pytorch.callbacks import Callback
from toys import Perceptron, federation

from lightning_fl.engine.engine import Engine
from lightning_fl.engine.roles import Observer, Roles, Round


class EveryThird(Observer):
    """Loses every third upload, and reports how many have come."""

    def __init__(self) -> None:
        self.num_uploads = 0

    def around(self, roles: Roles, engine: Engine) -> Roles:
        return replace(roles.watched_by(self), accept=lambda upload: roles.accept(upload) or self.reason())

    def reason(self) -> str:
        self.num_uploads += 1
        return "" if self.num_uploads % 3 else "lost"

    def end_round(self, finished: Round) -> dict[str, float]:
        return {"lossy/uploads": self.num_uploads}


class Adds(Callback):
    """Adds the feature to a fit."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.engine.features.append(EveryThird())


@pytest.mark.parametrize("runner", ["serial", "stacked"])
def test_a_feature_in_one_file(runner: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3, clients_per_round=2, callbacks=Adds(), runner=runner)
    trainer.fit(Perceptron(), federation())
    history = trainer.history
    assert history["lossy/uploads"].tolist() == [2, 4, 6]
    assert history["clients/rejected"].tolist() == [0, 1, 1]
