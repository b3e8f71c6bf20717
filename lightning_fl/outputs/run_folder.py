"""Folder of a run: names of its files, a check that it is writable, and the treatment of an earlier run's files.

`lightning-fl report` uses this module without Lightning, which is imported only when a run writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import yaml

from lightning_fl.checks import as_number
from lightning_fl.errors import UserError
from lightning_fl.outputs.files import copy, is_own_folder, replacing, writing
from lightning_fl.outputs.losses import say_lost

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from lightning_fl.outputs.metrics_csv import RoundCSVLogger

LAST = Path("checkpoints") / "last.ckpt"
PREVIOUS = LAST.with_name("previous.ckpt")
EXPORT = "model.ckpt"
METRICS = "metrics.csv"
HPARAMS = "hparams.yaml"
CONFIG = "config.yaml"
SETTINGS = "settings.yaml"
UNKNOWN = "unknown"
"""Value in settings.yaml of an argument that the object does not keep."""
COMMUNICATION = "communication.json"
CLIENTS = "clients.csv"
DAMAGED = "metrics-damaged.csv"
FILES = (METRICS, CLIENTS, DAMAGED, COMMUNICATION, HPARAMS, CONFIG, SETTINGS, EXPORT, LAST.parent)
WRITTEN = (METRICS, CLIENTS, COMMUNICATION, HPARAMS, CONFIG, SETTINGS, EXPORT, LAST, PREVIOUS)
"""Files that a run writes."""


class RunFolder:
    """Folder that a fit writes to; an earlier run's files stay in it until the fit writes its first file.

    Attributes:
        is_used: True if the fit writes files.
        first_round: first round of the fit, 0 unless it resumes a run.
    """

    def __init__(
        self, root: str, loggers: Sequence[Logger], saves_checkpoints: bool, ckpt_path: str | os.PathLike[str] | None
    ) -> None:
        """Describe the folder of a fit.

        Args:
            root: the folder.
            loggers: loggers of the fit.
            saves_checkpoints: True if the fit saves checkpoints.
            ckpt_path: checkpoint that the fit resumes; None if it begins.
        """
        self.is_used = bool(loggers) or saves_checkpoints
        self.first_round = 0
        self._root, self._loggers, self._ckpt_path = root, loggers, ckpt_path
        self._is_ours = self._lacks_rows = False

    def claim(self) -> None:
        """Move an earlier run aside, or drop a resumed run's rows of the rounds to come.

        A run that is resumed in another folder copies its rows and configurations to it. Called just before the first file is
        written, so that a command that fails in its first round changes nothing.
        """
        if self._is_ours or not self.is_used:
            return
        self._is_ours = True
        with writing(self._root):
            if not self.goes_on_here:
                set_earlier_run_aside(self._root)
                for config in () if self._home is None else configs_of_fits(self._home):
                    copy(config, Path(self._root, config.name))
            elif self._lacks_rows and Path(self._root, METRICS).is_file():
                copy(Path(self._root, METRICS), Path(self._root, DAMAGED))
                say_lost(f"The damaged {METRICS} was copied to {DAMAGED}.")
        if self._home is not None:
            from lightning_fl.outputs.clients.rows import keep_rows_before

            keep_rows_before(self.first_round, self._home / CLIENTS, Path(self._root, CLIENTS))
            for logger in self.csv_loggers:
                logger.rewrite()

    def begin(self, first_round: int, num_rows: int | None) -> None:
        """Begin with the rows of the resumed run, which `claim` writes, and say how many are lost.

        Args:
            first_round: first round of the fit.
            num_rows: number of rows that the resumed run had logged; None for a run that begins.
        """
        self.first_round = first_round
        for logger in self.csv_loggers:
            if self._home is None:
                logger.begin()
                continue
            resumed = logger.resume(self._home / METRICS, first_round) or 0  # None in processes that write nothing
            self._lacks_rows = num_rows is not None and resumed < num_rows
            if self._lacks_rows:
                say_lost(
                    f"{self._home / METRICS} lacks {(num_rows or 0) - resumed} of the {num_rows} rows that the run logged in its "
                    f"first {first_round} rounds; the run goes on without them."
                )

    @property
    def num_rows(self) -> int:
        """Number of rows of metrics.csv that the run has logged."""
        return sum(logger.num_rows for logger in self.csv_loggers)

    @property
    def csv_loggers(self) -> list[RoundCSVLogger]:
        """Loggers of metrics.csv: one, or none."""
        from lightning_fl.outputs.metrics_csv import RoundCSVLogger

        return [logger for logger in self._loggers if isinstance(logger, RoundCSVLogger)]

    def earlier_rows(self) -> list[dict[str, float]]:
        """Return the rows of the rounds before `first_round`, of a run that the fit resumes."""
        if self._home is None:
            return []
        from lightning_fl.outputs.metrics_csv import rows_before

        rows = rows_before(self.first_round, self._home / METRICS)[1]
        numbers = [{name: as_number(value) for name, value in row.items() if value} for row in rows]
        return [row | {name: int(row[name]) for name in ("round", "step") if name in row} for row in numbers]

    @property
    def goes_on_here(self) -> bool:
        """True if the folder contains the run that the fit resumes."""
        return self._home is not None and self._home == Path(self._root).resolve()

    @property
    def _home(self) -> Path | None:
        """Folder of the run that the fit resumes: the checkpoint's if it has rows, else this one; None if it resumes none."""
        if self._ckpt_path is None:
            return None
        folder = Path(self._ckpt_path).resolve().parent
        folder = folder.parent if folder.name == LAST.parent.name else folder
        return folder if (folder / METRICS).is_file() else Path(self._root).resolve()


def config_name(root: str | os.PathLike[str], resumed: bool, first: str = CONFIG) -> str:
    """Return the name for the configuration of a fit: config.yaml, config-2.yaml for the fit that resumes it, and so on.

    Args:
        root: folder of the run.
        resumed: True if the fit resumes a run.
        first: name for the fit that begins the run, `settings.yaml` of a fit from Python.
    """
    if not resumed:
        return first
    last = configs_of_fits(root)[-1:]
    return _fit_name(2 if not last else 1 + _fit_number(last[0]), first)


def configs_of_fits(root: str | os.PathLike[str]) -> list[Path]:
    """Return the configurations or settings of a run: of the fit that began it, then of those that resumed it."""
    paths = [path for first in (CONFIG, SETTINGS) for path in Path(root).glob(f"{Path(first).stem}*.yaml")]
    return sorted(filter(_fit_number, paths), key=_fit_number)


def _fit_number(config: Path) -> int:
    """Return the number of the fit that wrote a configuration, from 1; 0 for a file of another name."""
    stem, _, number = config.stem.partition("-")
    fit_number = int(number) if number.isdecimal() else 1
    return fit_number if config.name == _fit_name(fit_number, f"{stem}.yaml") else 0


def _fit_name(number: int, first: str) -> str:
    return first if number == 1 else f"{Path(first).stem}-{number}.yaml"


def write_settings(root: str | os.PathLike[str], resumed: bool, settings: Mapping[str, Any]) -> None:
    """Write the settings of a fit from Python beside its metrics.csv.

    Args:
        root: folder of the run.
        resumed: True if the fit resumes a run.
        settings: plain values by dotted keys.
    """
    with replacing(Path(root, config_name(root, resumed, SETTINGS)), "w", sync=False, encoding="utf-8") as file:
        file.write("# Settings of a run from Python, for reports. This is no configuration for the command line.\n")
        yaml.safe_dump(dict(settings), file, sort_keys=False, allow_unicode=True)


def require_writable(root: str, flag: str = "default_root_dir") -> list[Path]:
    """Create a folder; return the folders that did not exist, the innermost first.

    Args:
        root: folder to create.
        flag: flag that names the folder, for the error message.

    Raises:
        UserError: the folder cannot be written to.
    """
    folder = Path(root).absolute()
    for tries_left in (2, 1, 0):  # another program that checks the folder, too, may remove it while it is empty
        missing: list[Path] = []
        try:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(
                dir=folder, buffering=0
            ) as file:  # permissions do not tell of a disk that is full or read-only
                file.write(b" ")
            break
        except OSError as error:
            remove_empty(missing)
            if not tries_left or not isinstance(error, FileNotFoundError):
                raise UserError(
                    f"the folder {root} cannot be written to ({error.strerror}): use another {flag}."
                ) from error
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the empty ones of some folders, the innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def set_earlier_run_aside(root: str) -> None:
    """Move the files of an earlier run in `root` to `root/earlier-1` (2, 3 …), so that a new run overwrites nothing.

    They are collected in `earlier-1.moving`, and its renaming completes the move; `bring_earlier_run_back` undoes a partial one.
    """
    folder = Path(root)
    present = [folder / name for name in FILES if os.path.lexists(folder / name)]
    present += [path for path in configs_of_fits(root) if path not in present]
    if all(path.name in (CONFIG, HPARAMS) for path in present):
        return
    aside, moving = next(
        paths
        for number in count(1)
        if not any(map(os.path.lexists, paths := (folder / f"earlier-{number}", folder / f"earlier-{number}.moving")))
    )
    moving.mkdir()
    for path in present:
        os.replace(path, moving / path.name)
    os.replace(moving, aside)
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    rank_zero_info(f"The earlier run in {root} was moved to {aside}.")


def bring_earlier_run_back(root: str) -> None:
    """Undo a move of an earlier run that a kill cut short; the new run had written nothing yet.

    Only files that `set_earlier_run_aside` moves are moved back, and they overwrite nothing.
    """
    for moving in Path(root).glob("earlier-*.moving"):
        if not (re.fullmatch(r"earlier-[0-9]+\.moving", moving.name) and is_own_folder(moving)):
            continue
        for path in {*(moving / name for name in FILES), *configs_of_fits(moving)}:
            if os.path.lexists(path) and not os.path.lexists(Path(root, path.name)):
                os.replace(path, Path(root, path.name))
        remove_empty([moving])
