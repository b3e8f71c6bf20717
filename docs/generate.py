"""Write the pages that are made from the code, and those of the repository's other Markdown files, to docs/reference/.

`conf.py` calls this at the begin of every build. Methods come from what `lightning-fl list` prints, flags from what
`lightning-fl fit --help` prints, and public names from docstrings, so that no page has a text of its own about them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from inspect import isclass, isroutine
from pathlib import Path
from typing import Any

import curves
from diagrams import floors_diagram
from help_tables import help_blocks
from markup import fenced, index_page, markdown, paragraph, rst, table, toctree
from sphinx.pycode import ModuleAnalyzer

import lightning_fl
from lightning_fl.cli import catalogue, first_config, kept_help, method_source, shipped_configs
from lightning_fl.cli.catalogue import Entry, shown_source
from lightning_fl.cli.problems import PROBLEMS
from lightning_fl.cli.type_descriptions import shown
from lightning_fl.report.flags import build_parser as report_parser
from lightning_fl.study.command import build_parser as study_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
REFERENCE = "reference"
"""Folder of the pages, in docs/; git ignores it."""
COPIES = {
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "SECURITY.md": "security",
    "examples/README.md": "examples",
}
"""Markdown files outside docs/, and their pages."""
UNSEARCHED = "---\nnosearch: true\n---\n\n"
"""Begin of a page whose words the search does not know: the changelog has all words, and answers nothing."""
PACKAGES = (
    *lightning_fl._PACKAGES,
    "features.attacks",
    "features.clock",
    "features.privacy",
    "features.selection",
    "report",
    "study",
)
SLOTS = (("rule",), ("uplink", "downlink"), ("exchange",), ("aggregator",), ("steps",), ("personal",))
"""The six slots by the parameters of `Algorithm` that fill them."""
PARTS = ("rules", "codecs", "exchanges", "aggregators", "steps", "personal")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s:]+)((?:#[^)]*)?\))")
METHODS = """All methods by paper, with the names that `--algorithm` takes. Another page lists them [by problem](by-problem.md).
`lightning-fl list NAME` prints the page of a method in the terminal. [`Algorithm`](Algorithm.md) takes any parts from a
configuration. To write another method, see [your own method](/tutorials/own-method.md). A method is
[sum-only](/how-to/secure-aggregation.md) if the server needs only sums over the clients of a round."""
BY_PROBLEM = """Methods to try first, by problem. `lightning-fl list` prints the same groups. A method that helps with several
problems appears below each of them. Other pages list the methods [by paper](index.md), and compare the
[claims of papers with our runs](/results.md)."""
PARTS_TEXT = """A method fills six slots with [parts](/explanation/round.md#the-slots). The last column of a table names the
methods whose part differs from FedAvg's. Every part can be [combined with others](/how-to/codecs.md)."""
NAMES = """The names for `--model`, `--model.network`, `--data`, `--data.partition`, `--trainer.adversary.attack` and
`--trainer.callbacks`, with their parameters. `lightning-fl list NAME` prints them in the terminal. Name your own class by its
import path."""
COMMANDS = "The commands of `lightning-fl`, with their output for `--help`."
FIT = """These commands take the same flags, but only `fit` has `--dry_run` and `--json`. Parameters of a
[method](methods/index.md) are flags `--algorithm.NAME`, those of a [data set](names.md) `--data.NAME`, and so on.
`lightning-fl fit --help` prints this list."""
CONFIGURATIONS = """The configurations that come with the package, by folder. `--config feddumap/cnn_cifar10` works in any folder.
`lightning-fl list configs` prints a line about each."""
API = """The public names of each package, each with a sentence and a link to its docstring. [Methods](../methods/index.md) have
their own pages."""


def generate(docs: Path) -> None:
    """Write all pages below docs/reference/ that have changed, and remove those that nothing makes any more."""
    folder = docs / REFERENCE
    texts = {folder / f"{name}.md": text.rstrip() + "\n" for name, text in pages()}
    texts |= {folder / "methods" / f"{method}.svg": curves.draw(method) for method in curves.kept_groups()}
    for path in {*folder.rglob("*.md"), *folder.rglob("*.svg")} - texts.keys():
        path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the Markdown of each page."""
    methods = [entry for entry in catalogue.entries() if entry.section == "algorithms"]
    yield "methods/index", methods_page(methods)
    yield "methods/by-problem", by_problem_page(methods)
    for method in methods:
        yield f"methods/{method.name}", method_page(method)
    yield "parts", parts_page(methods)
    yield "names", names_page()
    yield "commands", commands_page()
    yield "configurations/index", index_page("Shipped configurations", CONFIGURATIONS, configuration_groups())
    for group in configuration_groups():
        yield f"configurations/{group}", configurations_page(group)
    yield "api/index", names_with_sentences()
    for package, names in public_names().items():
        yield f"api/{package}", api_page(package, [] if package == "lightning_fl.algorithms" else names)
    for source, name in COPIES.items():
        yield name, copied_page(source, name)


# -- methods and parts ----------------------------------------------------------------------------------------------------


def methods_page(methods: Sequence[Entry]) -> str:
    """Return the page that lists all methods by their papers."""
    papers: dict[str, list[list[str]]] = {}
    for one in (method for method in methods if method.name != "Algorithm"):
        row = [f"[`{one.name}`]({one.name}.md)", one.sum_only.partition(",")[0], markdown(one.about)]
        papers.setdefault(paragraph(catalogue.description_of(one)[0]), []).append(row)
    blocks = [f"{paper}\n\n{table(['method', 'sum-only', 'idea'], rows)}" for paper, rows in papers.items()]
    return "\n\n".join(["# Methods", METHODS, *blocks, toctree([one.name for one in methods])])


def by_problem_page(methods: Sequence[Entry]) -> str:
    """Return the page that lists methods by the problem that they are for."""
    about = {method.name: markdown(method.about) for method in methods}
    blocks = ["# Methods by problem", BY_PROBLEM]
    for problem in PROBLEMS:
        blocks.append(f"## {problem.title[0].upper()}{problem.title[1:]}")
        if names := (*problem.methods, *problem.others):
            blocks.append(table(["method", "idea"], [[f"[`{name}`]({name}.md)", about[name]] for name in names]))
        blocks += [problem.besides] if problem.besides else []
    return "\n\n".join(blocks)


def method_page(method: Entry) -> str:
    """Return the page of a method: what `lightning-fl list NAME` prints, with links."""
    options = (
        ["members:"] if method.name == "Algorithm" else ["class-doc-from: class"]
    )  # recipes have no interface of their own
    blocks = [f"# {method.name}", rst(f".. autoclass:: lightning_fl.algorithms.{method.name}", *options)]
    blocks += map(paragraph, catalogue.description_of(method))
    if method.name in curves.kept_groups():
        blocks += ["## Curve", curves.curve_block(method.name)]
    rows = [[", ".join(f"`{slot}`" for slot in slots), slots_parts(method, slots)] for slots in SLOTS]
    blocks += ["## Parts", "The parts of the six slots with default parameters.", table(["slot", "parts"], rows)]
    blocks.append(f"[Sum-only](/how-to/secure-aggregation.md): {markdown(method.sum_only)}.")
    if method.parameters:
        blocks += ["## Parameters", parameters_table(method)]
    code = method_source.source(method)
    blocks += ["## Code, in the order of a round", f"```python\n{code}\n```"]
    if names := catalogue.configurations_of(method):
        blocks += ["## Shipped configurations", "\n".join(f"- [`{name}`](#config-{name})" for name in names)]
    return "\n\n".join(blocks)


def slots_parts(method: Entry, slots: Sequence[str]) -> str:
    """Return the parts of a slot; of codecs those of both directions."""
    parts = {slot: "<br>".join(located(path, "../../") for path in method.slots.get(slot, ())) for slot in slots}
    if len(slots) == 1:
        return parts[slots[0]] or "nothing"
    return "<br>".join(f"{slot}: {text}" for slot, text in parts.items())


def parameters_table(entry: Entry) -> str:
    """Return the parameters of a name as a table."""
    rows = []
    for name, parameter in entry.parameters.items():
        default = f"`{shown(parameter['default'])}`" if "default" in parameter else "required"
        rows.append([f"`{name}`", markdown(parameter["type"]), default, markdown(parameter["about"])])
    return table(["parameter", "type", "default", "meaning"], rows)


def parts_page(methods: Sequence[Entry]) -> str:
    """Return the page that lists the parts of every slot, and the methods that have each."""
    blocks = ["# Parts", PARTS_TEXT]
    for package in PARTS:
        members = import_module(f"lightning_fl.{package}")
        rows = []
        for name in members.__all__:
            found = getattr(members, name)
            path = f"{found.__module__}.{name}"
            users = [f"[`{one.name}`](methods/{one.name}.md)" for one in methods if is_special(path, one)]
            rows.append([located(path, "../"), markdown(first_line(found)), " ".join(users)])
        blocks += [f"## {package.capitalize()}", table(["part", "content", "methods"], rows)]
    return "\n\n".join(blocks)


def is_special(path: str, method: Entry) -> bool:
    """True if a method has a part that the base class does not have in the same slot."""
    usual = catalogue.entry("algorithms", "Algorithm").slots
    return any(path in paths and path not in usual.get(slot, ()) for slot, paths in method.slots.items())


def names_page() -> str:
    """Return the page of networks, data sets, partitions, attacks and callbacks, with their parameters."""
    blocks = ["# Networks, data, attacks, callbacks", NAMES]
    known = catalogue.entries()
    for section in (
        "models",
        "networks",
        "data",
        "partitions",
        "shifts",
        "attacks",
        "callbacks",
        "privacy",
        "selections",
    ):
        blocks.append(f"## {section.capitalize()}: `{catalogue.FLAGS[section]}`")
        for entry in (one for one in known if one.section == section):
            blocks += [f"### {entry.name}", markdown(entry.about)]
            blocks += [parameters_table(entry)] if entry.parameters else []
    return "\n\n".join(blocks)


def located(path: str, top: str) -> str:
    """Return a link to a class of a part, and one to its file among the pages of sources, which may break between words.

    Args:
        path: import path of the class.
        top: relative address of the site's first folder.
    """
    module, _, name = path.rpartition(".")
    package, file = module.split(".")[1], f"{top}_modules/{module.replace('.', '/')}.html"
    source = re.sub(r"([/_])", r"\1<wbr>", shown_source(module))
    return f'{{py:class}}`~lightning_fl.{package}.{name}` (<a href="{file}#{name}">{source}</a>)'


# -- command line and configurations --------------------------------------------------------------------------------------


def commands_page() -> str:
    """Return the page of all commands and flags."""
    blocks = ["# Commands and flags", COMMANDS]
    help_text = Path(catalogue.__file__).with_name("help.txt").read_text(encoding="utf-8")
    blocks += ["## lightning-fl", *help_blocks(help_text), "## fit, validate, test, predict", FIT]
    for section in kept_help.sections_of("fit"):
        rows = [[f"`{flag}`", markdown(text)] for flag, text in section.flags]
        blocks += [f"### {section.heading}", table(["flag", "meaning"], rows)]
    os.environ["COLUMNS"] = "80"
    others: dict[str, Callable[[], str]] = {
        "init": lambda: first_config.build_parser().format_help(),
        "study": lambda: study_parser().format_help(),
        "report": lambda: report_parser().format_help(),
        "list": catalogue.help_text,
    }
    for command, text_of in others.items():
        blocks += [f"## {command}", *help_blocks(text_of())]
    return "\n\n".join(blocks)


def configuration_groups() -> list[str]:
    """Return the folders of the shipped configurations; `single` for those in none."""
    return sorted({group_of(path) for path in shipped_configs.folder().rglob("*.yaml")})


def group_of(path: Path) -> str:
    """Return the folder of a shipped configuration."""
    inner = path.relative_to(shipped_configs.folder()).parts
    return inner[0] if len(inner) > 1 else "single"


def configurations_page(group: str) -> str:
    """Return the page with the text of every configuration of a folder."""
    blocks = [f"# {group}"]
    for path in sorted(shipped_configs.folder().rglob("*.yaml")):
        if group_of(path) == group:
            name = path.relative_to(shipped_configs.folder()).with_suffix("").as_posix()
            blocks += [f"(config-{name})=\n## {name}", fenced(path.read_text(encoding="utf-8").rstrip(), "yaml")]
    return "\n\n".join(blocks)


# -- public names ---------------------------------------------------------------------------------------------------------


def public_names() -> dict[str, list[str]]:
    """Return the names of every package, sorted."""
    packages = ["lightning_fl", *map("lightning_fl.{}".format, PACKAGES)]
    names = {package: sorted(import_module(package).__all__, key=str.lower) for package in packages}
    names["lightning_fl"].remove("__version__")
    return names


def names_with_sentences() -> str:
    """Return the page that lists the public names of all packages, each with the first line of its docstring."""
    blocks = ["# Public names", API]
    for package, names in public_names().items():
        module = import_module(package)
        rows = [[place_of(package, name), sentence_of(name, getattr(module, name))] for name in names]
        blocks += [f"## [{package}]({package}.md)", markdown(first_line(module)), table(["name", "what it is"], rows)]
    return "\n\n".join([*blocks, toctree(list(public_names()))])


def place_of(package: str, name: str) -> str:
    """Return a link to the docstring of a name, which the package itself has, or for `lightning_fl` one of its packages."""
    home = home_of(getattr(import_module(package), name), package)
    return f"{{py:obj}}`{name} <{home}.{name}>`"


def home_of(found: Any, package: str) -> str:
    """Return the package whose page has the docstring of a name."""
    module = getattr(found, "__module__", None) or package
    homes = (f"lightning_fl.{other}" for other in PACKAGES if module.startswith(f"lightning_fl.{other}."))
    return next(homes, package) if package == "lightning_fl" else package


def sentence_of(name: str, found: Any) -> str:
    """Return what a public name is, in a sentence."""
    return markdown(first_line(found)) if isclass(found) or isroutine(found) else constant_text(name)


def api_page(package: str, names: Sequence[str]) -> str:
    """Return the page of a package: the docstrings of its names."""
    module = import_module(package)
    blocks = [f"# {package}"]
    if package == "lightning_fl.algorithms":
        blocks.append(
            "Each [method](../methods/index.md) has a page, and so has their base class [`Algorithm`](../methods/Algorithm.md)."
        )
    blocks.append(rst(f".. automodule:: {package}", "no-members:"))
    for name in names:
        one = getattr(module, name)
        kind = "class" if isclass(one) else "function" if isroutine(one) else "data"
        if home_of(one, package) != package:
            blocks.append(f"{place_of(package, name)}: {sentence_of(name, one)}")
            continue
        blocks.append(f"## {name}")
        if kind == "data":
            blocks.append("```{py:currentmodule} None\n```")  # or the pages of sources link to `builtins`
            blocks.append(f"```{{py:data}} {package}.{name}\n{constant_text(name)}\n```")
        else:
            options = ("members:", "show-inheritance:") if kind == "class" else ()
            blocks.append(rst(f".. auto{kind}:: {package}.{name}", *options))
    return "\n\n".join(blocks)


def constant_text(name: str) -> str:
    """Return the docstring below the assignment of a constant or a type."""
    homes = [home for home, module in sys.modules.items() if home.startswith("lightning_fl.") and name in vars(module)]
    texts = (ModuleAnalyzer.for_module(home).find_attr_docs().get(("", name)) for home in sorted(homes))
    return markdown(" ".join(next(filter(None, texts), [])).strip())


def first_line(found: Any) -> str:
    """Return the first line of a docstring."""
    return (found.__doc__ or "").strip().partition("\n")[0]


# -- the repository's other files -----------------------------------------------------------------------------------------


def copied_page(source: str, name: str) -> str:
    """Return a Markdown file from outside docs/ as a page, with links that lead to the site's pages."""
    text = (ROOT / source).read_text(encoding="utf-8")
    text = re.sub(r"^```mermaid\n(.*?)^```$", lambda found: floors_diagram(), text, flags=re.DOTALL | re.MULTILINE)
    text = LINK.sub(lambda found: f"{found[1]}{target(found[2], source)}{found[3]}", text)
    return UNSEARCHED + text if name == "changelog" else text


def target(given: str, source: str) -> str:
    """Return where a relative link of a file leads from its page: to another page, or else to the file."""
    path = os.path.normpath(os.path.join(os.path.dirname(source), given)).replace(os.sep, "/")
    if path == "README.md":
        return "/index.md"
    if path in COPIES:
        return f"/{REFERENCE}/{COPIES[path]}.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs")
    return f"{files_address()}/{path}" if files_address() else f"../../{path}"


def files_address() -> str:
    """Return the address of the repository's files on its host; empty until pyproject.toml knows it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["tool"]["site"]["files"]).rstrip("/")
