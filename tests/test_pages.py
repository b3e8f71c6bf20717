"""Test the programs that make pages of the site, without building it; tests/test_site.py looks at the built one."""

import doctest
import re
import sys
from dataclasses import fields
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

from equations import equations, read_line, scripts  # noqa: E402
from help_tables import help_blocks  # noqa: E402
from narrow import whole_words, with_cards, with_hanging_indents  # noqa: E402

from lightning_fl.cli import catalogue  # noqa: E402

METHODS = [entry for entry in catalogue.entries() if entry.section == "algorithms"]


def test_what_docstrings_of_the_pages_programs_show_is_true() -> None:
    import equations
    import narrow

    assert doctest.testmod(equations) == (0, 4)
    assert doctest.testmod(narrow) == (0, 1)


def test_equations_of_all_methods_keep_their_words_and_get_columns() -> None:
    """Check that what the terminal prints is on the page, in order, and that every part stands in the last column."""
    blocks = [text for method in METHODS for text in catalogue.description_of(method) if catalogue.is_aligned(text)]
    assert len(blocks) > 30
    for text in blocks:
        shown = equations(text)
        assert "\n\n" not in shown  # Markdown would end the block there
        words = re.sub(r"[\s`_^{}:;]+", "", text)
        assert re.sub(r"[\s_:;]+", "", unescape(re.sub(r"<[^>]*>", "", shown))) == words, text
        for line in text.splitlines():
            if named := re.search(r" {3,}((?:rule|codec|exchange|aggregator|steps?|personal|callback): .*)$", line):
                assert read_line(line).part == named[1]


@pytest.mark.parametrize(
    ("text", "typeset"),
    [
        ("n_k Δ_k / Σ_k n_k", "n<sub>k</sub> Δ<sub>k</sub> / Σ<sub>k</sub> n<sub>k</sub>"),
        ("c_k⁺ + Q'_k", "c<sub>k</sub>⁺ + Q'<sub>k</sub>"),
        ("r_j = rank(map_j)", "map<sub>j</sub>"),
        ("(1 + s)^−½, decay^t, w^(l)", "(1 + s)<sup>−½</sup>, decay<sup>t</sup>, w<sup>(l)</sup>"),
        ("clients_per_round, val_acc, WORLD_SIZE", "clients_per_round, val_acc, WORLD_SIZE"),
    ],
)
def test_scripts_are_those_of_symbols_and_not_of_names(text: str, typeset: str) -> None:
    assert typeset in scripts(text)


HEAD = '<table class="docutils align-default"><thead><tr class="row-odd">{}</tr></thead><tbody>{}</tbody></table>'


def made_table(names: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th class="head"><p>{name}</p></th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td><p>{cell}</p></td>' for cell in row)}</tr>" for row in rows)
    return HEAD.format(head, body)


def test_wide_tables_become_cards_whose_cells_name_their_columns() -> None:
    wide = made_table(
        ["claim", "the paper's &amp; ours", "verdict"],
        [["a_very_long_name_of_a_claim", "0.123", "not_reproduced_here"]],
    )
    shown = with_cards(f"<p>before</p>{wide}<p>after</p>")
    assert shown.count('<table class="cards docutils') == 1
    assert re.findall(r'data-column="([^"]*)"', shown) == ["claim", "the paper's & ours", "verdict"]
    assert re.sub(r' data-column="[^"]*"|cards ', "", shown) == f"<p>before</p>{wide}<p>after</p>"


def test_narrow_tables_stay_as_they_are() -> None:
    narrow = made_table(["method", "idea"], [["FedAvg", "the mean of all models"]])
    assert with_cards(narrow) == narrow


def test_flags_get_a_class_and_long_code_none() -> None:
    short, long = '<span class="pre">--data.num_clients</span>', f'<span class="pre">{"a-" * 30}</span>'
    assert whole_words(short + long) == short.replace('"pre"', '"pre whole"') + long


def test_flags_in_blocks_of_code_get_a_class_too() -> None:
    block = '<pre><span></span>lightning-fl<span class="w"> </span>fit --data.num_clients=20 \\\n--x</pre>'
    shown = whole_words(block)
    assert re.findall(r'<span class="whole">([^<]*)</span>', shown) == ["lightning-fl", "--data.num_clients", "--x"]
    assert re.sub(r"<[^>]*>", "", shown) == re.sub(r"<[^>]*>", "", block)


def test_lines_of_code_know_their_indentation() -> None:
    block = '<pre><span></span><span class="k">def</span> f():\n    <span class="sd">"""One.\n\n      Two."""</span>\n</pre>'
    shown = with_hanging_indents(f"<p>before</p>{block}")
    assert re.findall(r"--indent: (\d+)ch", shown) == ["0", "4", "0", "6"]
    assert re.sub(r"<[^>]*>", "", shown) == "before" + re.sub(r"<[^>]*>", "", block)
    for line in shown.split('<span class="line"')[1:]:
        assert line.count("<span") + 1 == line.count("</span>")
    source = '<pre><div><a class="viewcode-back">x</a></div></pre>'
    assert with_hanging_indents(source) == source


def test_help_becomes_tables_with_every_argument() -> None:
    from lightning_fl.report.flags import build_parser

    parser = build_parser()
    usage, *blocks = help_blocks(parser.format_help())
    assert usage.startswith("```text\nusage: lightning-fl report")
    rows = [line for block in blocks for line in block.splitlines() if line.startswith("| `")]
    assert len(rows) == len(parser._actions)
    shown = " ".join(rows)
    for action in parser._actions:
        assert all(f"{name}" in shown for name in action.option_strings)
    help_text = (ROOT / "lightning_fl" / "cli" / "help.txt").read_text(encoding="utf-8")
    (row,) = [line for block in help_blocks(help_text) for line in block.splitlines() if "print_completion" in line]
    assert row.startswith("| `--print_completion` | Print the script")
    assert "`shtab-bash`, `shtab-zsh`" in row
    assert "its trainer.default\\_root\\_dir), or a folder with runs below it" in shown


def test_the_home_page_counts_what_is_inside() -> None:
    pytest.importorskip("sphinx", reason="pip install 'lightning-fl[docs]'")
    import inside

    counted = {fact.title: fact.count for fact in inside.facts()}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert counted["methods"] == len(METHODS) - 1  # without their base class
    assert f"[{counted['methods']} in all]" in readme
    assert counted["asynchronous methods"] == sum("StaleMean" in str(method.slots) for method in METHODS)
    assert min(counted.values()) > 1
    shown = inside.numbers()
    assert all(f"<b>{fact.count}</b> {fact.title}</a>" in shown for fact in inside.facts())
    for fact in inside.facts():
        page = fact.page.removesuffix(".html")
        assert page.startswith("reference/") or (ROOT / "docs" / f"{page}.md").is_file()


WORDS = """
accountant, accuracy per byte, asynchronous, backdoor, bandwidth, benchmark, Byzantine, callback, checkpoint, client dropout,
client sampling, codec, communication cost, compatibility, compression, container, CUDA, custom dataset, custom method,
custom model, data heterogeneity, DDP, differential privacy, Dirichlet, distributed training, divergence, Docker, DP-SGD, early
stopping, energy, error feedback, fairness, FedBuff, federated averaging, FEMNIST, fine-tuning, getting started, grid search,
Hugging Face, hyperparameter, installation, Jupyter, Krum, LaTeX, LEAF, LLM, logging, LoRA, metrics.csv, mixed precision,
multi-gpu, multi-node, NaN, natural partition, non-IID, performance, personalization, poisoning, pruning, QSGD, quantisation,
quantization, reproducibility, resume, robust aggregation, secure aggregation, seed, simulation, Slurm, sparsification, speed,
straggler, sweep, system heterogeneity, TensorBoard, top-k, torchrun, tutorial, validation, wandb, Weights & Biases, YAML
"""
"""Words that newcomers type into the search."""


def test_the_search_knows_the_words_of_newcomers() -> None:
    """Check the comments that lead the search; tests/test_site.py checks what a build makes of them."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    comments = [found for text in texts for found in re.findall(r"^<!-- index: (.+) -->$", text, re.MULTILINE)]
    known = {word.strip().lower() for comment in comments for word in comment.split(",")}
    wanted = {word.strip().lower() for word in " ".join(WORDS.split()).split(",")}
    assert wanted - known == set()


@pytest.mark.parametrize(
    "term", ["compatibility", "differential privacy", "FAQ", "glossary", "natural partition", "secure aggregation"]
)
def test_titles_use_the_terms_of_the_field(term: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    titles = [re.findall(r"^# (.+)$", text, re.MULTILINE)[0] for text in texts]
    assert any(title.lower().startswith(term.lower()) for title in titles)


@pytest.mark.long
def test_the_diagram_of_the_round_follows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="pip install 'lightning-fl[docs]'")
    import diagrams

    assert "take_steps" in diagrams.round_diagram()
    monkeypatch.setattr(diagrams, "UP", diagrams.UP[::-1])
    with pytest.raises(ValueError, match="in this order"):
        diagrams.round_diagram()


def test_the_page_of_the_round_names_every_role() -> None:
    from lightning_fl.engine.roles import Roles

    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "docs" / "explanation" / "round.md").read_text(), re.MULTILINE
    )
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in fields(Roles)} - {"counts_each"} <= named


@pytest.mark.matrix
def test_the_page_of_errors_quotes_sentences_of_the_code() -> None:
    pytest.importorskip("sphinx", reason="pip install 'lightning-fl[docs]'")
    import sentences

    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page.count("\n> ") > 15
    assert len(sentences.with_sentences(page)) > 10 * len(page)
    assert {sentences.topic_of(sentence) for sentence in sentences.sentences()} == {*sentences.TOPICS}
    with pytest.raises(ValueError, match="no error or warning says 'all is well' any more"):
        sentences.with_sentences("> all is well\n")


def test_a_sentence_has_dots_for_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="pip install 'lightning-fl[docs]'")
    import sentences

    monkeypatch.setattr(sentences, "ROOT", tmp_path)
    path = tmp_path / "lightning_fl" / "data" / "made.py"
    path.parent.mkdir(parents=True)
    path.write_text('require(x > 0, f"x must be {a}{b} in " + "[0, 1].")\nraise UserError(text)\nprint("nothing")\n')
    assert list(sentences.of_file(path)) == [("x must be … in [0, 1].", "data/made"), ("…", "data/made")]


def test_a_report_of_a_folder_has_only_the_runs_of_its_page() -> None:
    """Check every page's reports beside the runs of all pages, as readers follow them in one folder."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    pattern = re.compile(r"""default_root_dir(?: |=)f?"?(\w[^\s"'{]*)""")
    folders = {page: {*pattern.findall(text), "runs/quickstart"} for page, text in texts.items()}
    reports = [
        (page, word)
        for page, text in texts.items()
        for words in re.findall(r"^lightning-fl report ([^\n]*)", text, re.MULTILINE)
        for word in words.split()
        if word.startswith("runs")
    ]
    assert len(reports) > 5
    for page, folder in reports:
        inside = {run for run in folders[page] if f"{run}/".startswith(f"{folder}/")}
        others = {run for other in pages if other != page for run in folders[other] - inside}
        is_run = folder in inside  # of which a report reads nothing below
        assert is_run or not [run for run in others if f"{run}/".startswith(f"{folder}/")], (page.name, folder)
