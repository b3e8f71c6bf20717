"""Version, changelog, citation, supported Pythons, workflows and hooks agree, and SECURITY.md is true."""

import ast
import inspect
import re
import runpy
import shlex
import shutil
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import lightning_fl
from lightning_fl.outputs import checkpoint_file

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SOURCES = [path for folder in ("lightning_fl", "modules", "callbacks") for path in (ROOT / folder).rglob("*.py")]
DISTRIBUTIONS = {
    "annotated_types": "annotated-types",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "torch_pruning": "torch-pruning",
    "yaml": "pyyaml",
}
"""Dependencies by the name of their package, if it is not the same."""
OPTIONAL = {"IPython", "constriction", "datasets", "dp_accounting", "optuna", "pandas"}
"""Packages that are only imported where the user has them."""
KINDS = ["Results that change", "What breaks", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""Changes that users must know before they upgrade, then Keep a Changelog's sections, in its order."""


def sections(level: str, text: str) -> dict[str, str]:
    """Return the text below each heading of a level."""
    parts = re.split(rf"^{level} (.+)$", text, flags=re.MULTILINE)
    assert len(set(parts[1::2])) == len(parts) // 2, "a heading is there twice"
    return dict(zip(parts[1::2], parts[2::2], strict=True))


RELEASES = sections("##", (ROOT / "CHANGELOG.md").read_text())


def workflow(name: str) -> dict[Any, Any]:
    content = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    assert isinstance(content, dict)
    return content


def supported() -> list[str]:
    """Return the minor versions of Python in the classifiers."""
    return re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(PYPROJECT["project"]["classifiers"]))


def test_the_changelog_begins_with_unreleased_and_this_version() -> None:
    unreleased, newest = list(RELEASES)[:2]
    assert unreleased == "[Unreleased]"
    version, _, day = newest.partition(" - ")
    assert version == f"[{lightning_fl.__version__}]"
    assert date.fromisoformat(day)


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_lists_its_kinds_of_changes_in_order(release: str) -> None:
    kinds = list(sections("###", RELEASES[release]))
    assert kinds == [kind for kind in KINDS if kind in kinds]
    entries = re.findall(r"^- (.+?)$", RELEASES[release], re.MULTILINE)
    assert len(set(entries)) == len(entries)


def test_the_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = f"[{citation['version']}] - {citation['date-released']}"
    assert newest == list(RELEASES)[1]
    assert citation["license"] == PYPROJECT["project"]["license"]


def test_classifiers_tools_and_workflows_name_the_same_pythons() -> None:
    pythons = supported()
    assert pythons == [f"3.{minor}" for minor in range(10, 10 + len(pythons))]
    oldest, newest = pythons[0], pythons[-1]
    assert PYPROJECT["project"]["requires-python"] == f">={oldest}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert re.search(rf"Python {oldest}\D+{newest}", (ROOT / "README.md").read_text())
    run = workflow("tests.yml")["jobs"]["run"]
    assert run["strategy"]["matrix"]["python"] == [oldest, newest]


def test_the_workflow_runs_ci_with_the_python_that_it_sets_up() -> None:
    *_, python, command = workflow("tests.yml")["jobs"]["run"]["steps"]
    assert python["with"]["python-version"] == "${{ matrix.python }}"
    assert command["run"] == ".ci/run"
    assert command["env"]["PYTHON"] == "python"
    assert 'PYTHON:-python3}" -m venv' in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_begin_without_permissions(path: Path) -> None:
    assert workflow(path.name)["permissions"] == {}
    for action in re.findall(r"uses: (.+)$", path.read_text(), re.MULTILINE):
        assert re.fullmatch(r"\./\.github/workflows/\w+\.yml|[\w./-]+@[0-9a-f]{40} # v[\d.]+", action)


def test_only_tested_packages_are_published_and_without_a_secret() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert {name for name, job in jobs.items() if "id-token" in job["permissions"]} == {"publish"}
    assert set(jobs["publish"]["needs"]) == {"tests", "build"}
    assert jobs["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_hooks_are_tools_of_the_extra_dev() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    dev = {re.split(r"[\[><=]", name)[0] for name in PYPROJECT["project"]["optional-dependencies"]["dev"]}
    assert dev >= {"pre-commit", "pre-commit-hooks", "ruff"}
    (command,) = (
        step["run"] for step in workflow("tests.yml")["jobs"]["hooks"]["steps"] if "pip" in step.get("run", "")
    )
    assert set(shlex.split(command)[4:]) == {"pre-commit", "pre-commit-hooks", "ruff"}


@pytest.mark.matrix
def test_every_package_that_is_imported_is_a_dependency() -> None:
    statements = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    modules = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in statements if isinstance(node, ast.ImportFrom) and node.module}
    foreign = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"lightning_fl"} - OPTIONAL
    declared = {re.split(r"[\[><=!]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    assert {DISTRIBUTIONS.get(name, name) for name in foreign} <= declared


def calls(path: Path) -> list[tuple[str, dict[str, ast.expr]]]:
    """Return the dotted name and the keywords of each call in a file."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func), {k.arg: k.value for k in node.keywords if k.arg}) for node in found]


@pytest.mark.matrix
def test_nothing_is_unpickled_unless_the_user_asks_for_it() -> None:
    read = [(path.name, name, keywords) for path in SOURCES for name, keywords in calls(path)]
    forbidden = r"eval|exec|(yaml|pickle|cloudpickle|joblib|dill|marshal)\.(load|loads|load_all|unsafe_load|full_load)"
    assert [(file, name) for file, name, _ in read if re.fullmatch(forbidden, name)] == []
    torch_loads = [(file, ast.unparse(k["weights_only"])) for file, name, k in read if name == "torch.load"]
    assert sorted(torch_loads) == [("checkpoint_file.py", "weights_only"), ("frozen_weights.py", "True")]
    assert inspect.signature(checkpoint_file.load).parameters["weights_only"].default is True
    numpy_loads = [(file, ast.unparse(k["allow_pickle"])) for file, name, k in read if name == "np.load"]
    assert set(numpy_loads) == {("arrays.py", "False")}


@pytest.mark.parametrize(
    ("files", "link", "picture"),
    [
        ("", "(docs/results.md)", "(docs/images/accuracy_by_uplink.png)"),
        (
            "https://example.org/fl/blob/main/",
            "(https://example.org/fl/blob/main/docs/results.md)",
            "(https://example.org/fl/blob/main/docs/images/accuracy_by_uplink.png?raw=true)",
        ),
    ],
)
def test_a_package_index_gets_links_that_lead_somewhere(
    files: str, link: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    settings = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(
        re.sub(r'^files = ".*"', f'files = "{files}"', settings, flags=re.MULTILINE)
    )
    given: dict[str, str] = {}
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=given.update))
    runpy.run_path(str(tmp_path / "setup.py"))
    text = given["long_description"]
    assert link in text
    assert picture in text
    relative = re.findall(r"\]\((?!https?:)[^)]*\)", text)
    assert bool(relative) == (not files)
    assert given["long_description_content_type"] == "text/markdown"
