"""Test DRIVE and EDEN: the papers' loops, exact bits, what the scale makes exact, and independent rotations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compared_runs import MakeTrainer, assert_same, bits_of, fits
from torch import Tensor
from toys import Perceptron, federation

from lightning_fl.algorithms import Algorithm
from lightning_fl.codecs import DRIVE, EDEN, ErrorFeedback, Followed, RandomK
from lightning_fl.codecs.rotated import lloyd_max
from lightning_fl.coding.bit_packing import unpack
from lightning_fl.coding.rotation import chunk_sizes
from lightning_fl.errors import UserError
from lightning_fl.slots import Draw, Message, RoundContext, Traits
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CODECS = [
    DRIVE(),
    DRIVE(scale="min_mse"),
    DRIVE(chunks="pad"),
    EDEN(1),
    EDEN(2),
    EDEN(4),
    EDEN(8),
    EDEN(3, scale="min_mse"),
]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
LEVELS = {2: [0.4527800, 1.5104176], 3: [0.2450942, 0.7560053, 1.3439093, 2.1519457]}
"""Max's table (IRE Trans. Inform. Theory, 1960), with the digits of later ones."""


def setting_of(d: int, seed: int = 0, client: int = 0, dtype: torch.dtype = torch.float32) -> RoundContext:
    draw = Draw((seed, 0, 11), client, "up")
    return RoundContext(Layout(("a",), ((d,),)), NO_LAYOUT, num_clients=5, draw=draw, dtype=dtype)


def through(codec: Any, x: Tensor, context: RoundContext) -> Tensor:
    payload, memory = codec.encode({"model": x}, {}, context)
    assert memory == {}
    return codec.decode(payload, context)["model"]


def bits(codec: Any, d: int) -> int:
    payload, _ = codec.encode({"model": torch.randn(d)}, {}, setting_of(d))
    assert all(packed.content.nbytes == -(-packed.bits // 8) for packed in payload.values())
    return sum(packed.bits for packed in payload.values())


def normal(d: int, seed: int = 0) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def relative_error(arrived: Tensor, x: Tensor) -> float:
    return float((arrived.double() - x.double()).square().sum() / x.double().square().sum())


@pytest.mark.parametrize(
    ("codec", "expected"),
    [(DRIVE(), 22_048), (EDEN(1), 22_048), (EDEN(2), 43_936), (EDEN(4), 87_712), (DRIVE(chunks="pad"), 32_800)],
)
def test_bits_of_the_cnn(codec: Any, expected: int) -> None:
    assert bits(codec, 21_840) == expected


@pytest.mark.parametrize(
    ("d", "sizes"),
    [
        (0, []),
        (1, [64]),
        (63, [64]),
        (64, [64]),
        (65, [128]),
        (129, [128, 64]),
        (21_840, [16_384, 4_096, 1_024, 256, 128]),
    ],
)
def test_chunks_are_powers_of_two(d: int, sizes: list[int]) -> None:
    assert chunk_sizes(d) == sizes
    assert bits(EDEN(3), d) == 3 * sum(sizes) + 32 * len(sizes)


@pytest.mark.parametrize(("d", "sizes"), [(0, []), (1, [1]), (2, [2]), (3, [4]), (64, [64]), (65, [128])])
def test_padded_vectors_are_one_chunk(d: int, sizes: list[int]) -> None:
    assert chunk_sizes(d, "pad") == sizes
    assert bits(DRIVE(chunks="pad"), d) == sum(sizes) + 32 * len(sizes)


def by_the_papers(x: np.ndarray, codec: Any, context: RoundContext, levels: np.ndarray) -> np.ndarray:
    """Return S · DᵀHᵀc/√n for one chunk after the other, with H from its definition and each c by a search of all levels."""
    sizes = chunk_sizes(len(x), codec.chunks)
    num = sum(sizes)
    drawn = torch.randint(256, (-(-num // 8),), dtype=torch.uint8, generator=context.draw.generator("model"))
    signs = np.array([1.0 if drawn[i // 8] >> (i % 8) & 1 else -1.0 for i in range(num)])
    padded, arrived, start = np.zeros(num), np.zeros(num), 0
    padded[: len(x)] = x
    for n in sizes:
        h = np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / np.sqrt(n)
        d = np.diag(signs[start : start + n])
        y = h @ d @ padded[start : start + n]
        shares = y * np.sqrt(n) / np.linalg.norm(y)
        c = np.array([levels[np.argmin(np.abs(levels - share))] for share in shares])
        scale = y @ y / (c @ y) if codec.scale == "unbiased" else (c @ y) / (c @ c)
        arrived[start : start + n] = scale * (d.T @ h.T @ c)
        start += n
    return arrived[: len(x)]


@pytest.mark.long
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != EDEN(8)], ids=str)
def test_codecs_do_as_the_papers_say(codec: Any) -> None:
    x, context = normal(300).double(), setting_of(300, dtype=torch.float64)
    width = getattr(codec, "bits", 1)
    half = {1: [1.0], **LEVELS}.get(width, lloyd_max(width)[2 ** (width - 1) :].tolist())
    levels = np.array([*(-level for level in reversed(half)), *half])
    expected = by_the_papers(x.numpy(), codec, context, levels)
    np.testing.assert_allclose(through(codec, x, context).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("width", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009501), (8, 4.12e-5)])
def test_levels_round_a_normal_number_best(width: int, distortion: float) -> None:
    levels = lloyd_max(width).numpy()
    assert len(levels) == 2**width
    np.testing.assert_allclose(levels, -levels[::-1])
    if width in LEVELS:
        np.testing.assert_allclose(levels[2 ** (width - 1) :], LEVELS[width], atol=1e-5)
    grid = np.linspace(-9, 9, 200_001)
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)]
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    assert float((density * (grid - nearest) ** 2).sum() * (grid[1] - grid[0])) == pytest.approx(distortion, rel=5e-3)


@pytest.mark.long
@each_codec
def test_the_scale_makes_exact_what_it_promises(codec: Any) -> None:
    for x in (normal(4_096), normal(4_096).square(), torch.linspace(0, 1, 4_096), torch.eye(4_096)[7]):
        arrived = through(codec, x, setting_of(4_096)).double()
        dot, of_x, of_arrived = float(arrived @ x.double()), float(x.double() @ x.double()), float(arrived @ arrived)
        # The rest of S·c is at a right angle to what it approaches: to x̂ − x if S makes the error small, to x if it makes it 0.
        assert dot == pytest.approx(of_arrived if codec.scale == "min_mse" else of_x, rel=1e-5)
    if codec.scale == "unbiased":
        torch.testing.assert_close(through(codec, 3 * x, setting_of(4_096)), 3 * x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("codec", "error", "tolerance"),
    [(DRIVE(), 0.571, 0.02), (EDEN(2), 0.133, 0.01), (EDEN(4), 0.0096, 0.001), (DRIVE(scale="min_mse"), 0.363, 0.01)],
)
def test_errors_are_those_of_the_papers(codec: Any, error: float, tolerance: float) -> None:
    for x in (normal(21_840), normal(21_840).sign(), torch.linspace(-1, 3, 21_840)):
        assert relative_error(through(codec, x, setting_of(21_840)), x) == pytest.approx(error, abs=tolerance)


@pytest.mark.long
def test_eight_bits_lose_next_to_nothing() -> None:
    assert relative_error(through(EDEN(8), normal(21_840), setting_of(21_840)), normal(21_840)) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize(("codec", "variance"), [(DRIVE(), 0.571), (EDEN(2), 0.133)])
def test_the_mean_over_rotations_is_nearly_the_vector(codec: Any, variance: float) -> None:
    def error_of_mean(x: Tensor) -> float:
        return relative_error(torch.stack([through(codec, x, setting_of(128, seed)) for seed in range(200)]).mean(0), x)

    assert error_of_mean(normal(128)) < 1.5 * variance / 200


@pytest.mark.long
@pytest.mark.parametrize(
    ("codec", "ratio", "share"),
    [(DRIVE(), 1, 0.83), (DRIVE(), 2, 0.27), (EDEN(2), 3, 1.31), (EDEN(3), 6, 1.36)],
    ids=str,
)
def test_one_large_number_biases_the_mean_of_the_others_as_the_table_says(codec: Any, ratio: int, share: float) -> None:
    others = normal(64)
    others[7] = 0
    x = others + ratio * others.norm() * torch.eye(64)[7]
    mean = torch.stack([through(codec, x, setting_of(64, seed)) for seed in range(150)]).mean(0)
    assert float(mean @ others / others.square().sum()) == pytest.approx(share, abs=0.1)
    assert Traits.UNBIASED not in codec.traits | RandomK(0.5, values=codec).traits


@pytest.mark.long
def test_errors_of_clients_cancel_out_as_each_has_a_rotation_of_its_own() -> None:
    x = normal(4_096)
    own = [through(DRIVE(), x, setting_of(4_096, client=client)) for client in range(50)]
    assert relative_error(torch.stack(own).mean(0), x) <= 0.015
    one = [through(DRIVE(), x, setting_of(4_096)) for _ in range(50)]
    assert relative_error(torch.stack(one).mean(0), x) > 0.4


def test_entries_of_a_message_have_rotations_of_their_own() -> None:
    x, context = normal(256), setting_of(256)
    message: Message = dict.fromkeys(("model", "moments/first", "buffers", "scalars/steps"), x)
    payload, _ = DRIVE().encode(message, {}, context)
    arrived = DRIVE().decode(payload, context)
    assert arrived.keys() == message.keys()
    assert not torch.equal(arrived["model"], arrived["moments/first"])
    assert all(torch.equal(arrived[name], x) for name in ("buffers", "scalars/steps"))


@pytest.mark.long
@pytest.mark.parametrize(
    "codec", [DRIVE(scale="min_mse"), EDEN(2, scale="min_mse"), EDEN(4, scale="min_mse", chunks="pad")]
)
def test_the_smallest_error_contracts(codec: Any) -> None:
    vectors = [normal(500), torch.eye(500)[3], torch.ones(500), normal(500) * (torch.arange(500) < 9), normal(1)]
    for x in vectors:
        for seed in range(20):
            assert relative_error(through(codec, x, setting_of(len(x), seed)), x) < 0.9


def test_error_feedback_telescopes() -> None:
    feedback, memory, sent = ErrorFeedback(DRIVE(scale="min_mse")), {}, torch.zeros(100)
    for seed in range(10):
        payload, memory = feedback.encode({"model": normal(100, seed)}, memory, setting_of(100, seed))
        sent += feedback.decode(payload, setting_of(100, seed))["model"]
    total = sum(normal(100, seed) for seed in range(10))
    torch.testing.assert_close(sent + memory["residual/model"], total, rtol=1e-5, atol=1e-5)


def test_traits_are_those_of_the_scale() -> None:
    for codec in CODECS:
        of_scale = Traits.NEARLY_UNBIASED if codec.scale == "unbiased" else Traits.CONTRACTS
        assert codec.traits == Traits.DELTAS_ONLY | of_scale
    with pytest.raises(UserError, match="ErrorFeedback around EDEN would add up errors"):
        ErrorFeedback(EDEN())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: EDEN(0), "bits of a rotated number must be a whole number from 1 to 8, got 0."),
        (lambda: EDEN(0.5), "bits of a rotated number must be a whole number from 1 to 8, got 0.5."),
        (lambda: EDEN(9), "bits of a rotated number must be a whole number from 1 to 8, got 9."),
        (lambda: DRIVE(scale="mse"), "scale 'mse' is unknown; did you mean 'min_mse'? Allowed: min_mse, unbiased."),
        (lambda: DRIVE(chunks="padded"), "chunks 'padded' is unknown; did you mean 'pad'? Allowed: pad, split."),
    ],
)
def test_bad_parameters_are_refused_in_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value) == sentence


@each_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_crosses(codec: Any, dtype: torch.dtype) -> None:
    x, context = normal(200).to(dtype), setting_of(200, dtype=dtype)
    arrived = through(codec, x, context)
    assert arrived.dtype == dtype
    expected = through(codec, x.double(), replace(context, dtype=torch.float64))
    torch.testing.assert_close(arrived.double(), expected, rtol=0.02, atol=0.02)


@each_codec
def test_zeros_tiny_and_odd_vectors(codec: Any) -> None:
    for d in (0, 1, 2, 200):
        assert torch.equal(through(codec, torch.zeros(d), setting_of(d)), torch.zeros(d))
    for size in (1.0, -3.0):
        one = torch.tensor([size])
        torch.testing.assert_close(through(codec, one, setting_of(1)), one, rtol=1e-5, atol=0)
    x, context = torch.zeros(200), setting_of(200)
    x[:10] = 1
    assert through(codec, x, context)[:128].any()
    for factor in (1e-30, 1e30):  # whose squares are no numbers of float32
        torch.testing.assert_close(
            through(codec, factor * x, context) / factor, through(codec, x, context), rtol=1e-4, atol=1e-5
        )


@each_codec
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(codec: Any, value: float) -> None:
    x = normal(200)
    x[5] = value
    assert not through(codec, x, setting_of(200)).isfinite().all()
    payload, _ = codec.encode({"model": x}, {}, setting_of(200))
    assert sum(packed.bits for packed in payload.values()) == bits(codec, 200)


def test_codes_are_signs_in_order_of_the_rotated_vector() -> None:
    x = torch.zeros(64)
    x[0] = -2.0  # row 0 of H is all ones, so every rotated number has the sign of −D₀
    payload, _ = DRIVE().encode({"model": x}, {}, setting_of(64))
    assert len(set(unpack(payload["model"].content, 64, 1).tolist())) == 1


@pytest.mark.parametrize(
    "algorithm", [Algorithm(uplink=EDEN(3)), Algorithm(uplink=ErrorFeedback(DRIVE(scale="min_mse")))]
)
def test_a_federation_trains_and_the_ledger_is_exact(algorithm: Algorithm, make_trainer: MakeTrainer) -> None:
    width = 3 if isinstance(algorithm.uplink, EDEN) else 1
    pair = fits(make_trainer, Perceptron(), federation, algorithm)
    assert_same(pair, tolerance=1e-4, of_metrics=1e-3)
    for _, trainer in pair:
        # The 26 numbers are filled up to one chunk of 64.
        assert bits_of(trainer, "up") == {"model": 4 * width * 64, "scalars": 4 * 32}
        assert trainer.callback_metrics["val/loss"] < 3


def test_the_server_s_change_crosses(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_rounds=3)
    method = Algorithm(steps=[Apply(), Compress(DRIVE())], downlink=Followed(DRIVE()))
    trainer.fit(Perceptron(), federation(), method)
    assert bits_of(trainer, "down") == {"model": 6 * 64, "scalars": 6 * 32}


def test_eight_bits_give_the_model_of_fedavg(make_trainer: MakeTrainer) -> None:
    models = []
    for algorithm in (Algorithm(), Algorithm(uplink=EDEN(8))):
        torch.manual_seed(0)
        models.append(Perceptron())
        make_trainer(max_rounds=2).fit(models[-1], federation(), algorithm)
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    torch.testing.assert_close(flat[1], flat[0], rtol=0, atol=1e-2)
    assert not torch.equal(flat[0], flat[1])
