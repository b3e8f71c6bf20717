"""Test what attackers send and train on against plain numpy, and who they are."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm
from torch import Tensor

from lightning_fl import UserError
from lightning_fl.aggregators import Krum
from lightning_fl.data import Selection, TensorSamples
from lightning_fl.data.trigger import stamped
from lightning_fl.features import attacks
from lightning_fl.features.attacks import (
    ALIE,
    IPM,
    Adversary,
    Attack,
    AttackContext,
    Backdoor,
    FangKrum,
    FangTrim,
    FreeRider,
    GaussianUpload,
    Honest,
    LabelFlip,
    MinMax,
    NotFinite,
    SignFlip,
)
from lightning_fl.features.attacks.alie import deviations
from lightning_fl.features.attacks.attack import is_forged
from lightning_fl.features.attacks.batches import PoisonedSelection
from lightning_fl.features.attacks.fang import LEAST, krum_length
from lightning_fl.features.attacks.min_max import largest_length
from lightning_fl.slots import Draw, Merging, Message, Result, RoundContext, Upload
from lightning_fl.vectors.layout import Layout

seeds = st.integers(0, 10**6)


def points(num: int, dimension: int, seed: int) -> Tensor:
    """Return normal numbers (num, dimension) in float64, all around other means."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(dimension, generator=generator, dtype=torch.float64)
    return centre + torch.randn(num, dimension, generator=generator, dtype=torch.float64)


def scene_of(num_attackers: int, client: int = 0, **rows: Tensor) -> AttackContext:
    """Return what an attacker knows of honest uploads (h, ·) by name."""
    mean = {name: entry.mean(0) for name, entry in rows.items()}
    std = {name: entry.std(0) if len(entry) > 1 else torch.zeros_like(entry[0]) for name, entry in rows.items()}
    count = len(next(iter(rows.values())))
    honest = Honest(count, mean, std, dict(rows))
    return AttackContext(
        Draw((0, 0, 0), client), num_uploads=count + num_attackers, num_attackers=num_attackers, honest=honest
    )


def sent(attack: Attack, rows: Tensor, num_attackers: int = 2, client: int = 0) -> np.ndarray:
    own = {"model": torch.zeros(rows.shape[1], dtype=torch.float64)}
    return attack.forged(own, scene_of(num_attackers, client, model=rows))["model"].numpy()


# ------------------------------------------------------------------------------------------------------- who attacks


@given(seed=seeds, num=st.integers(1, 200), share=st.floats(0, 0.99))
@settings(max_examples=50)
def test_a_share_is_rounded_down_and_a_larger_one_has_the_same_clients(seed: int, num: int, share: float) -> None:
    def drawn(part: float) -> frozenset[int]:
        return Adversary(SignFlip(), part).clients(num, np.random.default_rng(seed))

    chosen = drawn(share)
    assert chosen == drawn(share)
    assert chosen <= set(range(num))
    assert len(chosen) in {math.floor(share * num), math.floor(share * num + 1e-9)}
    assert drawn(share / 2) <= chosen
    listed = Adversary(SignFlip(), sorted(chosen))
    assert listed.clients(num, np.random.default_rng(seed + 1)) == chosen


def test_a_share_of_each_round_is_of_its_clients() -> None:
    adversary, cohort = Adversary(SignFlip(), 0.3, per_round=True), [3, 8, 1, 9, 20, 5, 7, 11, 2, 4]
    drawn = [adversary.clients_of(cohort, np.random.default_rng(seed)) for seed in range(30)]
    assert all(len(chosen) == 3 and chosen <= set(cohort) for chosen in drawn)
    assert len(set(drawn)) > 10
    again = adversary.clients_of(cohort[::-1], np.random.default_rng(0))
    assert again == drawn[0], "the order of the cohort does not matter"


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Adversary("SignFlip"), r"attack must be an attack, such as SignFlip\(\), got 'SignFlip'"),  # type: ignore[arg-type]
        (
            lambda: Adversary(SignFlip(), 1.0),
            r"attackers, unless it is a list of clients, must lie in \[0, 1\), got 1.0",
        ),
        (lambda: Adversary(SignFlip(), 4), r"must lie in \[0, 1\), got 4"),
        (lambda: Adversary(SignFlip(), [3, 3]), r"attackers lists a client twice: \[3, 3\]"),
        (lambda: Adversary(SignFlip(), [-1]), "the index of an attacker must be a whole number of at least 0, got -1"),
        (lambda: Adversary(SignFlip(), [1], per_round=True), "attackers is a list: give a share"),
        (lambda: Adversary(SignFlip(), start=-1), "start must be a whole number of at least 0, got -1"),
        (
            lambda: Adversary(SignFlip(), [6]).clients(6, np.random.default_rng(0)),
            "attackers lists client 6, but the last of the 6 clients is 5",
        ),
        (lambda: SignFlip(0), "scale must be positive, got 0"),
        (lambda: IPM(-1), "scale must be positive, got -1"),
        (lambda: GaussianUpload(std=-1), "std must be at least 0, got -1"),
        (lambda: GaussianUpload(float("inf")), "mean must be a finite number, got inf"),
        (lambda: FreeRider("zero"), "sends 'zero' is unknown; did you mean 'zeros'"),  # type: ignore[arg-type]
        (lambda: FreeRider(noise=-1), "noise must be at least 0, got -1"),
        (lambda: FangTrim(1), "b must be a number above 1, got 1"),
        (lambda: LabelFlip(source=1), "takes source and target, or neither, got source 1 and target None"),
        (lambda: LabelFlip(1, 1), "source and target are both 1"),
        (lambda: Backdoor(share=0), r"share must lie in \(0, 1\], got 0"),
        (lambda: Backdoor(target=-1), "target must be a whole number of at least 0, got -1"),
        (lambda: Backdoor(replace=True, scale=5), "replace sets the factor of the upload, and scale is 5: give one"),
    ],
)
def test_bad_values_are_refused(build: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build()


# ------------------------------------------------------------------------------------------------------- what they send


@given(seed=seeds, scale=st.floats(0.1, 50))
@settings(max_examples=20)
def test_attacks_that_need_the_mean_are_their_formulas(seed: int, scale: float) -> None:
    rows = points(7, 5, seed)
    array = rows.numpy()
    np.testing.assert_allclose(sent(IPM(scale), rows), -scale * array.mean(0))
    own = points(1, 5, seed + 1)[0]
    flipped = SignFlip(scale).forged({"model": own, "buffers": 2 * own}, scene_of(2, model=rows))
    np.testing.assert_allclose(flipped["model"], -scale * own)
    np.testing.assert_allclose(flipped["buffers"], -2 * scale * own)
    num_attackers = 1 + seed % 5
    n, h = 7 + num_attackers, 7
    supporters = n // 2 + 1 - num_attackers
    z = norm.ppf((h - supporters) / h)
    np.testing.assert_allclose(
        sent(ALIE(), rows, num_attackers), array.mean(0) - z * array.std(0, ddof=1), rtol=1e-6, atol=1e-9
    )


def test_z_has_the_values_of_the_paper_and_stays_finite() -> None:
    expected = {(20, 4): 0.157311, (50, 10): 0.253347, (25, 11): 1.067571, (10, 2): 0.0}
    for (n, m), z in expected.items():
        assert deviations(n, m) == pytest.approx(z, abs=1e-6)
    for n in range(1, 30):
        assert all(math.isfinite(deviations(n, m)) for m in range(n)), n


def test_little_attackers_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"2 attackers among 10 uploads has z = 0"):
        ALIE().check(10, 2)
    ALIE().check(20, 4)  # warnings are errors in these tests


@given(seed=seeds, num_attackers=st.integers(1, 6))
@settings(max_examples=20)
def test_the_mean_turns_round_just_beyond_the_threshold(seed: int, num_attackers: int) -> None:
    rows = points(6, 4, seed)
    threshold = 6 / num_attackers
    for scale, sign in ((threshold * 0.99, 1), (threshold * 1.01, -1)):
        forged = np.tile(sent(IPM(scale), rows, num_attackers), (num_attackers, 1))
        mean = np.concatenate([rows.numpy(), forged]).mean(0)
        assert np.sign(mean @ rows.numpy().mean(0)) == sign


@given(seed=seeds, b=st.floats(1.01, 5))
@settings(max_examples=30)
def test_fang_lies_just_outside_the_honest_range_against_the_mean(seed: int, b: float) -> None:
    rows = points(6, 40, seed)
    array, forged = rows.numpy(), sent(FangTrim(b), rows)
    for j, value in enumerate(forged):
        column = array[:, j]
        if column.mean() > 0:
            least = column.min()
            low, high = (least / b, least) if least > 0 else (b * least, least)
        else:
            most = column.max()
            low, high = (most, b * most) if most > 0 else (most, most / b)
        assert low - 1e-12 <= value <= high + 1e-12
    assert (forged != sent(FangTrim(b), rows, client=1)).all(), "each attacker draws its own"
    np.testing.assert_array_equal(forged, sent(FangTrim(b), rows))


def test_fang_is_uniform_between_its_ends() -> None:
    rows = torch.tensor([[1.0], [3.0]], dtype=torch.float64).expand(2, 5000)
    forged = sent(FangTrim(2.0), rows)
    assert kstest(2 * forged - 1, "uniform").pvalue > 1e-3, "between 1/2 and 1"


def krum_choice(rows: np.ndarray, f: int) -> int:
    scores = []
    for i in range(len(rows)):
        others = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(len(rows)) if j != i)
        scores.append(sum(others[: max(1, len(rows) - f - 2)]))
    return scores.index(min(scores))


@pytest.mark.long
@given(seed=seeds, num_attackers=st.integers(1, 3))
@settings(max_examples=20)
def test_krum_takes_what_fang_sends_and_not_twice_of_it(seed: int, num_attackers: int) -> None:
    rows = points(8, 3, seed)
    context = scene_of(num_attackers, model=rows)
    assert context.honest is not None
    array, length = rows.numpy(), krum_length(context.honest, num_attackers)
    widest = float((array.max(0) - array.min(0)).max())
    against = -np.sign(array.mean(0))

    def is_taken(factor: float) -> bool:
        whole = np.concatenate([array, np.tile(factor * against, (num_attackers, 1))])
        return krum_choice(whole, num_attackers) >= len(array)

    assert math.log2(widest / length) == pytest.approx(round(math.log2(widest / length)))
    assert is_taken(length) or length < LEAST
    assert length == widest or not is_taken(2 * length)
    np.testing.assert_allclose(sent(FangKrum(), rows, num_attackers), length * against)
    if is_taken(length):
        accumulator: dict[str, Any] = {}
        for client, row in enumerate(np.concatenate([array, np.tile(length * against, (num_attackers, 1))])):
            result = Result(client, {}, 1.0, {}, {}, {}, num_steps=1)
            Krum(num_attackers).add(accumulator, Upload(result, {"model": torch.from_numpy(row)}))
        context = RoundContext(Layout(("a",), ((3,),)), Layout((), ()), num_clients=11)
        merged = Krum(num_attackers).combine(accumulator, Merging(context))["model"]
        np.testing.assert_allclose(merged, length * against)


@pytest.mark.long
@given(seed=seeds, num=st.integers(2, 9))
@settings(max_examples=30)
def test_min_max_is_as_far_as_two_honest_uploads(seed: int, num: int) -> None:
    rows = points(num, 4, seed)
    array, forged = rows.numpy(), sent(MinMax(), rows)
    widest = max(np.linalg.norm(a - b) for a in array for b in array)
    assert max(np.linalg.norm(forged - a) for a in array) == pytest.approx(widest, rel=1e-9)
    mean, std = array.mean(0), array.std(0, ddof=1)
    low, high = 0.0, 1.0
    while max(np.linalg.norm(mean - high * std - a) for a in array) <= widest:
        high *= 2
    while high - low > 1e-6:  # as the paper searches
        middle = (low + high) / 2
        is_inside = max(np.linalg.norm(mean - middle * std - a) for a in array) <= widest
        low, high = (middle, high) if is_inside else (low, middle)
    honest = scene_of(1, model=rows).honest
    assert honest is not None
    assert largest_length(honest) == pytest.approx(low, abs=1e-5)


def test_one_length_holds_for_all_vectors() -> None:
    rows, buffers = points(6, 5, 1), 9 * points(6, 2, 2)
    context = scene_of(2, model=rows, buffers=buffers)
    own = {"model": torch.zeros(5), "buffers": torch.zeros(2)}
    honest = context.honest
    assert honest is not None
    length = largest_length(honest)
    np.testing.assert_allclose(MinMax().forged(own, context)["buffers"], buffers.mean(0) - length * buffers.std(0))
    length = krum_length(honest, 2)
    np.testing.assert_allclose(FangKrum().forged(own, context)["buffers"], -length * buffers.mean(0).sign())


@pytest.mark.parametrize("attack", [ALIE(), IPM(), FangTrim(), FangKrum(), MinMax()], ids=repr)
def test_colluding_attackers_among_few_honest_clients(attack: Attack) -> None:
    own: Message = {"model": points(1, 4, 3)[0]}
    assert attack.forged(own, AttackContext(Draw())) is own, "alone they send their own uploads"
    one = attack.forged(own, scene_of(3, model=points(1, 4, 4)))["model"]
    equal = attack.forged(own, scene_of(3, model=points(1, 4, 4).expand(5, 4)))["model"]
    for forged in (one, equal):
        assert torch.isfinite(forged).all()


def test_random_uploads_have_their_moments_and_are_each_attackers_own() -> None:
    own = {"model": torch.zeros(20000), "moments/m": torch.zeros(20000)}
    scenes = [AttackContext(Draw((0, 0, 0), client)) for client in (0, 1, 0)]
    first, other, again = (GaussianUpload(0.3, 2.0).forged(own, context) for context in scenes)
    values = first["model"].numpy()
    assert abs(values.mean() - 0.3) < 4 * 2 / math.sqrt(20000)
    assert values.std() == pytest.approx(2, rel=0.03)
    assert torch.equal(first["model"], again["model"])
    for one in (other["model"], first["moments/m"]):
        assert abs(np.corrcoef(values, one.numpy())[0, 1]) < 0.03


def test_free_riders_send_what_they_have_seen() -> None:
    own = {"model": torch.ones(4000), "buffers": torch.ones(3), "moments/m": torch.ones(4)}
    received, earlier = ({"model": torch.full((4000,), x), "buffers": torch.full((3,), x)} for x in (5.0, 3.0))
    context = AttackContext(Draw(), received, earlier)
    assert not any(entry.any() for entry in FreeRider().forged(own, context).values())
    changed = FreeRider("last_change").forged(own, context)
    assert (changed["model"] == 2).all()
    assert (changed["buffers"] == 2).all()
    assert not changed["moments/m"].any()
    assert not FreeRider("last_change").forged(own, AttackContext(Draw(), received))["model"].any(), "first round"
    noisy = FreeRider("last_change", noise=0.5).forged(own, context)["model"] - 2
    assert float(noisy.std()) == pytest.approx(0.5, rel=0.05)
    assert all(entry.isnan().all() for entry in NotFinite().forged(own, context).values())


def test_numbers_that_are_no_vectors_of_the_model_stay() -> None:
    assert [is_forged(name) for name in ("model", "moments/control", "buffers", "scalars/steps", "mask/units")] == [
        *(True,) * 3,
        *(False,) * 2,
    ]


# ---------------------------------------------------------------------------------------------------- what they train on


def images(num: int, channels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num)
    return torch.rand(num, channels, 6, 6, generator=generator), torch.randint(10, (num,), generator=generator)


def poisoned(attack: Attack, selection: Selection, batch_size: int, **options: Any) -> list[Any]:
    return list(PoisonedSelection(selection, lambda batch: attack.poisoned(batch, 10)).batches(batch_size, **options))


def test_labels_are_flipped_and_nothing_else() -> None:
    x, y = images(11)
    selection = TensorSamples(x, y).select(np.arange(11))
    flipped = poisoned(LabelFlip(), selection, 4)
    assert torch.equal(torch.cat([batch[1] for batch in flipped]), 9 - y)
    assert torch.equal(torch.cat([batch[0] for batch in flipped]), x)
    source, target = int(y[0]), (int(y[0]) + 3) % 10
    single = torch.cat([batch[1] for batch in poisoned(LabelFlip(source, target), selection, 4)])
    assert torch.equal(single, torch.tensor([target if label == source else label for label in y.tolist()]))
    assert torch.equal(torch.cat([batch[1] for batch in selection.batches(4)]), y), "the data stay"


class Pair(NamedTuple):
    """Batch whose parts have names."""

    image: Tensor
    label: Tensor


@pytest.mark.parametrize("attack", [LabelFlip(), LabelFlip(0, 1), Backdoor()], ids=repr)
def test_batches_of_named_tuples_stay_named_tuples(attack: Attack) -> None:
    x, y = images(4)
    named, plain = attack.poisoned(Pair(x, y), 10), attack.poisoned((x, y), 10)
    assert type(named) is Pair
    assert torch.equal(named.image, plain[0])
    assert torch.equal(named.label, plain[1])


@pytest.mark.parametrize(("share", "counts"), [(0.5, [2, 2, 2]), (0.3, [2, 2, 1]), (1.0, [4, 4, 3]), (0.01, [1, 1, 1])])
def test_a_share_of_each_batch_gets_trigger_and_target(share: float, counts: Sequence[int]) -> None:
    x, y = images(11)
    selection = TensorSamples(x, y).select(np.arange(11))
    clean = list(selection.batches(4))
    for (inputs, labels), (was, were), count in zip(
        poisoned(Backdoor(share, target=7), selection, 4), clean, counts, strict=True
    ):
        assert (labels[:count] == 7).all()
        assert torch.equal(labels[count:], were[count:])
        assert torch.equal(inputs[count:], was[count:])
        assert torch.equal(inputs[:count, :, :3], was[:count, :, :3])
        assert torch.equal(inputs[:count, :, :, :3], was[:count, :, :, :3])
        assert (inputs[:count, :, 3:, 3:] == 1.0).all()
    assert torch.equal(x, images(11)[0]), "the data stay"


def test_the_order_is_that_of_the_clean_samples_and_processes_share_whole_batches() -> None:
    x, y = images(11)
    selection = TensorSamples(x, y).select(np.arange(11))
    orders = [torch.Generator().manual_seed(5) for _ in range(4)]
    clean = list(selection.batches(4, orders[0]))
    whole = poisoned(Backdoor(target=7), selection, 4, generator=orders[1])
    assert [int((a[1] != b[1]).sum()) <= 2 for a, b in zip(whole, clean, strict=True)] == [True] * 3
    parts = [
        poisoned(Backdoor(target=7), selection, 4, generator=order, share=share)
        for order, share in zip(orders[2:], (lambda size: slice(0, 1), lambda size: slice(1, size)), strict=True)
    ]
    for batch, first, rest in zip(whole, *parts, strict=True):
        for entry, one, other in zip(batch, first, rest, strict=True):
            assert torch.equal(entry, torch.cat([one, other]))


@pytest.mark.parametrize(
    ("attack", "batch", "said"),
    [
        (
            LabelFlip(),
            torch.zeros(3),
            r"LabelFlip changes inputs and classes \(B,\), which the batches of these data are not",
        ),
        (LabelFlip(), [torch.zeros(3, 2), torch.zeros(3, 2)], "LabelFlip changes inputs and classes"),
        (LabelFlip(), {"x": torch.zeros(3)}, "LabelFlip changes inputs and classes"),
        (Backdoor(), [torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)], r"Backdoor changes images \(B, C, H, W\)"),
        (
            LabelFlip(1, 10),
            [torch.zeros(3), torch.zeros(3, dtype=torch.long)],
            "target is 10, but the last of 10 classes is 9",
        ),
        (
            Backdoor(target=10),
            [torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long)],
            "target is 10, but the last",
        ),
    ],
)
def test_other_batches_are_refused(attack: Attack, batch: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        attack.poisoned(batch, 10)


def test_a_batch_keeps_its_kind() -> None:
    batch = (torch.zeros(2, 1, 4, 4), torch.tensor([1, 2]), "a name")
    changed = LabelFlip().poisoned(batch, 10)
    assert isinstance(changed, tuple)
    assert changed[1].tolist() == [8, 7]
    assert changed[2] == "a name"


@pytest.mark.parametrize("value", [1.0, 0.25, -2.0])
def test_the_trigger_is_a_fixed_pattern_in_the_corner(value: float) -> None:
    """An image gets the same trigger whatever else is in its batch."""
    x, labels = images(3, channels=1)
    marked = stamped(x, value)
    assert (marked[..., 3:, 3:] == value).all()
    alone = Backdoor(share=1.0, value=value).poisoned([x[:1], labels[:1]], 10)[0]
    assert torch.equal(alone, marked[:1])
    marked[..., 3:, 3:] = x[..., 3:, 3:]
    assert torch.equal(marked, x)
    assert stamped(x[:0]).shape == (0, 1, 6, 6)


def test_every_attack_is_public_and_documented() -> None:
    classes = [getattr(attacks, name) for name in attacks.__all__]
    assert sum(isinstance(c, type) and issubclass(c, Attack) and c is not Attack for c in classes) == 11
