"""Test the precision of float32 products, and what differs on a GPU but can be seen on a CPU."""

import os
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from compared_runs import MakeTrainer
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from toys import Perceptron, federation

from lightning_fl import UserError
from lightning_fl.checks.float32 import UNSET, Float32, Float32Switches, full_float32
from lightning_fl.coding.top_k import top_k_in_turns
from lightning_fl.evaluation.macs import count_flops
from lightning_fl.flat_module.module_buffers import check_counters
from lightning_fl.flat_module.module_logs import LogCollector, RowLogs, on_host
from lightning_fl.outputs import checkpoint_file
from lightning_fl.pruning.importance import feature_map_ranks


class Seeing(Perceptron):
    """Module that notes the precision of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Float32] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen |= {Float32.now()}
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("flag", "seen"),
    [
        (None, UNSET),
        ("highest", Float32("highest", tf32=False)),
        ("high", Float32("high", tf32=True)),
        ("medium", Float32("medium", tf32=True)),
    ],
)
def test_the_flag_sets_the_precision_for_the_session(flag: Any, seen: Float32, make_trainer: MakeTrainer) -> None:
    module = Seeing()
    make_trainer(max_rounds=1, float32_precision=flag).fit(module, federation())
    assert module.seen == {seen}
    assert Float32.now() == UNSET


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (("ieee", "tf32", "ieee", "tf32"), Float32("high", tf32=True)),
        (("none", "bf16", "ieee", "ieee"), Float32("medium", tf32=False)),
    ],
)
def test_precisions_of_single_backends_are_read_and_restored(
    given: tuple[str, ...], seen: Float32, make_trainer: MakeTrainer
) -> None:
    before, module = Float32Switches.now(), Seeing()
    try:
        Float32Switches(seen, given).restore()
        with full_float32():
            assert Float32.now() == Float32.of("highest")
        assert Float32Switches.now() == (seen, given)
        make_trainer(max_rounds=1).fit(module, federation())
        assert module.seen == {seen}
        make_trainer(max_rounds=1, float32_precision="high").fit(module, federation())
        assert Float32Switches.now() == (seen, given)
    finally:
        before.restore()


def test_full_precision_overrides_the_precision_of_all_backends() -> None:
    before = Float32Switches.now()
    try:
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        with full_float32():
            assert Float32.now() == Float32.of("highest")
    finally:
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        before.restore()


def test_a_resumed_run_keeps_its_precision(make_trainer: MakeTrainer, keeps_files: dict[str, Any]) -> None:
    make_trainer(max_rounds=1, float32_precision="high", **keeps_files).fit(Perceptron(), federation())
    trainer, module = make_trainer(max_rounds=2, **keeps_files), Seeing()
    trainer.fit(module, federation(), ckpt_path="last")
    saved = checkpoint_file.load(f"{trainer.default_root_dir}/checkpoints/last.ckpt")["federation"]["execution"]
    assert Float32(*saved["float32"]) == Float32("high", tf32=True)
    assert Float32("high", tf32=True) in module.seen
    assert Float32.now() == UNSET


def test_another_precision_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="float32_precision"):
        make_trainer(float32_precision="tf32")


def test_ranks_are_computed_in_full() -> None:
    seen: list[Float32] = []
    network = nn.Sequential(nn.Conv2d(1, 2, 3))
    network[0].register_forward_hook(lambda *_: seen.append(Float32.now()))
    feature_map_ranks(network, [torch.randn(3, 1, 6, 6)], ["0"])
    assert seen == [Float32("highest", tf32=False)]
    with pytest.raises(KeyError), full_float32():
        raise KeyError
    assert Float32.now() == UNSET


def test_plugins_that_scale_gradients_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match="MixedPrecision computes in '16-mixed', whose gradients are scaled"):
        make_trainer(plugins=MixedPrecision("16-mixed", "cpu"))
    make_trainer(plugins=MixedPrecision("bf16-mixed", "cpu"))


def test_a_number_and_a_tensor_of_the_accelerator_are_logged_together() -> None:
    """Check with torch's device `meta`, which refuses tensors of the CPU as a GPU does."""
    logs = LogCollector()
    logs.log("mixed", 1.0)
    logs.log("mixed", torch.zeros((), device="meta"))
    ((total, weight),) = logs.take().values()
    assert (total.device.type, weight) == ("meta", 2)
    rows = RowLogs(LogCollector())
    rows.rows = (0, 1)
    for value in (torch.ones(2), torch.ones(2, device="meta")):
        rows.log("mixed", value)
    with pytest.raises(NotImplementedError, match="meta"):  # only when its numbers are read
        rows.take_rows(2)


def test_sums_reach_the_host_unchanged() -> None:
    parts = [{"a": (torch.tensor(0.1, dtype=torch.float64), 2.0)}, {"b": (torch.tensor([2**60 + 1, 3]), 0.0)}]
    assert on_host(parts) == [{"a": (0.1, 2.0)}, {"b": ([2**60 + 1, 3], 0.0)}]
    assert on_host(on_host(parts)) == on_host(parts)


def test_only_the_own_gpu_is_kept_from_changes(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that generators of other GPUs are left alone, for which torch warns."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", None)
    counted = []

    class Counted(Perceptron):
        def on_fit_start(self) -> None:
            flat_module = self.trainer.flat_module  # type: ignore[attr-defined]
            counted.append(count_flops(flat_module, torch.ones(1, 3)))

    make_trainer(max_rounds=1).fit(Counted(), federation())
    assert counted[0] is not None


def test_choices_in_turns_need_no_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check without the reductions by scatter that a GPU refuses with `deterministic`, against a plain loop."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("scatter_reduce does not have a deterministic implementation")

    monkeypatch.setattr(Tensor, "scatter_reduce_", refuse)
    vectors = [torch.tensor([5.0, -4.0, 3.0, 0.5]), torch.tensor([9.0, 1.0, 0.0, -8.0])]
    assert top_k_in_turns(vectors, 3).tolist() == [0, 1, 3]


def test_counters_are_checked_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {f"counter{k}": torch.tensor(k) for k in range(5)} | {"table": torch.arange(4)}
    reads, read = [], Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda tensor: reads.append(1) or read(tensor))
    check_counters(Perceptron(), before, {name: x.clone() for name, x in before.items()})
    assert len(reads) == 1
    with pytest.raises(UserError, match="'table'"):
        check_counters(Perceptron(), before, {**before, "table": torch.arange(4) + 1})
    with pytest.warns(UserWarning, match="'counter3' .*became smaller"):
        check_counters(Perceptron(), before, {**before, "counter3": torch.tensor(2)})


@pytest.mark.parametrize("deterministic", [True, "warn"])
def test_deterministic_lets_cublas_repeat_itself(
    deterministic: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    class Reading(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    make_trainer(max_rounds=1, deterministic=deterministic, callbacks=[Reading()]).fit(Perceptron(), federation())
    assert seen == [":4096:8"]
