"""Imports, the contents of the wheel, the rooms and their picture."""

import re
import shlex
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement  # pytest and Lightning need it, too

import lightning_fl

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCES = [
    path for folder in ("lightning_fl", "modules", "callbacks") for path in sorted((ROOT / folder).rglob("*.py"))
]

DATA = [
    "lightning_fl/py.typed",
    "lightning_fl/cli/help.txt",
    "lightning_fl/catalogue.jsonl",
    "lightning_fl/schema.json",
    *(f"lightning_fl/report/{name}" for name in ("page.html", "papers.yaml", "published.csv", "results.tex")),
]
CONFIGS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs").rglob("*.yaml"))]
"""Configurations, which the wheel holds as `lightning_fl/configs`."""


def imported_by(statement: str, dots: bool = False) -> set[str]:
    """Return the top-level modules loaded after `statement` in a fresh interpreter, or with `dots` all modules."""
    program = f"{statement}\nimport sys\nprint(*sorted(name for name in sys.modules if {dots} or '.' not in name))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.process
def test_importing_the_package_is_cheap() -> None:
    assert (
        imported_by("import lightning_fl.cli") & {"jsonargparse", "lightning", "numpy", "torch", "torchmetrics"}
        == set()
    )


@pytest.mark.process
def test_reports_need_neither_torch_nor_the_engine() -> None:
    statement = (
        "from pathlib import Path\n"
        "from lightning_fl.report import command, published_settings, records\n"
        "settings = {'algorithm': 'FedProx', 'algorithm.mu': 0.1}\n"
        "published_settings.differences({}, records.Record(Path('run'), {'round': [8]}, settings, 'FedProx', None, ()))"
    )
    loaded = imported_by(statement, dots=True)
    assert not {
        name
        for name in loaded
        if name.partition(".")[0] in ("jinja2", "torch", "lightning", "torchmetrics", "matplotlib")
    }
    rooms = {name.split(".")[1] for name in loaded if name.startswith("lightning_fl.")}
    assert rooms == {"checks", "errors", "outputs", "report", "vectors"}
    assert {name for name in loaded if name.startswith("lightning_fl.vectors.")} == {"lightning_fl.vectors.kinds"}


@pytest.mark.process
def test_the_trainer_does_without_the_parser_and_the_parser_without_wandb() -> None:
    # A machine that trains only from Python may lack both.
    blocked = "import sys\nsys.modules['jsonargparse'] = sys.modules['wandb'] = None\n"
    trainer = "import lightning_fl.trainer, lightning_fl.modules, lightning_fl.data\n"
    loaded = imported_by(
        f"{blocked}{trainer}del sys.modules['jsonargparse'], sys.modules['wandb']\nimport lightning_fl.cli.federated_cli"
    )
    assert loaded >= {"lightning", "jsonargparse"}
    assert "wandb" not in loaded


CALLBACKS = """
import sys
sys.path.insert(0, sys.argv[1])
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_fl import callbacks, modules, pruning

loader = DataLoader(TensorDataset(torch.rand(40, 1, 28, 28), torch.arange(40) % 10), batch_size=20)
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
for callback in (
    callbacks.FilterPruning(rate=0.5, prune_epoch=1),
    callbacks.AdaptivePruning(prune_epoch=1),
    callbacks.MagnitudePruning(rate=0.5, prune_epoch=1),
    callbacks.SparseUpdates(alpha=0.1),
    callbacks.DynamicGates(keep=0.5),
    callbacks.CommunicationMeter(),
    callbacks.TargetReached(target=0.0),
):
    trainer = L.Trainer(max_epochs=2, callbacks=callback, accelerator="cpu", **quiet)
    trainer.fit(modules.ImageClassifier("cnn_mnist"), loader, loader)
trainer.save_checkpoint(sys.argv[1] + "/model.ckpt")
pruning.load_pruned(modules.ImageClassifier, sys.argv[1] + "/model.ckpt")
"""


@pytest.mark.process
def test_the_callbacks_need_only_the_packages_that_their_page_installs(tmp_path: Path) -> None:
    """Train with them where nothing else can be imported: in a folder with links to these packages and to ours."""
    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^pip install (.*annotated-types.*)$", page, re.MULTILINE)
    wanted = [Requirement(word) for word in shlex.split(line)]
    declared = {need.name: need for need in map(Requirement, requires("lightning-fl") or [])}
    assert [str(need) for need in wanted] == [str(declared[need.name]) for need in wanted]
    linked: set[str] = set()
    while wanted:
        need = wanted.pop()
        if need.name in linked or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            found = distribution(need.name)
        except PackageNotFoundError:  # such as CUDA's, beside a torch for CPUs
            continue
        linked.add(need.name)
        wanted += map(Requirement, found.requires or [])
        for name in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
            link, home = tmp_path / name, Path(str(found.locate_file(name))).resolve()
            if not link.exists() and home.exists():
                link.symlink_to(home)
    ours = tmp_path / "lightning_fl"
    ours.mkdir()
    for path in (*(ROOT / "lightning_fl").iterdir(), ROOT / "callbacks", ROOT / "modules"):
        (ours / path.name).symlink_to(path)
    command = [sys.executable, "-S", "-E", "-c", CALLBACKS, str(tmp_path)]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in lightning_fl.__all__:
        assert getattr(lightning_fl, name) is not None
    assert set(lightning_fl.__all__) <= set(dir(lightning_fl))
    with pytest.raises(AttributeError, match="no attribute 'FederatedTrainr'"):
        lightning_fl.FederatedTrainr  # noqa: B018


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = set(re.findall(r'^    "(lightning_fl[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    folders = [path.parent.relative_to(ROOT) for path in SOURCES if path.name == "__init__.py"]
    homes = {"modules": "lightning_fl.modules", "callbacks": "lightning_fl.callbacks"}
    there = {
        homes[folder.parts[0]] + "".join(f".{part}" for part in folder.parts[1:])
        if folder.parts[0] in homes
        else ".".join(folder.parts)
        for folder in folders
    }
    assert listed == {*there, "lightning_fl.configs"}  # a folder of configurations, without code


@pytest.mark.process
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="needs `build`: pip install -e '.[dev]'")
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77 to build without isolation")
    copy = tmp_path / "tree"
    names = [
        "pyproject.toml",
        "README.md",
        "setup.py",
        "LICENSE",
        *(str(path.relative_to(ROOT)) for path in SOURCES),
        *DATA,
        *CONFIGS,
    ]
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    subprocess.run(command, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in held} == {
        "lightning_fl",
        f"lightning_fl-{lightning_fl.__version__}.dist-info",
    }
    assert held >= {*DATA, *(f"lightning_fl/{name}" for name in CONFIGS)}
    assert len(CONFIGS) > 50
    for source in SOURCES:
        name = str(source.relative_to(ROOT))
        assert (name if name.startswith("lightning_fl/") else f"lightning_fl/{name}") in held


def test_the_picture_of_the_rooms_is_that_of_the_import_lint() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (floors,) = (contract["layers"] for contract in contracts if contract["id"] == "floors")
    picture = (ROOT / "CONTRIBUTING.md").read_text().partition("```mermaid")[2].partition("```")[0]
    nodes = dict(re.findall(r'^ +(\w+)\["(.+)"\]$', picture, re.MULTILINE))
    arrows = [line.split(" --> ") for line in picture.splitlines() if "-->" in line]
    order = [name.strip() for line in arrows for name in line]
    assert [name for i, name in enumerate(order) if name not in order[:i]] == list(nodes), (
        "the arrows go down the floors"
    )
    drawn = [re.findall(r"<b>(\w+)</b>", label) for label in nodes.values()]
    assert drawn == [floor.split(" | ") for floor in floors]


@pytest.mark.process
def test_every_package_may_be_imported_first() -> None:
    """Test that no order of imports is needed; each package is imported in a process that has none of the others."""
    names = sorted(
        ".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "lightning_fl").rglob("__init__.py")
    )
    program = (
        "import importlib, os, sys, torch, torchmetrics, lightning.pytorch\n"
        "for name in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        importlib.import_module(name)\n"
        "        os._exit(0)\n"
        "    if os.wait()[1]:\n"
        "        print(name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.stdout.split() == [], run.stderr
    assert len(names) > 30


def test_contributing_and_ci_know_the_tiers_of_the_tests() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        options = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    marks = [re.match(r"\w+", line)[0] for line in options["markers"]]  # type: ignore[index]
    tiers = re.findall(r"^\| `pytest -m (\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert tiers == [mark for mark in marks if mark not in ("long", "trains", "sampled", "filterwarnings")]
    left_out = set(re.findall(r"not (\w+)", options["addopts"]))
    assert left_out == {*tiers} - {"quick"}
    assert {"pytest -m process", "pytest -m matrix"} <= set(
        re.findall(r'"(pytest [^"]+)"', (ROOT / ".ci" / "run").read_text())
    )


def test_few_modules_have_no_room() -> None:
    assert len([source for source in SOURCES if source.parent == ROOT / "lightning_fl"]) <= 6


def test_contributing_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = re.findall(r"`((?:lightning_fl|tests)/[\w/.]+)`", text)
    assert len(names) > 15
    assert [name for name in names if not (ROOT / name).exists()] == []
    tasks = text.partition("## Where to begin")[2].partition("\n\nThe round")[0].splitlines()[4:]
    assert len(tasks) == 16
    assert all(1 <= task.count(".py`") + task.count(".md)") <= 3 for task in tasks)
