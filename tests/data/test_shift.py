"""Test feature shift: each client's images are changed, the split and everything else stay."""

import colorsys
from typing import NamedTuple

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from lightning_fl import FederatedTrainer
from lightning_fl.data import Arrays, Corruption, Digits, Dirichlet, Federated, Noise, Rotation, Shift
from lightning_fl.data.shift import Client
from lightning_fl.errors import UserError
from lightning_fl.modules import ImageClassifier

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), dtype=np.uint8)
LABELS = np.arange(40) % 4
SHIFTS = [Rotation(), Rotation((0, 180)), Noise(0.5), Corruption(), Corruption(("blur",), 5), Corruption("noise", 1)]


def toy(shift: Shift | None, **arguments) -> Arrays:
    options = {"num_clients": 5, "seed": 3, **arguments}
    data = Arrays(train=(PIXELS, LABELS), test=(PIXELS[:8], LABELS[:8]), shift=shift, **options)
    data.setup()
    return data


def images_of(data, indices) -> torch.Tensor:
    return torch.cat([images for images, _ in data.train.batches(100, indices)])


def original(indices) -> torch.Tensor:
    return torch.from_numpy(PIXELS[indices]).permute(0, 3, 1, 2).float() / 255


@pytest.mark.long
@settings(max_examples=30)
@given(shift=st.sampled_from(SHIFTS), seed=st.integers(0, 99), num_clients=st.integers(1, 6))
def test_the_split_the_test_set_and_the_server_stay(shift: Shift, seed: int, num_clients: int) -> None:
    options = {"seed": seed, "num_clients": num_clients, "val_fraction": 0.3, "server_fraction": 0.2}
    shifted, plain = toy(shift, **options), toy(None, **options)
    for name in ("client_indices", "client_val_indices"):
        for one, two in zip(getattr(shifted, name), getattr(plain, name), strict=True):
            assert np.array_equal(one, two)
    assert np.array_equal(shifted.server_indices, plain.server_indices)
    assert torch.equal(images_of(shifted, shifted.server_indices), original(shifted.server_indices))
    assert torch.equal(next(shifted.test.batches(8))[0], original(np.arange(8)))
    assert np.array_equal(shifted.train.labels, LABELS)


def test_without_a_shift_nothing_is_touched() -> None:
    plain = toy(None)
    assert plain.train.inputs.dtype == torch.uint8
    assert torch.equal(images_of(plain, None), original(np.arange(40)))


def test_rotation_turns_all_images_of_a_client_and_keeps_bytes() -> None:
    data = toy(Rotation(), val_fraction=0.3)
    assert data.train.inputs.dtype == torch.uint8
    for k in range(5):
        for rows in (data.client_indices[k], data.client_val_indices[k]):
            turned = np.rot90(original(rows).numpy(), k % 4, (2, 3))
            assert np.array_equal(images_of(data, rows).numpy(), turned)


@pytest.mark.long
def test_noise_grows_with_the_client_and_is_drawn_once_a_sample() -> None:
    x = np.zeros((4000, 1, 4, 4), dtype=np.float32)
    y = np.arange(4000) % 2

    def noisy(partition_seed: int, num_clients: int) -> Arrays:
        data = Arrays(train=(x, y), test=(x, y), num_clients=num_clients, shift=Noise(0.2), seed=partition_seed)
        data.setup()
        return data

    data = noisy(0, 5)
    deviations = [images_of(data, rows).std().item() for rows in data.client_indices]
    assert deviations[0] == 0
    assert np.allclose(deviations, [0.2 * k / 4 for k in range(5)], rtol=0.02)
    assert (x == 0).all()  # the user's own array
    assert torch.equal(images_of(data, data.client_indices[2]), images_of(noisy(0, 5), data.client_indices[2]))
    # By seed and index of the sample, not by client: scaled to one deviation, a sample's noise is the same.
    other = noisy(0, 3)
    sample = next(i for i in data.client_indices[4] if i in other.client_indices[2])
    assert torch.equal(images_of(data, [sample]), images_of(other, [sample]))
    assert images_of(noisy(0, 1), None).abs().sum() == 0


def test_corruptions_are_those_of_cifar_10_c() -> None:
    images = original(np.arange(3))
    indices = np.arange(3)

    def corrupted(kind: str, severity: int) -> torch.Tensor:
        return Corruption((kind,), severity)(images, Client(0, 1, 0), indices)

    mean = images.mean((2, 3), keepdim=True)
    assert torch.allclose(corrupted("contrast", 2), ((images - mean) * 0.5 + mean).clamp(0, 1))
    bright = corrupted("brightness", 5)
    for place in np.ndindex(3, 6, 6):
        n, i, j = place
        hue, saturation, value = colorsys.rgb_to_hsv(*images[n, :, i, j].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.3))
        assert np.allclose(bright[n, :, i, j].tolist(), expected, atol=1e-5)
    black = Corruption(("brightness",), 1)(torch.zeros(1, 1, 2, 2), Client(0, 1, 0), np.arange(1))
    assert torch.allclose(black, torch.full((1, 1, 2, 2), 0.05))
    point = torch.zeros(1, 1, 21, 21)
    point[0, 0, 10, 10] = 1
    blurred = Corruption(("blur",), 5)(point, Client(0, 1, 0), np.arange(1))[0, 0]
    assert blurred.sum().item() == pytest.approx(1, abs=1e-5)
    assert (blurred[10, 11] / blurred[10, 10]).item() == pytest.approx(np.exp(-0.5), rel=1e-4)
    grey = torch.full((200, 1, 8, 8), 0.5)
    noisy = Corruption(("noise",), 4)(grey, Client(0, 1, 0), np.arange(200))
    assert (noisy - grey).std().item() == pytest.approx(0.09, rel=0.03)


def test_client_k_has_the_kind_k_and_values_stay_between_0_and_1() -> None:
    data, kinds = toy(Corruption(severity=5)), ("noise", "blur", "contrast", "brightness")
    for k, rows in enumerate(data.client_indices):
        own = Corruption((kinds[k % 4],), 5)(original(rows), Client(k, 5, 3), rows)
        assert torch.allclose(images_of(data, rows), own)
    assert "; images changed by Corruption(kinds=" in data.description()
    everything = images_of(data, None)
    assert (everything.min() >= 0, everything.max() <= 1) == (True, True)


class Read(Dataset):
    """The same images, read one by one."""

    targets = LABELS

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return original(np.array([index]))[0], int(LABELS[index])


class Module(L.LightningDataModule):
    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.dataset = dataset

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=4)


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_dataset_that_is_read_one_by_one_is_changed_alike(shift: Shift) -> None:
    resident = toy(shift)
    read = Federated(Module(Read()), 5, shift=shift, seed=3)
    read.setup("fit")
    for k in range(5):
        assert np.array_equal(read.client_indices[k], resident.client_indices[k])
        images, labels = next(read.client(k).batches(100))
        assert torch.allclose(images, images_of(resident, resident.client_indices[k]), atol=1e-6)
        assert labels.tolist() == LABELS[read.client_indices[k]].tolist()
    drawn = next(read.client(1).batches(100, torch.Generator().manual_seed(0)))[0]
    assert torch.allclose(drawn.sum(), images_of(resident, resident.client_indices[1]).sum(), rtol=1e-4)


class Sample(NamedTuple):
    """Sample of a data set."""

    image: torch.Tensor
    label: int


@pytest.mark.parametrize("kind", [Sample._make, tuple, list])
def test_samples_keep_their_structure(kind) -> None:
    plain = Read()
    data = Federated(Module([kind(plain[i]) for i in range(40)]), 5, shift=Noise(0.5), seed=3)
    data.setup("fit")
    batch = next(data.client(1).batches(100))
    assert type(batch) is (Sample if kind == Sample._make else list)  # as torch collates tuples
    read = Federated(Module(plain), 5, shift=Noise(0.5), seed=3)
    read.setup("fit")
    assert torch.equal(batch[0], next(read.client(1).batches(100))[0])


def test_normalisation_comes_after_the_shift() -> None:
    data = toy(Corruption(("contrast",), 5), normalize=True)
    images = images_of(data, data.client_indices.joined)
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(images.std((0, 2, 3)), torch.ones(3), atol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotation((45,)), "angles must be multiples of 90 degrees"),
        (lambda: Rotation(()), "angles must be multiples of 90 degrees"),
        (lambda: Noise(-1.0), "sigma must be at least 0"),
        (lambda: Corruption(("fog",)), "kinds 'fog' is unknown; allowed: blur, brightness"),
        (lambda: Corruption(severity=6), "severity must be a whole number from 1 to 5"),
        (lambda: toy("noise"), "shift='noise' is not a Shift"),
    ],
)
def test_values_that_are_not_allowed_are_refused(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_samples_that_a_shift_cannot_change_are_refused() -> None:
    x, y = np.zeros((8, 3), dtype=np.float32), np.arange(8) % 2
    wide = np.zeros((8, 1, 2, 4), dtype=np.float32)

    def set_up(inputs: np.ndarray, shift: Shift) -> None:
        Arrays(train=(inputs, y), test=(inputs, y), num_clients=2, shift=shift).setup()

    set_up(x, Noise())
    with pytest.raises(UserError, match="changes images C×H×W, but a sample has the shape 3"):
        set_up(x, Rotation())
    with pytest.raises(UserError, match="2×4 pixels on their side"):
        set_up(wide, Rotation())
    with pytest.raises(UserError, match=r"needs images with values in \[0, 1\], but theirs go from 2 to 2"):
        set_up(wide + 2, Corruption(("blur",)))
    with pytest.raises(UserError, match="the inputs are int64 numbers"):
        set_up(x.astype(np.int64), Noise())
    bytes_only = Federated(Module([(PIXELS[0], 0)] * 8), 2, shift=Noise())
    bytes_only.setup("fit")
    with pytest.raises(UserError, match="shift changes float tensors, but list gives ndarray"):
        next(bytes_only.client(0).batches(2))


@pytest.mark.long
def test_a_shift_trains_the_same_way_twice_and_otherwise_without_it(tmp_path) -> None:
    def trained(shift: Shift | None) -> torch.Tensor:
        data = Digits(num_clients=4, partition=Dirichlet(1.0), shift=shift)
        trainer = FederatedTrainer(
            max_rounds=1,
            clients_per_round=4,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        torch.manual_seed(0)
        model = ImageClassifier("linear", num_classes=10, in_channels=1, image_size=8)
        trainer.fit(model, data)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    once = trained(Rotation())
    assert torch.equal(once, trained(Rotation()))
    assert not torch.equal(once, trained(None))
