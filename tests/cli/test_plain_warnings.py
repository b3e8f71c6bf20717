"""Test that warnings of this package are sentences on the command line, and others as they were."""

import os
import warnings

import pytest

from lightning_fl.callbacks import energy_meter
from lightning_fl.cli import federated_cli, main
from lightning_fl.modules import classifier
from lightning_fl.personal import personal_norms


def test_own_warnings_have_no_path_while_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def run(args: list[str]) -> None:
        files = [str(module.__file__) for module in (personal_norms, energy_meter, classifier, os)]
        said.extend(warnings.formatwarning(UserWarning("It is so."), UserWarning, file, 7) for file in files)

    before = warnings.formatwarning
    monkeypatch.setattr(federated_cli, "FederatedCLI", run)
    main(["fit", "--trainer.max_rounds=1"])
    assert said[:3] == ["Warning: It is so.\n"] * 3
    assert said[3] == before(UserWarning("It is so."), UserWarning, str(os.__file__), 7)
    assert warnings.formatwarning is before
