"""Summary and tables of the papers' claims in results.md, tables of runs on the papers' pages, and pictures.

All are made from the kept runs.

python docs/claims.py

An archive that is new in results/runs, such as feddumap_cnn.tar.xz of runs/studies/feddumap_cnn, fills the rows of its study.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill

from markup import table

from lightning_fl.cli.planned_fit import resolve
from lightning_fl.report import report, tables
from lightning_fl.report.command import OfStudy
from lightning_fl.report.comparison import Curve, Group, Metric
from lightning_fl.report.document import Table
from lightning_fl.report.tables import Column, Row
from lightning_fl.study.budget import efficiency_table
from lightning_fl.study.claims import NOT_RUN, Claim, Verdict, corrected, shown
from lightning_fl.study.command import Curves, curves_of, floors_of, spending_of, verdicts_of, within_budgets
from lightning_fl.study.search_report import costs_table, flags_table, search_parts
from lightning_fl.study.searches import open_searches
from lightning_fl.study.study_file import PlannedRun, StudyFile, read_study

ROOT = Path(__file__).parents[1]
RUNS, IMAGES = ROOT / "docs" / "results" / "runs", ROOT / "docs" / "images"
PAGES = [
    ROOT / "docs" / "results.md",
    *sorted((ROOT / "docs" / "results").glob("*.md")),
    ROOT / "docs" / "tutorials" / "tuned-comparison.md",
    ROOT / "docs" / "tutorials" / "when-clients-differ.md",
    ROOT / "docs" / "tutorials" / "when-clients-are-weak.md",
]
PLACE = re.compile(
    r"(<!-- (claims|runs|search|summary|grid|success|budget): ([^>]+?) -->\n\n).*?(<!-- end -->)", re.DOTALL
)
STUDIES = ROOT / "configs" / "studies"
TABLES = {
    "FedDUMAP": (
        *("feddumap_cnn", "feddumap_lenet5", "feddumap_cifar10", "feddumap_small", "feddumap_steps"),
        "tuned_feddum",
    ),
    "FedLDF": ("fedldf_lenet5", "fedldf_small", "tuned_fedldf"),
    "FedDP": ("feddp_width", "feddp_small", "feddp_clients", "feddp_controls", "tuned_feddp"),
    "FedAdam-SSM": (
        *("fedadam_ssm", "fedadam_ssm_dirichlet", "fedadam_ssm_clients", "fedadam_ssm_small"),
        "tuned_fedadam_ssm",
    ),
    "Server optimisers": ("fedopt_clients",),
    "Personal models": ("personal_small",),
}
"""Studies of each table, those nearest to the paper's regime first."""
LONG = (
    *("feddumap", "feddumap_server", "feddumap_vgg11", "feddumap_server_vgg11", "feddumap_lenet5_long"),
    *("feddumap_cifar100", "feddumap_cifar100_vgg11", "feddumap_cifar100_lenet5"),
    *("fedldf", "feddp"),
    *("fedadam_ssm_resnet18", "fedadam_ssm_resnet18_dirichlet", "fedadam_ssm_vgg11", "fedadam_ssm_vgg11_dirichlet"),
)
"""Studies in the papers' own regimes that need a GPU or days of a CPU."""
LONG_TABLE = "Long studies"
VERDICTS = {
    "reproduced, or holds": (r"(reproduced|holds)", "the interval of our seeds lies on the claim's side"),
    "within the margin": (r"within the margin", "no more is lost than the margin, but the paper's sign is not seen"),
    "undecided": (
        r".*: undecided(?!.*and not the paper's value)",
        "the interval reaches to both sides, and to the paper's value: more seeds would tell",
    ),
    "undecided, not the paper's size": (
        r".*: undecided.*and not the paper's value",
        "the interval reaches to both sides, but not to the paper's value",
    ),
    "below the floor": (r".*: below the floor", "a method differs from itself by as much"),
    "the other sign": (r".*: the other sign", "the interval lies on the side against the claim"),
    "target not reached": (
        r".*: the target was not reached",
        "a method did not reach the target with all seeds, so there is no ratio",
    ),
    "target reached": (r".*not.*: .* reaches the target", "the paper says that it is never reached"),
    "ceiling effect": (
        r"ceiling effect",
        "the task is so easy that the other method leaves less room than the paper's gain",
    ),
    "one seed": (r"one seed", "has no interval, and so reproduces nothing"),
    "not run yet": (NOT_RUN, "needs a GPU, or hours to days of a CPU"),
    "no figure": (
        r".*: (there is no|there are no|no .* are counted|not all rounds|the bytes pay|a half of)",
        "a run lacks what is compared",
    ),
}
"""Kinds of verdicts in the summary: the pattern of their words, and why a claim has such a verdict."""
REGIMES = ("in the paper's regime", "in another regime", "of no paper")
"""Kinds of claims in the summary: of a paper, and whether the runs are in its own regime; or of nobody but these pages."""
WIDTH = 140
"""Characters of a line of these pages at most; rows of tables cannot be wrapped."""
TIMES = "×\N{NO-BREAK SPACE}"
HEADER = ["claim", "paper", "what the paper prints", "here (95 % interval)", "verdict", "after correction"]
OWN_SAMPLES = ("feddp_clients", "feddp_controls")
"""Studies that measure clients on their own samples, in one of two columns: that of `ClientEvaluation`, or FedDP's own."""


@dataclass(frozen=True)
class Picture:
    """Picture of kept runs, as a report draws it.

    Attributes:
        study: study of the runs.
        drawn: end of the name that the report gives the picture.
        name: its name in docs/images.
        cells: cells of the study, with the names of their lines.
        flags: flags of the report.
        kinds: formats of the file.
    """

    study: str
    drawn: str
    name: str
    cells: Mapping[str, str]
    flags: Sequence[str]
    kinds: Sequence[str] = ("svg",)


PICTURES = (
    Picture(
        "accuracy_per_byte",
        "accuracy_by_uplink",
        "accuracy_by_uplink",
        {
            "plain-dense": "FedAvg, 32 bits a number",
            "plain-cast": "FedAvg, 16 bits",
            "plain-top": "FedAvg, top-k: the largest 5 %",
            "plain-qsgd_elias": "FedAvg, QSGD: -1, 0 or 1",
        },
        ("--metric=test/accuracy", "--window=9"),
        ("png", "svg"),
    ),
    *(
        Picture(
            "accuracy_per_byte",
            drawn,
            name,
            {cell.name: cell.name for cell in read_study(STUDIES / "accuracy_per_byte.yaml").cells},
            ("--metric=test/accuracy", "--window=9"),
        )
        for drawn, name in (
            ("front", "accuracy_per_byte"),
            ("areas", "accuracy_per_byte_areas"),
            ("areas_total_traffic", "accuracy_per_byte_areas_total"),
        )
    ),
    *(
        Picture(
            "fedadam_ssm",
            f"accuracy_by_{axis}",
            name,
            {cell: cell for cell in ("FedAdam", "Top", "SSM", "OneBitAdam", "EfficientAdam")},
            ("--ylabel=test accuracy", "--window=9", f"--traffic={traffic}"),
        )
        for axis, name, traffic in (
            ("uplink", "fedadam_ssm_uplink", "up"),
            ("total_traffic", "fedadam_ssm_total", "total"),
        )
    ),
    *(
        Picture(
            "tuned_digits",
            drawn,
            f"tuned_digits_{name}",
            {cell: cell for cell in ("FedAvg", "FedProx", "SCAFFOLD", "FedAdamSSM")},
            ("--metric=test/accuracy",),
        )
        for drawn, name in (("trials", "trials"), ("accuracy_by_uplink", "uplink"))
    ),
    Picture(
        "fedldf_small",
        "accuracy_by_uplink",
        "fedldf",
        {f"{name}-dirichlet-pass": name for name in ("FedAvg", "FedLDF", "Random", "HDFL", "FedADP")},
        ("--window=39",),
    ),
    Picture(
        "feddumap_small",
        "accuracy_by_rounds",
        "feddumap",
        {
            "FedAvg-five": "FedAvg",
            "FedDU-five": "FedDU",
            "FedDUSM-five": "FedDUSM",
            "FedDUDM-five": "FedDUDM",
            "FedDUM-0.9-five": "FedDUM",
        },
        ("--metric=test/accuracy", "--window=39"),
    ),
    Picture(
        "feddumap_steps",
        "accuracy_by_rounds",
        "feddumap_steps",
        {
            "FedAvg-five": "FedAvg",
            "FedDU-five": "FedDU",
            "FedDUSM-five": "FedDUSM",
            "FedDUDM-five": "FedDUDM",
            "FedDUM-0.9-five": "FedDUM",
        },
        ("--metric=test/accuracy", "--window=29"),
    ),
    Picture(
        "fedadam_ssm_small",
        "accuracy_by_uplink",
        "fedadam_ssm",
        {
            "FedAdam": "FedAdam",
            "Top": "Top",
            "SSM": "SSM",
            "SSM_M": "SSM, first moment",
            "SSM_V": "SSM, second moment",
            "FairnessTop": "Fairness-Top",
            "OneBitAdam": "1-bit Adam",
            "EfficientAdam": "Efficient Adam",
        },
        ("--window=9",),
    ),
    Picture(
        "feddp_small",
        "accuracy_by_rounds",
        "feddp",
        {
            "FedAvg": "FedAvg",
            "SCAFFOLD": "SCAFFOLD",
            "FedDP-FedAvg": "FedDP over FedAvg",
            "FedDP": "FedDP over SCAFFOLD",
        },
        ("--window=9",),
    ),
    *(
        Picture(
            name,
            "panels",
            name,
            {cell.name: cell.name for cell in read_study(STUDIES / f"{name}.yaml").cells},
            ("--metric=test/accuracy", "--target=0.85", "--window=1", "--panels", "--xscale=log", "--size=10x3.6"),
        )
        for name in ("devices", "weak_devices")
    ),
    Picture(
        "feddumap_cnn",
        "accuracy_by_rounds",
        "feddumap_cnn",
        {name: name for name in ("FedAvg", "FedDU", "FedDUM", "FedDUSM", "HybridFL", "DataSharing")},
        ("--ylabel=test accuracy", "--window=39"),
    ),
)
"""Pictures of the README and of the pages."""


def kept_runs(archive: Path, folder: Path) -> list[PlannedRun]:
    """Unpack the runs of a study, whatever the digests of their settings were then."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    study = folder / archive.name.partition(".")[0]
    paths = sorted(path.parent for path in study.glob("*/seed-*/metrics.csv"))
    return [PlannedRun(path.parent.name, int(path.name.split("-")[1]), path, (), 0) for path in paths]


@cache
def read_kept(name: str) -> tuple[StudyFile, Curves]:
    """Return a study and the curves of its kept runs; {} if none are kept."""
    file, archive = read_study(STUDIES / f"{name}.yaml"), RUNS / f"{name}.tar.xz"
    if not archive.is_file():
        return file, {}
    with TemporaryDirectory() as folder:
        return file, curves_of(file, kept_runs(archive, Path(folder)))


def judged(name: str) -> list[tuple[Claim, Verdict]]:
    """Return the claims of a study with their verdicts."""
    file, curves = read_kept(name)
    return list(zip(file.claims, verdicts_of(file, curves), strict=True))


def claims_of(title: str) -> str:
    """Return a table for each study of a title: first those that have runs; those that have none are folded."""
    names = LONG if title == LONG_TABLE else TABLES[title]
    stands = iter(corrected([verdict for name in names for _, verdict in judged(name)]))
    blocks = {name: study_block(name, [next(stands) for _ in judged(name)]) for name in names}
    return "\n\n".join(blocks[name] for name in sorted(names, key=lambda name: not has_runs(name)))


def has_runs(name: str) -> bool:
    """True if a claim of a study has a verdict."""
    return any(verdict.outcome != NOT_RUN for _, verdict in judged(name))


def study_block(name: str, stands: Sequence[str]) -> str:
    """Return the regimes of a study, and the table of its claims.

    Args:
        name: name of the study.
        stands: whether each verdict stands if those of all studies of the table are corrected together.
    """
    file, pairs = read_study(STUDIES / f"{name}.yaml"), judged(name)
    rows = [
        [claim.text, printed(claim), claim.source, figure(claim, verdict), verdict.outcome, said]
        for (claim, verdict), said in zip(pairs, stands, strict=True)
    ]
    kept = [i for i in range(len(HEADER)) if any(row[i] for row in rows)]
    lines = table([HEADER[i] for i in kept], [[row[i] for i in kept] for row in rows])
    said = f"`{name}`."
    if file.regime:
        said = f"**{file.regime.here}** (`{name}`)."
        said += f" In the paper: {file.regime.paper}." * any(claim.is_of_paper for claim, _ in pairs)
    if has_runs(name):
        left = sum(verdict.outcome == NOT_RUN for _, verdict in pairs)
        said += f" {floors_of(file, read_kept(name)[1])}"
        said += f" Claims not run yet: {left} (`lightning-fl study {name}`, {file.takes})." * bool(left)
    said = fill(said, WIDTH, break_on_hyphens=False)
    if has_runs(name):
        return f"{said}\n\n{lines}"
    head = f"<details><summary>{len(rows)} claims not run yet: lightning-fl study {name}, {file.takes}</summary>"
    return f"{head}\n\n{said}\n\n{lines}\n\n</details>"


def regime_of(file: StudyFile, claim: Claim) -> str:
    """Return whose a claim is, and in whose regime it is tested, of `REGIMES`."""
    if not claim.is_of_paper:
        return REGIMES[2]
    return REGIMES[0] if file.regime is not None and file.regime.is_alike else REGIMES[1]


def summary_of(title: str) -> str:
    """Return how many claims have which kind of verdict, in whose regime and in which tables, and why."""
    tables_of = {**TABLES, LONG_TABLE: LONG}
    where = {kind: Counter[str]() for kind in VERDICTS}
    counts = {kind: Counter[str]() for kind in VERDICTS}
    stands = dict.fromkeys(REGIMES, 0)
    for table_title, names in tables_of.items():
        found = [(read_kept(name)[0], claim, verdict) for name in names for claim, verdict in judged(name)]
        for (file, claim, verdict), said in zip(found, corrected([of for _, _, of in found]), strict=True):
            kind, regime = kind_of(verdict.outcome), regime_of(file, claim)
            where[kind][table_title] += 1
            counts[kind][regime] += 1
            stands[regime] += kind == "reproduced, or holds" and not said.startswith("undecided")
    rows = [
        [
            kind,
            *(str(of[regime]) for regime in REGIMES),
            ", ".join(f"{place} {count}" for place, count in where[kind].items()),
            VERDICTS[kind][1],
        ]
        for kind, of in counts.items()
        if of
    ]

    def sentence(regime: str, who: str, yes: str) -> str:
        of = {kind: count[regime] for kind, count in counts.items()}
        num_run = sum(of.values()) - of[NOT_RUN]
        undecided = of["undecided"] + of["undecided, not the paper's size"]
        return (
            f"**{who}: {num_run} of {sum(of.values())} claims have runs; {of['reproduced, or holds']} {yes}** "
            f"({stands[regime]} after the correction), {undecided} are undecided, and {of['the other sign']} have the other sign."
        )

    lines = [
        sentence(REGIMES[0], f"{title} in the papers' own regimes", "are reproduced"),
        sentence(REGIMES[1], f"{title} in other regimes", "are reproduced"),
        sentence(REGIMES[2], "Claims that no paper makes", "hold"),
    ]
    points = "\n".join(fill(f"- {line}", WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
    counted = "A claim counts once for each study that tests it, and for each number of bytes."
    return f"{points}\n\n{counted}\n\n{table(['verdict', *REGIMES, 'where', 'why'], rows)}"


def kind_of(outcome: str) -> str:
    """Return the kind of a verdict: the first that fits."""
    return next(kind for kind, (pattern, _) in VERDICTS.items() if re.match(pattern, outcome))


def printed(claim: Claim) -> str:
    """Return the paper's figure; a ratio has a sign of multiplication."""
    return "" if claim.paper is None else f"{TIMES * claim.is_ratio}{claim.paper:.3g}"


def figure(claim: Claim, verdict: Verdict) -> str:
    """Return our figure with its interval; empty without runs."""
    if verdict.mean is None:
        return ""
    interval = verdict.interval(claim.is_ratio)
    to = "" if claim.target is None else f", {claim.what}"
    text = f"{TIMES * claim.is_ratio}{shown(verdict.mean, claim.is_ratio)}" + f" ({interval})" * bool(interval) + to
    return text if verdict.area is None else f"{text}; over log bytes {shown(verdict.area)}"


def runs_of(name: str) -> str:
    """Return the report's tables of a study's kept runs, or the command that makes them."""
    file, curves = read_kept(name)
    if not curves:
        return f"Not run yet; all runs take {file.takes}."
    cells = [cell.name for cell in file.cells if cell.name in curves]
    groups = [Group(cell, tuple(curves[cell].values())) for cell in cells]
    metric = groups[0].curves[0].metric
    parts = [tables.results(groups, metric)]
    if metric.target is not None:
        parts.append(tables.prices(groups, metric))
    if name in OWN_SAMPLES:
        parts.append(on_own_samples(groups))
    texts = [part.markdown() for part in parts]
    remarks = (fill(text, WIDTH, break_on_hyphens=False) for text in tables.other_orders(groups, metric))
    return "\n\n".join([*texts, *remarks])


def search_of(name: str) -> str:
    """Return what the kept search of a study has found and spent."""
    file, archive = read_study(STUDIES / f"{name}.yaml"), RUNS / f"{name}.tar.xz"
    if not archive.is_file():
        return f"Not run yet; all runs take {file.takes}."
    with TemporaryDirectory() as folder:
        kept_runs(archive, Path(folder))
        searches = open_searches(file, Path(folder, name), resolve, checks=False)
        return f"{flags_table(searches).markdown()}\n\n{costs_table(searches).markdown()}"


def budget_of(of: str) -> str:
    """Return what the kept runs of a study reach within its budget in a direction.

    Args:
        of: name of the study, and the direction.
    """
    name, traffic = of.split()
    file, curves = read_kept(name)
    (budget,) = (each for each in file.budgets if each.traffic == traffic)
    ordered = {cell.name: curves[cell.name] for cell in file.cells if cell.name in curves}
    return f"{budget.range[0].upper()}{budget.range[1:]}:\n\n{efficiency_table(spending_of(budget, ordered), budget).markdown()}"


def grid_of(name: str) -> str:
    """Return the final accuracy of attacks (rows) on defences (columns), the mean over the seeds of the kept runs."""
    return _grid(name, "val/accuracy")


def success_of(name: str) -> str:
    """Return the final share of other classes that a trigger turns into the target, with a backdoor and without attack."""
    flag = "--trainer.adversary.attack="
    shown = [cell for cell in read_kept(name)[0].cells if not any(flag in word for word in cell.arguments)]
    shown += [cell for cell in read_kept(name)[0].cells if f"{flag}Backdoor" in cell.arguments]
    return _grid(name, "attack/success", {cell.choices[0] for cell in shown})


def _grid(name: str, column: str, attacks: Collection[str] = ()) -> str:
    """Return a table of the last values of a column; one of fewer seeds than the study has says of how many.

    Args:
        name: name of the study, whose axes are attacks and defences.
        column: column of metrics.csv.
        attacks: attacks to show; all if empty.
    """
    file, curves = read_kept(name)
    if not curves:
        return f"Not run yet; all runs take {file.takes}."
    rows = list(dict.fromkeys(cell.choices[0] for cell in file.cells))
    defences = list(dict.fromkeys(cell.choices[1] for cell in file.cells))
    cells = {cell.choices: cell.name for cell in file.cells}

    def shown_cell(attack: str, defence: str) -> str:
        runs = curves.get(cells[attack, defence], {})
        values = [float(curve.record.columns[column][-1]) for curve in runs.values()]
        if not values:
            return "–"
        few = f" ({len(values)})" if len(values) < len(file.seeds) else ""
        return f"{sum(values) / len(values):.2f}{few}"

    chosen = [attack for attack in rows if not attacks or attack in attacks]
    lines = [[attack, *(shown_cell(attack, defence) for defence in defences)] for attack in chosen]
    return table(["attack", *defences], lines)


def on_own_samples(groups: Sequence[Group]) -> Table:
    """Return the mean over clients of their accuracy on their own held-out samples, at the end of a run."""
    column = Column("final accuracy of the clients on their own images", "share")
    rows: list[Row] = []
    for group in groups:
        names = (f"{group.curves[0].metric.name}_clients_mean", f"{group.curves[0].metric.name}_local")
        name = next((name for name in names if all(name in curve.record.columns for curve in group.curves)), None)
        if name is not None:
            own = Group(group.label, tuple(Curve(curve.record, Metric(name)) for curve in group.curves))
            rows.append(([group.label, str(len(own.curves))], {"own": own.spread("final")}))
    return tables.table(["method", "runs"], {"own": column}, rows)


def with_tables(page: str) -> str:
    """Return a page with its tables made anew, which stand between a comment such as `claims: …` or `runs: …`, and `end`."""
    makers = {"claims": claims_of, "runs": runs_of, "search": search_of, "summary": summary_of}
    makers |= {"grid": grid_of, "success": success_of, "budget": budget_of}
    return PLACE.sub(lambda at: f"{at[1]}{makers[at[2]](at[3])}\n\n{at[4]}", page)


def draw(picture: Picture) -> None:
    """Draw a picture from the kept runs."""
    archive = RUNS / f"{picture.study}.tar.xz"
    with TemporaryDirectory() as folder:
        runs = kept_runs(archive, Path(folder))
        lines: dict[str, Sequence[str]] = {
            name: [str(run.folder) for run in runs if run.cell == cell] for cell, name in picture.cells.items()
        }
        words = [path for paths in lines.values() for path in paths]
        flags = [*picture.flags, f"--format={','.join(picture.kinds)}", f"--out={folder}/report"]
        file, curves = read_kept(picture.study)
        of_study = OfStudy(lines, sections=lambda look: within_budgets(file, curves, look))
        if file.search is not None:
            searches = open_searches(file, Path(folder, picture.study), resolve, checks=False)
            of_study = OfStudy(lines, sections=lambda look: {"Search": search_parts(searches, look)})
        report([*words, *flags], of_study)
        for kind in picture.kinds:
            (drawn,) = Path(folder, "report").glob(f"*{picture.drawn}.{kind}")
            (IMAGES / f"{picture.name}.{kind}").write_bytes(drawn.read_bytes())


def main() -> None:
    """Write the tables and the pictures."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    for picture in PICTURES:
        draw(picture)


if __name__ == "__main__":
    main()
