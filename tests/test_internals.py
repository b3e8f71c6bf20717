"""Test that the installed version of Lightning has the names on which the package stands."""

from operator import attrgetter
from types import SimpleNamespace

import lightning as L  # noqa: N812
import pytest

from lightning_fl import internals


@pytest.mark.parametrize("path", internals.ATTRIBUTES)
def test_lightning_has_these_attributes(path: str) -> None:
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    owner = attrgetter(path)(SimpleNamespace(trainer=trainer, module=L.LightningModule()))
    missing = [name for name in internals.ATTRIBUTES[path] if name not in {*dir(type(owner)), *vars(owner)}]
    assert missing == [], f"Lightning {L.__version__} lacks names of lightning_fl/internals.py"


@pytest.mark.parametrize("kind", internals.METHODS, ids=lambda kind: kind.__name__)
def test_lightning_has_these_methods(kind: type) -> None:
    missing = [name for name in internals.METHODS[kind] if not callable(getattr(kind, name, None))]
    assert missing == [], f"Lightning {L.__version__} lacks names of lightning_fl/internals.py"
