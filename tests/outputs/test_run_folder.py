"""Test the folder of a run: whether it can be written to."""

from pathlib import Path
from typing import Any

import pytest

from lightning_fl import UserError
from lightning_fl.outputs import run_folder
from lightning_fl.outputs.run_folder import require_writable


@pytest.mark.parametrize("removals", [1, 2, 5])
def test_another_program_may_remove_the_empty_folder(
    removals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened, left = tmp_path / "report", run_folder.TemporaryFile, [removals]

    def removed(*arguments: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            folder.rmdir()
        return opened(*arguments, **options)

    monkeypatch.setattr(run_folder, "TemporaryFile", removed)
    if removals < 3:
        assert require_writable(str(folder)) == [folder]
        assert folder.is_dir()
    else:
        with pytest.raises(UserError, match="cannot be written to"):
            require_writable(str(folder))
