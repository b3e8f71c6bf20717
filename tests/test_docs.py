"""Test that the commands and programs in README and docs run, and that their links resolve.

Run: every ```bash and ```python block of README.md and docs/*.md, each document's in order in one empty folder with a
copy of configs/. A block whose first line is a comment with a file name (`# small.yaml`) is written to that file instead.
The ```{code-cell} blocks of a notebook run as Python, and share their names.

Not run:

- `pip install …`, `uv …`, `pytest`, `.ci/…`, `docker …`, `mkdir …`: they set up or run these tests. `&&` chains are split.
- blocks after `<!-- no-run: reason -->`.

Every `lightning-fl fit` is shortened to one round by `--trainer.max_rounds 1`, and every trainer in Python to three rounds; the
slow test of notebooks trains all of them.
"""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_fl import algorithms
from lightning_fl.cli import main

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "docs" / "reference"
"""Pages that a build of the site writes into the working tree."""
WRITTEN = [path for path in sorted((ROOT / "docs").rglob("*.md")) if GENERATED not in path.parents]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN]
PAGES = [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]  # examples/: tests/test_examples.py
SURROUNDINGS = ("pip", "uv", "pytest", ".ci/checks", ".ci/run", "docker", "mkdir")
BRIEF = {"FedKT": ["--algorithm.epochs", "1"], "PruneFL": ["--algorithm.initial_passes", "2"]}
"""Flags that shorten the work before the first round of a method."""
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]

BLOCK = re.compile(
    r"(?P<marker><!-- no-run: \S[^>]*-->\n)?^```(?P<language>\w+|\{code-cell\}) ?\w*\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FILE_NAME = re.compile(r"# ([\w.-]+\.(?:py|ya?ml))\n")
CELL = "{code-cell}"
OPTIONS = re.compile(r"\A(:.*\n)+")
"""First lines of a cell that say how the site shows it."""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
OUTSIDE = re.compile(r"://|^project:")
"""Links that lead to no file: addresses, and pages that only the site has (tests/test_site.py)."""


class Block(NamedTuple):
    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document that can be run or written, in order."""
    found = [m for m in BLOCK.finditer(document.read_text()) if not m["marker"]]
    return [Block(m["language"], m["text"]) for m in found if m["language"] in ("bash", "python", "yaml", CELL)]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.usefixtures("types_of_a_new_process")
@pytest.mark.process
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_what_a_document_shows_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_packages(document)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    own = {"configs", "shown.py"}
    names = {"__name__": "__main__"}
    for language, text in blocks(document):
        named = FILE_NAME.match(text)
        if named:
            Path(named[1]).write_text(text)
            own.add(named[1])
        elif language == CELL:
            exec(compile(OPTIONS.sub("", shortened(text)), name_of(document), "exec"), names)
        elif language == "python":
            Path("shown.py").write_text(shortened(text))
            runpy.run_path("shown.py", run_name="__main__")
        elif language == "bash":
            for command in commands(text):
                with monkeypatch.context() as environment:
                    run(command, environment)
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert {path.name for path in tmp_path.iterdir()} - own <= ignored, "git would show what it leaves in a clone"


def shortened(program: str) -> str:
    return re.sub(r"\bmax_rounds=\d\d+", "max_rounds=3", program)


def skip_without_packages(document: Path) -> None:
    text = document.read_text()
    if "ClientPrivacy" in text:
        pytest.importorskip("dp_accounting", reason="pip install 'lightning-fl[privacy]'")
    if "lightning-fl[search]" in text:
        pytest.importorskip("optuna", reason="pip install 'lightning-fl[search]'")
    from_where = {"pandas": "'lightning-fl[notebook]'", "peft": "'lightning-fl[peft]'", "transformers": "transformers"}
    for package, what in {**from_where, "optuna": "optuna"}.items():
        if f"import {package}" in text or f"from {package} import" in text:
            pytest.importorskip(package, reason=f"pip install {what}")


def commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines if not line.startswith("#") for part in line.split("&&") if part.strip()]


def run(command: str, environment: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment.setenv(name, value)
    program, *arguments = words
    if program in SURROUNDINGS:
        return
    assert program == "lightning-fl", f"the tests cannot run {command!r}"
    information = any(word == "--help" or word.endswith((".help", "--print_config")) for word in arguments)
    if arguments[0] == "fit" and not information:
        arguments += ["--trainer.max_rounds", "1", *QUIET]
        arguments += [word for method, words in BRIEF.items() if method in arguments for word in words]
    environment.setattr(sys, "argv", ["lightning-fl", *arguments])
    code = exit_code()
    assert code == 0, f"{command} ended with exit code {code}"


def exit_code() -> int | str:
    """Run the command line in `sys.argv` and return its exit code."""
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


NOTEBOOKS = [document for document in WRITTEN if any(block.language == CELL for block in blocks(document))]


def test_there_are_notebooks() -> None:
    stems = {page.stem for page in NOTEBOOKS}
    assert stems >= {"first-federation", "own-module", "own-method", "compare-by-bytes"}


@pytest.mark.slow
@pytest.mark.parametrize("page", NOTEBOOKS, ids=name_of)
def test_a_notebook_runs_in_an_empty_folder(page: Path, tmp_path: Path) -> None:
    skip_without_packages(page)
    nbclient = pytest.importorskip("nbclient", reason="pip install 'lightning-fl[dev]'")
    pytest.importorskip("ipykernel", reason="pip install 'lightning-fl[dev]'")
    jupytext = pytest.importorskip("jupytext", reason="pip install 'lightning-fl[dev]'")
    notebook = jupytext.read(page)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert len(shown) == sum(block.language == CELL for block in blocks(page))
    assert any(shown)


def test_the_readme_has_two_commands() -> None:
    shown = [block.text.strip() for block in blocks(ROOT / "README.md") if block.language == "bash"]
    assert shown == [
        "pip install -e . && lightning-fl fit --config configs/quickstart.yaml",
        "pip install -e '.[test]' && pytest",
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if not OUTSIDE.search(target)]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_readme_is_one_screen_and_counts_the_methods() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"[{len(algorithms.__all__) - 1} in all]" in text  # without their base class
    assert len(text.split()) < 650


@pytest.mark.usefixtures("types_of_a_new_process")
def test_a_page_names_every_column_of_metrics_csv_and_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart = f"lightning-fl fit --config {ROOT}/configs/quickstart.yaml --trainer.default_root_dir {tmp_path}"
    run(quickstart, monkeypatch)
    columns = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    documented = set(re.findall(r"`([\w/.-]+)`", (ROOT / "docs" / "files.md").read_text()))
    documented |= {f"clients/{name}" for name in documented}
    assert [column for column in columns if column not in documented] == []
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert [name for name in files if name not in documented] == []
