"""Test pictures that are hard to lay out: many lines, long names, one round, equal curves, narrow columns."""

import re
from itertools import combinations
from math import inf
from pathlib import Path

import numpy as np
import pytest
from made_runs import groups_of, require_readable, rising, write_run
from matplotlib import rc_context
from matplotlib.figure import Figure

from lightning_fl.errors import UserError
from lightning_fl.outputs.figures import Look, line_style
from lightning_fl.report import report
from lightning_fl.report.comparison import Group, Metric
from lightning_fl.report.document import Picture
from lightning_fl.report.plots import draw_bits, draw_curves, draw_panels, scale_axis

COLUMN, SLIDE = Look(size=(3.3, 2.4), font_size=8), Look(size=(10, 5.6), font_size=14)
LONG = "FedAdamSSM, ErrorFeedback(TopK(0.05)), uplink={}"


def many(folder: Path, count: int, name: str = "Method {}") -> list[Group]:
    """Return groups of one run each, whose accuracies differ."""
    (group,) = groups_of(write_run(folder, rising(20)))
    record = group.curves[0].record
    groups = []
    for index in range(count):
        columns = {**record.columns, "val/accuracy": record.columns["val/accuracy"] * (1 + index)}
        of = type(record)(folder / str(index), columns, record.settings, "FedAvg", record.bits, ())
        groups.append(Group(name.format(index), (type(group.curves[0])(of, Metric(window=1)),)))
    return groups


@pytest.mark.parametrize("look", [Look(), COLUMN, SLIDE], ids=["default", "column", "slide"])
@pytest.mark.parametrize(("count", "name"), [(30, "Method {}"), (12, LONG)], ids=["30 lines", "long names"])
@pytest.mark.parametrize("has_panels", [False, True])
def test_curves_and_their_legend_have_room(count: int, name: str, look: Look, has_panels: bool, tmp_path: Path) -> None:
    groups = many(tmp_path / "run", count, name)
    if has_panels:
        look = Look(size=(max(7, look.size[0]), 2.4), font_size=look.font_size)
    draw = draw_panels(groups, Metric(), look) if has_panels else draw_curves(groups, Metric(), "uplink", look)
    assert draw is not None
    Picture("curves", "", draw, look)
    with rc_context(look.style):  # as files are drawn: the size of the text decides how many ticks there are
        require_readable(draw)
    height = min(axes.get_window_extent().height for axes in draw.axes) / draw.dpi * 72
    assert height > 9 * look.font_size, "six lines of text, and what parts them"


def test_the_name_of_the_vertical_axis_is_whole(tmp_path: Path) -> None:
    look = Look(font_size=24, ylabel="accuracy on held-out samples")
    figure = draw_curves(many(tmp_path / "run", 9), Metric(), "uplink", look)
    assert figure is not None
    Picture("curves", "", figure, look)
    with rc_context(look.style):
        require_readable(figure)


@pytest.mark.parametrize("ends", [(2.5e6, 7.5e7), (5e6, 7.5e7), (2.5e6, 4e7), (2.5e6, 2.2e7), (1.1e6, 9e8)])
@pytest.mark.parametrize("look", [Look(size=(7 / 3, 2.4), font_size=8), Look(size=(2.5, 4.2)), COLUMN, SLIDE])
@pytest.mark.sampled(inf)
def test_a_logarithmic_axis_names_two_numbers_or_more(look: Look, ends: tuple[float, float]) -> None:
    with rc_context(look.style):
        axes = Figure(figsize=look.size, layout="constrained").subplots()
        axes.plot(ends, (0, 1))
        scale_axis(axes, "uplink", np.array(ends), look)
        assert sum(ends[0] <= tick <= ends[1] for tick in axes.get_xticks()) > 1
        require_readable(axes.figure)


def test_a_logarithmic_axis_of_values_without_one_above_0_is_linear(tmp_path: Path) -> None:
    figure = draw_curves(groups_of(write_run(tmp_path / "run", [0.0] * 9)), Metric(), "rounds", Look(yscale="log"))
    assert figure is not None
    assert figure.axes[0].get_yscale() == "linear"


@pytest.mark.matrix
def test_a_size_in_which_the_curves_have_no_room_is_refused_with_one_that_has(tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / f"m{i}", rising(20, 0.001 * (i + 1)), f"M{i}")) for i in range(30)]
    out = tmp_path / "out"
    flags = ["--panels", "--font-size", "8", "--format", "svg", "--out", str(out)]
    with pytest.raises(UserError) as refused:
        report([*folders, *flags, "--size", "7x1.8"])
    said = str(refused.value)
    assert said.startswith("--size 7x1.8 leaves no room for the curves of accuracy_panels, whose 30 lines are named in")
    assert not out.exists(), "nothing is written"
    (size,) = re.findall(r"give at least --size (\S+),", said)
    report([*folders, *flags, "--size", size])
    width, height = map(float, size.split("x"))
    assert f'viewBox="0 0 {72 * width:g} {72 * height:g}"' in (out / "accuracy_panels.svg").read_text()


def test_lines_of_a_picture_differ_in_colour_dashes_or_markers() -> None:
    styles = [str(line_style(index)) for index in range(100)]
    assert len({*styles}) == 100


def test_equal_curves_are_both_seen_and_one_round_has_one_tick(tmp_path: Path) -> None:
    same = groups_of(*(write_run(tmp_path / name, [0.5] * 20, name) for name in ("FedAvg", "FedProx", "FedNova")))
    figure = draw_curves(same, Metric(), "rounds", Look())
    assert figure is not None
    named = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
    first, *others = (named[group.label] for group in same)
    assert not first.is_dashed()
    assert all(line.is_dashed() for line in others)
    for one, other in combinations(others, 2):
        assert one._unscaled_dash_pattern != other._unscaled_dash_pattern
    groups = groups_of(*(write_run(tmp_path / f"one-{name}", [0.5], name) for name in ("FedAvg", "FedProx")))
    for axis, tick in (("rounds", 1.0), ("uplink", 1000.0), ("simulated_seconds", 2.0)):
        for look in (Look(), COLUMN, Look(xscale="log")):
            one_round = draw_curves(groups, Metric(), axis, look)
            assert one_round is not None
            assert one_round.axes[0].get_xticks().tolist() == [tick]
            assert one_round.axes[0].get_lines()[-1].get_marker() == "o"


def test_rows_of_bars_leave_room_for_them_at_column_width(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(5))
    (run / "communication.json").write_text('{"uplink_bits": {"model": 8000}, "downlink_bits": {"model": 16000}}')
    (group,) = groups_of(run)
    groups = [Group(LONG.format(i), group.curves) for i in range(12)]
    figure = draw_bits(groups, COLUMN)
    assert figure is not None
    Picture("bits", "", figure, COLUMN)
    assert min(axes.get_window_extent().width for axes in figure.axes) / figure.dpi > 0.5


def test_ticks_of_the_two_panels_of_bytes_stay_apart(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(5))
    (run / "communication.json").write_text(
        '{"uplink_bits": {"model": 61920000}, "downlink_bits": {"model": 61920000}}'
    )
    (group,) = groups_of(run)
    look = Look()
    figure = draw_bits([Group("FedAvg, clients_per_round=100, epsilon=2.0", group.curves)], look)
    assert figure is not None
    figure.draw_without_rendering()
    up, down = ([tick.label1.get_window_extent() for tick in axes.xaxis.get_major_ticks()] for axes in figure.axes)
    within = [box for box in up if box.x0 < figure.axes[0].get_window_extent().x1]
    assert min(box.x0 for box in down) - max(box.x1 for box in within) > figure.dpi / 72 * look.font_size


@pytest.mark.parametrize(
    ("data", "metric", "ylabel", "said"),
    [
        ({"val_fraction": 0.1}, None, "Test accuracy", "measured on samples that the clients hold out"),
        (
            {"val_fraction": 0.1, "data_class": "Federated"},
            None,
            "test acc",
            "measured on samples that the clients hold",
        ),
        ({"val_fraction": 0, "data_class": "Federated"}, None, "test acc", "the datamodule's own validation data"),
        ({"val_fraction": 0}, None, "Test accuracy", None),
        ({"val_fraction": 0.1}, None, "Accuracy on held-out samples", None),
        ({"val_fraction": 0.1}, "test/accuracy", "Test accuracy", None),
    ],
)
def test_a_name_of_the_vertical_axis_that_says_test_is_of_test_values(
    data: dict[str, object], metric: str | None, ylabel: str, said: str | None, tmp_path: Path
) -> None:
    of_class = {"data_class": data.pop("data_class", "CIFAR10")}
    run = write_run(tmp_path / "run", rising(5), data=data, **of_class)
    if metric:
        path = run / "metrics.csv"
        path.write_text(path.read_text().replace("val/accuracy", metric))
    words = [str(run), "--ylabel", ylabel, "--format", "svg", "--out", str(tmp_path / "out")]
    if said is None:
        report(words)
    else:
        with pytest.raises(UserError, match=f"{ylabel}' calls val/accuracy a test value, but it is .*{said}"):
            report(words)
