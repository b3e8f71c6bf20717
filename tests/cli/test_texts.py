"""Test that the texts which the command line prints without importing the library say what the library says.

`python tests/cli/test_texts.py` writes listing.txt anew, for a class that is new or has another first line.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_fl import algorithms, callbacks, cli, data, modules
from lightning_fl.cli.federated_cli import DESCRIPTION, FederatedCLI

LISTING, HELP = (Path(cli.__file__).with_name(name) for name in ("listing.txt", "help.txt"))


def listing() -> str:
    """Return every algorithm, network, data set, partition and callback with one line each."""
    groups: dict[str, dict[str, Any]] = {
        "algorithms": classes(algorithms),
        "networks": dict(modules.NETWORKS),
        "data": classes(data, data.FederatedDataModule),
        "partitions": classes(data, data.Partition),
        "callbacks": classes(callbacks),
    }
    paragraphs = []
    for title, members in groups.items():
        width = max(map(len, members))
        first_lines = {name: (inspect.getdoc(members[name]) or "").splitlines()[0] for name in sorted(members)}
        paragraphs.append("\n".join([title, *(f"  {name:<{width}}  {line}" for name, line in first_lines.items())]))
    return "\n\n".join(paragraphs) + "\n"


def classes(package: Any, kind: type = object) -> dict[str, type]:
    """Return by name the public classes of a package that are of a kind and not abstract."""
    found = {name: getattr(package, name) for name in package.__all__}
    kept = {name: c for name, c in found.items() if isinstance(c, type) and issubclass(c, kind)}
    return {name: c for name, c in kept.items() if not inspect.isabstract(c)}


def test_the_list_is_that_of_the_code() -> None:
    assert LISTING.read_text(encoding="utf-8") == listing(), "run: python tests/cli/test_texts.py"


def test_the_help_says_what_the_parser_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="needs shtab: pip install -e '.[completion]'")
    monkeypatch.setenv("JSONARGPARSE_ADD_PRINT_COMPLETION_ARGUMENT", "true")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["lightning-fl", "--help"])
    with pytest.raises(SystemExit):
        FederatedCLI()
    said, written = capsys.readouterr().out, HELP.read_text(encoding="utf-8")
    flags = re.compile(r"--?[a-z_]+|PL_[A-Z_]+")
    assert set(flags.findall(said)) == set(flags.findall(written))
    assert said.partition("subcommands:")[2].split() == written.partition("subcommands:")[2].split()
    assert " ".join(DESCRIPTION.split()) in " ".join(written.split())


if __name__ == "__main__":
    LISTING.write_text(listing(), encoding="utf-8")
