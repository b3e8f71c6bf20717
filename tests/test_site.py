"""Test that the documentation site builds without a warning, has a place for every public name, and fetches nothing.

Also that its search leads to answers, and that pages fit the width of a phone and of a laptop; the last needs Chromium.
"""

import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from browser import browser, measured

import lightning_fl
from lightning_fl.checks import parameters_of
from lightning_fl.cli import catalogue, shipped_configs
from lightning_fl.cli.problems import PROBLEMS
from lightning_fl.trainer import FederatedTrainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NEEDED = ("sphinx", "furo", "ipykernel", "jupytext", "myst_nb", "pandas", "sphinx_copybutton")
if not all(map(find_spec, NEEDED)):
    pytest.skip("needs the extra docs: pip install -e '.[docs]'", allow_module_level=True)
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

from generate import PACKAGES  # noqa: E402
from sphinx.search.en import SearchEnglish  # noqa: E402

METHODS = [entry for entry in catalogue.entries() if entry.section == "algorithms"]
FETCHING = {("script", "src"), ("img", "src"), ("source", "srcset"), ("iframe", "src"), ("link", "href")}
"""Tags and attributes whose addresses a browser fetches to show a page."""
OUTSIDE = re.compile(r"(https?:)?//")


class Page(HTMLParser):
    """Anchors, links and fetched addresses of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note the attributes of a tag."""
        for name, value in attributes:
            if name == "id":
                self.ids.add(value or "")
            elif (tag, name) in FETCHING:
                self.fetched.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `.ci/checks` does, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", f"{folder}/doctrees", "docs"]
    done = subprocess.run([*command, f"{folder}/html"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_links_lead_to_a_page_and_a_place_in_it(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(unquote(link))
            if OUTSIDE.match(link) or address.startswith("mailto:"):
                continue
            goal = (path.parent / address).resolve() if address else path
            found = goal.is_file() and (not anchor or goal not in pages or anchor in pages[goal].ids)
            broken += [] if found or goal.name in ("search.html",) else [(path.name, link)]
    assert broken == []


def test_no_page_fetches_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > len(METHODS)
    assert [
        (path.name, address) for path, page in pages.items() for address in page.fetched if OUTSIDE.match(address)
    ] == []
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"@import[^;]*|url\(\s*[\"']?(?:https?:)?//[^)]*", text) == [], path
    for path in (site / "_static").rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"(?:fetch|import)\(\s*[\"'`](?:https?:)?//[^)]*", text) == [], path


def test_no_browser_breaks_a_flag_behind_its_hyphens(pages: dict[Path, Page]) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    assert any('class="pre whole">--' in text for text in texts.values())
    broken = {path.name: re.findall(r'class="pre">(--[^<]{0,34})<', text) for path, text in texts.items()}
    assert {name: flags for name, flags in broken.items() if flags} == {}


def test_a_notebooks_page_links_its_file_and_shows_what_cells_print(site: Path, pages: dict[Path, Page]) -> None:
    for name in ("first-federation", "own-module", "own-method", "compare-by-bytes"):
        path = site / "tutorials" / f"{name}.html"
        (link,) = [link for link in pages[path].links if link.endswith(f"/{name}.ipynb")]
        cells = json.loads((path.parent / link).read_text(encoding="utf-8"))["cells"]
        assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}
        assert "".join(cells[0]["source"]).count("pip install -e '.[notebook]'") == 1
        shown = path.read_text(encoding="utf-8")
        assert shown.count("cell_input") == sum(cell["cell_type"] == "code" for cell in cells)
        assert "cell_output" in shown
        assert "Traceback" not in shown


def test_search_needs_no_server(site: Path) -> None:
    assert "Search.setIndex" in (site / "searchindex.js").read_text(encoding="utf-8")
    options = (site / "_static" / "documentation_options.js").read_text(encoding="utf-8")
    assert "SHOW_SEARCH_SUMMARY: false" in options  # summaries are fetched, which a browser refuses for files


ANSWERS = {
    "F1": "faq",
    "GroupNorm": "faq",
    "differential privacy": "how-to/privacy",
    "LaTeX": "how-to/report",
    "Slurm": "how-to/studies",
    "early stopping": "faq",
    "EarlyStopping": "faq",
    "OneCycleLR": "faq",
    "attack": "how-to/attacks",
    "secure aggregation": "how-to/secure-aggregation",
    "ε": "how-to/privacy",
    "docker": "how-to/docker",
    "quantization": "how-to/codecs",
    "DDP": "how-to/processes",
    "hyperparameter": "tutorials/sweep",
    "wandb": "how-to/loggers",
    "checkpoint": "how-to/resume",
    "multi-gpu": "tutorials/several-gpus",
    "bandwidth": "explanation/bits",
    "personalization": "how-to/personalise",
    "non-IID": "faq",
    "natural partition": "how-to/users-as-clients",
    "federated learning": "tutorials/five-minutes",
}
"""Words that newcomers have looked for, and the pages that answer; tests/test_pages.py has more of them."""


@pytest.fixture(scope="module")
def index(site: Path) -> dict[str, Any]:
    """Return what the search knows: of each word and title the numbers of its pages, of each index entry its places."""
    found: dict[str, Any] = json.loads(
        (site / "searchindex.js").read_text(encoding="utf-8")[len("Search.setIndex(") : -1]
    )
    return found


@pytest.mark.parametrize(("words", "page"), ANSWERS.items())
def test_the_search_leads_to_an_answer(
    words: str, page: str, index: dict[str, Any], pages: dict[Path, Page], site: Path
) -> None:
    number = index["docnames"].index(page)
    places = [anchor for at, anchor, *_ in index["indexentries"][words.lower()] if at == number]
    assert places  # an entry of all words is a browser's first result, whether or not the page's text has them
    assert {*places} <= pages[site / f"{page}.html"].ids
    stemmed = map(SearchEnglish({}).stem, words.lower().split())
    assert index["docnames"].index("reference/changelog") not in set.union(
        *(pages_with(word, index) for word in stemmed)
    )


def pages_with(word: str, index: dict[str, Any]) -> set[int]:
    """Return the numbers of the pages that have a stemmed word in their text or titles."""
    found = (index[where].get(word, []) for where in ("terms", "titleterms"))
    return {number for each in found for number in (each if isinstance(each, list) else [each])}


@pytest.mark.skipif(browser() is None, reason="needs Chromium")
def test_pages_fit_a_phone_and_a_laptop(site: Path, pages: dict[Path, Page], tmp_path: Path) -> None:
    names = [path.relative_to(site).as_posix() for path in pages if "_modules" not in path.parts]
    found = measured(site, names, (390, 1280), tmp_path)
    assert len(found) == 2 * len(names)
    assert [(name, width, content) for name, width, content, _ in found if content > width] == []
    assert [(name, width, scrolled) for name, width, _, scrolled in found if scrolled] == []


def test_the_home_page_shows_a_round_and_four_cards(site: Path) -> None:
    shown = (site / "index.html").read_text(encoding="utf-8").partition('<div class="content">')[2]
    picture = shown[shown.index('<figure class="diagram messages">') : shown.index("</figure>")]
    parameters = catalogue.entry("algorithms", "Algorithm").parameters
    assert {*re.findall(r'parts.html#\w+">(\w+)</a>', picture)} == {*parameters}
    model, *uploads = re.findall(r"<dd>([\d.]+ [kM]B)</dd>", picture)
    assert model == uploads[0] == "2.47 MB"  # ten times 61,706 numbers of 32 bits
    assert len(uploads) == 4
    cards, thumbnails = (
        shown[shown.index(f'<div class="grid {name}">') :].partition("</ul>")[0] for name in ("links", "thumbnails")
    )
    assert cards.count("<li>") == 4
    assert thumbnails.count("<img") >= 4
    assert shown.partition("</article>")[0].count('<a class="reference') < 40


def test_methods_are_listed_by_problem(site: Path) -> None:
    shown = (site / "reference" / "methods" / "by-problem.html").read_text(encoding="utf-8")
    sections = re.split("<h2>", shown)[1:]
    assert len(sections) == len(PROBLEMS)
    for problem, section in zip(PROBLEMS, sections, strict=True):
        linked = re.findall(r'href="(\w+)\.html">(?:<span[^>]*>)?<code', section)
        assert linked == [*problem.methods, *problem.others], problem.title


def test_public_names_have_a_sentence_each(site: Path) -> None:
    shown = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8").partition("<article")[2]
    rows = re.findall(r"<tr class=.*?<td[^>]*>(.*?)</td>\s*<td[^>]*>(.*?)</td>", shown, re.DOTALL)
    without = [name for name, text in rows if len(re.sub(r"<[^>]*>", "", text).split()) < 3]
    assert without == []
    modules = (import_module(f"lightning_fl.{package}") for package in PACKAGES)
    assert len(rows) == len(lightning_fl.__all__) - 1 + sum(len(module.__all__) for module in modules)


def test_the_page_of_errors_has_sentences_of_the_code(site: Path) -> None:
    shown = (site / "errors.html").read_text(encoding="utf-8")
    text = unescape(re.sub(r"<[^>]*>", "", shown))
    for sentence in (
        "clients_per_round is …, but the federation has … clients with samples: give at most …",
        "there is no checkpoint at …",
        "there is no study file …",
        "cannot be divided over clients: it has no train_dataloader()",
    ):
        assert sentence in text
    assert shown.count('class="origin"') > 400


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_place(package: str, pages: dict[Path, Page]) -> None:
    ids = {name for page in pages.values() for name in page.ids}
    public = import_module(f"lightning_fl.{package}").__all__
    assert [name for name in public if f"lightning_fl.{package}.{name}" not in ids] == []


def test_colons_in_the_docstrings_of_attributes_make_no_types(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (site / "reference").rglob("*.html")]
    assert [page for page in pages if 'class="py property"' in page]
    assert not [page for page in pages if 'Type<span class="colon">' in page]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_methods_page_says_what_the_terminal_prints(method: catalogue.Entry, site: Path) -> None:
    shown = (site / "reference" / "methods" / f"{method.name}.html").read_text(encoding="utf-8").replace("<wbr>", "")
    paper, *_ = catalogue.description_of(method)
    identifiers = re.findall(r"arXiv:[\d.]+\d|doi:[\d./]+\d|openreview:\w+", paper)
    assert identifiers or method.name == "Algorithm"
    said = [*identifiers, *method.parameters, *method.slots, *catalogue.configurations_of(method)]
    (parts,) = re.findall(r'<section id="parts">(.*?)</section>', shown, re.DOTALL)
    assert parts.count("<tr") == 1 + 6, "six slots, and the head"
    said += [catalogue.shown_source(path.rpartition(".")[0]) for paths in method.slots.values() for path in paths]
    assert [text for text in said if text not in shown] == []
    printed = catalogue.listing([method.name])
    assert [text for text in said if text not in printed] == []


KEPT = (ROOT / "docs" / "results" / "every_method.csv").read_text(encoding="utf-8").splitlines()[1:]
"""Runs whose curves the site shows; tests/study/test_every_method.py checks that every method has some."""


@pytest.mark.parametrize("method", sorted({line.partition(",")[0] for line in KEPT}))
def test_a_methods_page_has_its_curve_and_the_command_of_it(method: str, site: Path, pages: dict[Path, Page]) -> None:
    path = site / "reference" / "methods" / f"{method}.html"
    (address,) = {unquote(address) for address in pages[path].fetched if address.endswith(".svg")}
    assert re.search(rf">{method} \(\d seeds\)</text>", (path.parent / address).read_text(encoding="utf-8"))
    assert f"--algorithm={method}" in re.sub(r"<[^>]*>", "", path.read_text(encoding="utf-8"))  # commands have colours


def test_every_flag_of_fit_and_every_configuration_is_there(site: Path, pages: dict[Path, Page]) -> None:
    shown = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    flags = set(re.findall(r"--trainer\.(\w+)", shown))
    assert set(parameters_of(FederatedTrainer)) - flags == set()
    firsts = re.findall(r"<tr[^>]*><td[^>]*>(.*?)</td>", shown)
    assert [cell for cell in firsts if "<code" not in cell] == []  # a text of several lines stays in its row
    for flag in ("--config", "--ckpt_path", "--algorithm", "--data", "--model", "--trainer.clock.macs_per_second"):
        assert flag in shown
    texts = [path.read_text(encoding="utf-8") for path in (site / "reference" / "configurations").glob("*.html")]
    assert [name for name in shipped_configs.names() if not any(f">{name}<" in text for text in texts)] == []


def test_flags_keep_their_hyphens(site: Path) -> None:
    shown = re.sub(r"<[^>]*>", "", (site / "reference" / "commands.html").read_text(encoding="utf-8"))
    assert "--algorithm.help NAME shows its parameters" in shown
    assert "\N{EN DASH}algorithm.help" not in shown


def test_the_page_of_the_round_shows_the_slots_and_the_floors(site: Path) -> None:
    shown = (site / "explanation" / "round.html").read_text(encoding="utf-8")
    drawn = re.findall(r'<div class="slot"><b><a[^>]*>(\w+)</a>', shown)
    assert drawn == ["downlink", "rule", "personal", "exchange", "uplink", "aggregator", "steps"]
    assert set(drawn) == set(catalogue.entry("algorithms", "Algorithm").parameters)
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (floors,) = (contract["layers"] for contract in contracts if contract["id"] == "floors")
    rows = [re.findall(r"<b>(\w+)</b>", row) for row in re.findall(r'<div class="floor">.*', shown)]
    assert rows == [floor.split(" | ") for floor in floors]
    contributing = (site / "reference" / "contributing.html").read_text(encoding="utf-8")
    assert contributing.count('<div class="floor">') == len(floors)
