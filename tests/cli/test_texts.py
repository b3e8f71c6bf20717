"""Test that the texts which the command line prints without importing the library say what the library says."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lightning_fl import cli
from lightning_fl.checks import other_names
from lightning_fl.cli import catalogue, kept_help
from lightning_fl.cli.commands import COMMANDS, FLAGS
from lightning_fl.cli.federated_cli import DESCRIPTION, FederatedCLI

sys.path.append(str(Path(__file__).parents[2] / "docs"))

import kept_texts

HELP = Path(cli.__file__).with_name("help.txt")
RUN = "run: python docs/kept_texts.py"


@pytest.mark.matrix
def test_the_list_is_that_of_the_code() -> None:
    assert catalogue.FILE.read_text(encoding="utf-8") == kept_texts.catalogue_text(), RUN


def test_the_kept_flags_are_those_of_the_parser() -> None:
    assert kept_help.FILE.read_text(encoding="utf-8") == kept_texts.flags_text(), RUN


@pytest.mark.parametrize("command", kept_texts.RUNNING)
@pytest.mark.parametrize("columns", [60, 80, 133])
def test_the_kept_help_is_printed_as_the_parser_prints_it(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert kept_help.help_of(command) == kept_texts.parser_of(command).format_help()


def test_classes_of_other_packages_are_read_as_they_are_imported() -> None:
    for module in kept_help.OTHERS:
        public = vars(import_module(module))
        names = [name for name in public["__all__"] if isinstance(public[name], type)]
        assert kept_help.classes_of(module) == sorted(names)


def test_no_help_is_kept_for_packages_with_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kept_help.classes_of
    assert kept_help.help_of("fit")
    for changed in kept_help.OTHERS:
        monkeypatch.setattr(
            kept_help, "classes_of", lambda name, module=changed: [*found(name), *["New"] * (name == module)]
        )
        assert kept_help.help_of("fit") is None
    monkeypatch.setattr(kept_help, "classes_of", lambda _: None)
    assert kept_help.help_of("fit") is None


def test_help_is_kept_for_packages_with_other_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch.optim listed its module `functional` up to 2.13, and does not in 2.14."""
    (tmp_path / "other").mkdir()
    listed = '__all__ = ["SGD", "functional", "lr_scheduler"]'
    (tmp_path / "other" / "__init__.py").write_text(listed, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert kept_help.classes_of("other") == ["SGD"]


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
    flags = re.compile(r"--[a-z_]+")
    assert set(flags.findall(said)) <= set(flags.findall(written)) == set(FLAGS)
    commands = written.partition("commands:")[2].partition("\n\n")[0].splitlines()
    described = dict(line.split(None, 1) for line in commands if line[4:5].strip())
    assert sorted(described) == sorted(COMMANDS)
    of_parser = said.partition("subcommands:")[2]
    for command in ("fit", "validate", "test", "predict"):
        assert re.search(rf"^ +{command} +{re.escape(described[command])}$", of_parser, re.MULTILINE)
    assert DESCRIPTION in written


def test_the_names_that_replace_those_of_the_field_exist() -> None:
    known = {one.name for one in catalogue.entries()}
    for here in other_names.CLASSES.values():
        assert {word.strip(",") for word in here.split() if word[0].isupper()} <= known, here
    trainer = next(one for one in catalogue.entries() if one.section == "trainer")
    for here in other_names.FLAGS.values():
        for flag in re.findall(r"trainer\.(\w+)", here):
            assert flag in trainer.parameters, here
