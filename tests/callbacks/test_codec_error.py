"""Test the errors of codecs against sums by hand, and that measuring them changes nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer
from toys import SIZES, Perceptron, Pruning, Recorded, federation, read_rows, vector

from lightning_fl.algorithms import Algorithm, FedLDF
from lightning_fl.callbacks import CodecError
from lightning_fl.codecs import Cast, Dense, ErrorFeedback, TopK
from lightning_fl.codecs.cast import WARNINGS
from lightning_fl.errors import UserError
from lightning_fl.exchanges import TwoTurns
from lightning_fl.slots import Codec, Message, Packed, Payload, RoundContext, State, compressible


@dataclass(frozen=True)
class Scaled(Codec):
    """Codec that sends c · x at eight bits a number."""

    factor: float = 0.75

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return {
            name: Packed(self.factor * x if compressible(name) else x, 8 * len(x)) for name, x in message.items()
        }, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


def codec_columns(folder: Path) -> list[dict[str, float]]:
    names = ("codec/", "comm/uplink_ratio")
    return [
        {name: float(value) for name, value in row.items() if name.startswith(names) and value}
        for row in read_rows(folder)
    ]


def fitted(make: MakeTrainer, keeps: dict[str, Any], method: Algorithm, *callbacks: Any, **flags: Any) -> Perceptron:
    torch.manual_seed(0)
    module = Perceptron()
    make(callbacks=list(callbacks), **{"max_rounds": 3, **keeps, **flags}).fit(module, federation(), method)
    return module


def test_numbers_that_a_cast_cuts_off_are_counted(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    """Test a learning rate with which some deltas lie beyond float16."""
    WARNINGS.clear()
    seen, limit = Recorded(), 65_504.0
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="sends numbers beyond"):
        make_trainer(callbacks=[CodecError(), seen], max_rounds=2, **keeps_files).fit(
            Perceptron(lr=3e5), federation(), Algorithm(uplink=Cast())
        )
    rows, counts = codec_columns(tmp_path), []
    for crossings in seen.rounds.values():
        deltas = torch.stack([crossing.sent["model"] for crossing in crossings])
        counts.append(int((deltas.abs() > limit).sum()))
    assert [row["codec/saturated"] for row in rows] == counts
    assert counts[0] > 0


def test_a_dense_codec_has_no_error(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    fitted(make_trainer, keeps_files, Algorithm(), CodecError())
    for row in codec_columns(tmp_path):
        assert row == pytest.approx(
            {
                "codec/error": 0,
                "codec/cosine": 1,
                "codec/scale": 1,
                "codec/mean_error": 0,
                "codec/drift": 0,
                "comm/uplink_ratio": 1,
            }
        )


def test_the_ratio_is_that_of_all_turns(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    fitted(make_trainer, keeps_files, Algorithm(exchange=TwoTurns(1)), CodecError())
    for measured, row in zip(codec_columns(tmp_path), read_rows(tmp_path), strict=True):
        assert measured["comm/uplink_ratio"] == pytest.approx(32 * 26 * 3 / float(row["comm/uplink_bits"]))


def test_a_scaled_upload(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    fitted(make_trainer, keeps_files, Algorithm(uplink=Scaled()), CodecError())
    for row in codec_columns(tmp_path):
        assert row["codec/error"] == pytest.approx(0.25**2, rel=1e-5)
        assert row["codec/mean_error"] == pytest.approx(0.25**2, rel=1e-5)
        assert row["codec/scale"] == pytest.approx(0.75, rel=1e-6)
        assert row["codec/cosine"] == pytest.approx(1)
        assert row["comm/uplink_ratio"] == 4
    # All rounds are off in nearly the same way, so that the drift stays: ‖Σ x‖ ≤ Σ ‖x‖.
    drifts = [row["codec/drift"] for row in codec_columns(tmp_path)]
    assert drifts[0] == pytest.approx(0.25, rel=1e-6)
    assert all(0.1 < drift <= 0.2500001 for drift in drifts)


def test_all_values_are_those_of_loops(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    seen = Recorded()
    fitted(make_trainer, keeps_files, Algorithm(uplink=ErrorFeedback(TopK(0.2))), CodecError(per_layer=True), seen)
    drift, moved = np.zeros(26), 0.0
    last: dict[int, int] = {}
    for place, row in enumerate(codec_columns(tmp_path)):
        crossings = seen.rounds[place]
        shares = np.array([SIZES[c.client] for c in crossings]) / sum(SIZES[c.client] for c in crossings)
        meant = np.array([c.sent["model"].double().numpy() for c in crossings])
        arrived = np.array([c.decoded["model"].double().numpy() for c in crossings])
        kept = np.array([c.memory["residual/model"].double().numpy() for c in crossings])
        for end, part in {"": slice(None), "/hidden": slice(0, 16), "/output": slice(16, 26)}.items():
            x, y, e = meant[:, part], arrived[:, part], kept[:, part]
            squares = (x**2).sum(1)
            assert row[f"codec/error{end}"] == pytest.approx(shares @ (((y - x) ** 2).sum(1) / squares))
            assert row[f"codec/scale{end}"] == pytest.approx(shares @ ((x * y).sum(1) / squares))
            lengths = np.sqrt(squares) * np.sqrt((y**2).sum(1))
            cosines = np.divide((x * y).sum(1), lengths, out=np.zeros(len(x)), where=lengths > 0)
            assert row[f"codec/cosine{end}"] == pytest.approx(shares @ cosines)
            assert row[f"codec/residual{end}"] == pytest.approx(shares @ np.sqrt((e**2).sum(1) / squares))
            mean = shares @ (y - x)
            assert row[f"codec/mean_error{end}"] == pytest.approx((mean**2).sum() / ((shares @ x) ** 2).sum())
        drift, moved = drift + shares @ (arrived - meant), moved + np.linalg.norm(shares @ meant)
        assert row["codec/drift"] == pytest.approx(np.linalg.norm(drift) / moved)
        ages = [place - last.get(c.client, place) for c in crossings]
        assert row["codec/residual_age"] == np.mean(ages)
        last |= {c.client: place for c in crossings}
        bits = 3 * (5 * 32 + 25)
        assert row["comm/uplink_ratio"] == pytest.approx(32 * 26 * 3 / bits)


def test_layers_that_are_not_sent_count_in_neither(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    fitted(make_trainer, keeps_files, FedLDF(n=1), CodecError(), clients_per_round=4)
    for row in codec_columns(tmp_path):
        assert row["codec/error"] == 0
        assert row["codec/cosine"] == pytest.approx(1)


def test_measuring_changes_nothing_and_every_n_rounds_are_measured(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    method = Algorithm(uplink=ErrorFeedback(TopK(0.2)))
    plain = fitted(make_trainer, {**keeps_files, "default_root_dir": tmp_path / "plain"}, method)
    measured = fitted(
        make_trainer, {**keeps_files, "default_root_dir": tmp_path / "measured"}, method, CodecError(every_n_rounds=2)
    )
    assert vector(plain).tolist() == vector(measured).tolist()
    before, after = read_rows(tmp_path / "plain"), read_rows(tmp_path / "measured")
    assert [{name: row[name] for name in before[0]} for row in after] == before
    assert [bool(row) for row in codec_columns(tmp_path / "measured")] == [False, True, False]


def test_a_resumed_run_goes_on_with_its_sums(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    method = Algorithm(uplink=ErrorFeedback(TopK(0.2)))
    fitted(make_trainer, {**keeps_files, "default_root_dir": tmp_path / "whole"}, method, CodecError(), max_rounds=4)
    folder = {**keeps_files, "default_root_dir": tmp_path / "resumed"}
    fitted(make_trainer, folder, method, CodecError(), max_rounds=2)
    trainer = make_trainer(max_rounds=4, callbacks=[CodecError()], **folder)
    trainer.fit(Perceptron(), federation(), method, ckpt_path="last")
    assert codec_columns(tmp_path / "resumed") == codec_columns(tmp_path / "whole")


def test_ages_are_those_of_all_rounds(make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path) -> None:
    columns = []
    for n in (1, 3):
        folder = {**keeps_files, "default_root_dir": tmp_path / str(n)}
        fitted(make_trainer, folder, Algorithm(uplink=ErrorFeedback(TopK(0.2))), CodecError(n), max_rounds=6)
        columns.append([row.get("codec/residual_age") for row in codec_columns(tmp_path / str(n))])
    assert columns[1] == [age if place % 3 == 2 else None for place, age in enumerate(columns[0])]


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_resumed_run_may_ask_for_the_layers(
    per_layer: bool, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    method = Algorithm(uplink=ErrorFeedback(TopK(0.2)))
    fitted(make_trainer, {**keeps_files, "default_root_dir": tmp_path}, method, CodecError(per_layer=not per_layer))
    trainer = make_trainer(
        max_rounds=5, callbacks=[CodecError(per_layer=per_layer)], **keeps_files, default_root_dir=tmp_path
    )
    trainer.fit(Perceptron(), federation(), method, ckpt_path="last")
    rows = codec_columns(tmp_path)
    assert ["codec/drift/hidden" in row for row in rows] == [not per_layer] * 3 + [per_layer] * 2
    mean_errors = [row["codec/mean_error"] ** 0.5 for row in rows]
    begins_anew = rows[3]["codec/drift"] == pytest.approx(mean_errors[3])
    assert begins_anew is per_layer


def test_uploads_that_are_not_finite_or_0_are_left_out(
    make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    fitted(make_trainer, keeps_files, Algorithm(uplink=Scaled(float("nan"))), CodecError(), max_rounds=1)
    assert codec_columns(tmp_path) == [{}]


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_pruning_ends_and_begins_sums(
    is_first: bool, per_layer: bool, make_trainer: MakeTrainer, keeps_files: dict[str, Any], tmp_path: Path
) -> None:
    callbacks = [Pruning(1), CodecError(per_layer=per_layer)]
    fitted(make_trainer, keeps_files, Algorithm(uplink=TopK(0.5)), *callbacks[:: 1 if is_first else -1])
    sizes, errors = zip(*((row["model/parameters"], row["codec/error"]) for row in read_rows(tmp_path)), strict=True)
    assert sizes[0] > sizes[1] == sizes[2]
    assert all(0 < float(error) < 1 for error in errors)


def test_it_needs_clients(make_stock_trainer: Any) -> None:
    with pytest.raises(UserError, match="use FederatedTrainer"):
        make_stock_trainer(callbacks=[CodecError()]).fit(Perceptron(), datamodule=federation())


@pytest.mark.parametrize("wrong", [{"every_n_rounds": 0}, {"per_layer": "yes"}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        CodecError(**wrong)


def test_nothing_is_copied_without_a_listener(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fl.link.link.UplinkMessage", None)
    make_trainer().fit(Perceptron(), federation(), Algorithm(uplink=Dense()))
