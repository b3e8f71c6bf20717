"""Test samples: every sample once per pass, converted exactly, in the stated memory format and order."""

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torchvision.datasets import VisionDataset

from lightning_fl.data import DatasetSamples, Normalize, SampleLoader, Samples, TensorSamples, crop_and_flip
from lightning_fl.data.samples.dataset_samples import dataset_labels, samples_of
from lightning_fl.data.training_loader import read_loader
from lightning_fl.errors import UserError

CPU = torch.device("cpu")
IMAGES = torch.randint(0, 256, (30, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 4
INDICES = np.array([4, 9, 1, 20, 7, 28, 3])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Squares(Dataset):
    """Dataset of (i, i²); `targets` are i modulo 3."""

    def __init__(self, length: int = 20, noise: bool = False) -> None:
        self.targets = [i % 3 for i in range(length)]
        self.noise = noise

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[int, float]:
        drawn = torch.rand(()).item() + np.random.rand() + random.random() if self.noise else 0.0  # noqa: NPY002
        return i, i * i + drawn


def firsts(batches: Iterator) -> list[int]:
    return [int(value) for batch in batches for value in batch[0]]


@pytest.fixture(params=["tensors", "dataset"])
def numbers(request: pytest.FixtureRequest) -> Samples:
    if request.param == "tensors":
        return TensorSamples(torch.arange(20), torch.arange(20) ** 2)
    return DatasetSamples(Squares())


def test_a_pass_yields_each_sample_once(numbers: Samples) -> None:
    chosen = numbers.select(INDICES[INDICES < 20])
    batches = list(chosen.batches(2, generator()))
    assert [len(batch[0]) for batch in batches] == [2, 2, 1]
    seen = firsts(iter(batches))
    assert sorted(seen) == [1, 3, 4, 7, 9]
    assert [int(y) for batch in batches for y in batch[1]] == [x * x for x in seen]
    assert firsts(chosen.batches(2, generator())) == seen
    assert firsts(chosen.batches(2, generator(5))) != seen


def test_the_generator_goes_on_from_pass_to_pass(numbers: Samples) -> None:
    chosen, random_numbers = numbers.select(np.arange(20)), generator()
    assert firsts(chosen.batches(6, random_numbers)) != firsts(chosen.batches(6, random_numbers))


def test_without_a_generator_the_order_is_that_given(numbers: Samples) -> None:
    assert firsts(numbers.select(np.array([5, 2, 9])).batches(2)) == [5, 2, 9]
    assert firsts(numbers.batches(3, np.array([5, 2, 9, 0]))) == [5, 2, 9, 0]
    assert firsts(numbers.batches(7)) == list(range(20))


def test_no_samples_are_no_batches(numbers: Samples) -> None:
    empty = numbers.select(np.array([], dtype=np.int64))
    assert len(empty) == 0
    assert list(empty.batches(3, generator())) == list(empty.batches(3)) == []


def test_reading_leaves_the_global_generator_alone(numbers: Samples) -> None:
    before = torch.get_rng_state()
    list(numbers.select(INDICES[:3]).batches(2, generator()))
    list(numbers.select(INDICES[:3]).batches(2))
    list(numbers.batches(5))
    assert torch.equal(before, torch.get_rng_state())


def test_samples_are_sent_as_they_are_stored() -> None:
    images = TensorSamples(IMAGES, LABELS, transform=Normalize(torch.ones(3), torch.ones(3)))
    pixels, labels = images.stored(INDICES)
    assert torch.equal(pixels, IMAGES[INDICES])
    assert (labels.dtype, labels.tolist()) == (torch.int32, LABELS[INDICES].tolist())
    numbers, squares = DatasetSamples(Squares(30)).stored(INDICES)
    assert (numbers.dtype, numbers.tolist()) == (torch.int32, INDICES.tolist())
    assert squares.tolist() == (INDICES**2).tolist()


def test_images_are_scaled_exactly() -> None:
    samples = TensorSamples(IMAGES, LABELS)
    ((x, y),) = samples.select(INDICES).batches(10)
    assert torch.equal(x, IMAGES[INDICES].float() / 255)
    assert torch.equal(y, LABELS[INDICES])
    assert torch.equal(torch.cat([x for x, _ in samples.batches(4)]), IMAGES.float() / 255)
    assert samples.labels is not None
    assert samples.labels.tolist() == LABELS.tolist()


def test_batches_of_a_pass_are_views_of_one_gather() -> None:
    batches = list(TensorSamples(IMAGES, LABELS).select(INDICES).batches(3, generator()))
    assert len({x.untyped_storage().data_ptr() for x, _ in batches}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same_batches_lie_there() -> None:
    transform = Normalize(torch.full((3,), 0.5), torch.full((3,), 0.25))
    host, gpu = (TensorSamples(IMAGES, LABELS, augment=crop_and_flip, transform=transform) for _ in range(2))
    expected = list(host.select(INDICES).batches(3, generator()))
    gpu.place(torch.device("cuda"))
    for (x, y), (x_gpu, y_gpu) in zip(expected, gpu.select(INDICES).batches(3, generator()), strict=True):
        assert x_gpu.is_cuda
        torch.testing.assert_close(x_gpu.cpu(), x)
        assert torch.equal(y_gpu.cpu(), y)


def test_a_lone_tensor_is_a_lone_batch() -> None:
    samples = TensorSamples(torch.arange(6.0))
    assert samples.labels is None
    assert [batch.tolist() for batch in samples.select(np.array([3, 1, 2])).batches(2)] == [[3, 1], [2]]
    assert [batch.tolist() for batch in samples.batches(4)] == [[0, 1, 2, 3], [4, 5]]


def test_lengths_must_agree() -> None:
    with pytest.raises(UserError, match=r"one length, but theirs are \[3, 4\]"):
        TensorSamples(torch.zeros(3), torch.zeros(4))
    with pytest.raises(UserError, match="at least one tensor"):
        TensorSamples()


@pytest.mark.parametrize("tensors", [(IMAGES, LABELS), (IMAGES,)])
def test_tensors_are_a_data_set_for_those_who_ask(tensors: tuple[Tensor, ...]) -> None:
    dataset = SampleLoader(TensorSamples(*tensors), INDICES, 3).dataset
    assert dataset is not None
    assert len(dataset) == len(INDICES)
    sample = dataset[1]
    first, *others = sample if len(tensors) > 1 else (sample,)
    torch.testing.assert_close(first, IMAGES[INDICES[1]] / 255)
    assert others == [tensor[INDICES[1]] for tensor in tensors[1:]]


def test_normalisation_makes_moments_zero_and_one() -> None:
    samples = TensorSamples(IMAGES)
    mean, std = samples.channel_moments(INDICES, rows=3)
    chosen = IMAGES[INDICES].double() / 255
    assert torch.allclose(mean, chosen.mean((0, 2, 3)))
    assert torch.allclose(std, chosen.std((0, 2, 3), correction=0))
    samples.transform = Normalize(mean, std)
    (x,) = samples.select(INDICES).batches(10)
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_each_image_is_shifted_and_mirrored_on_its_own() -> None:
    images = torch.rand(256, 2, 5, 6, generator=generator())
    changed = crop_and_flip(images, generator(), padding=1)
    padded = torch.nn.functional.pad(images, (1,) * 4)
    found = []
    for before, after in zip(padded, changed, strict=True):
        candidates = {
            (top, left, mirrored): (window.flip(2) if mirrored else window)
            for top in range(3)
            for left in range(3)
            for mirrored in (False, True)
            for window in [before[:, top : top + 5, left : left + 6]]
        }
        found += [key for key, window in candidates.items() if torch.equal(window, after)]
    assert len(found) == 256
    assert len(set(found)) == 18
    assert torch.equal(crop_and_flip(images, generator(), padding=1), changed)


def test_augmentation_differs_from_pass_to_pass_and_precedes_normalisation() -> None:
    samples = TensorSamples(torch.full((8, 1, 8, 8), 255, dtype=torch.uint8), augment=crop_and_flip)
    samples.transform = Normalize(torch.tensor([0.5]), torch.tensor([0.5]))
    selection, random_numbers = samples.select(np.arange(8)), generator()
    one, two = (torch.cat(list(selection.batches(8, random_numbers))) for _ in range(2))
    assert not torch.equal(one, two)
    assert set(one.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(next(iter(selection.batches(8))), torch.ones(8, 1, 8, 8))


def test_one_loader_serves_all_clients() -> None:
    samples = DatasetSamples(Squares())
    list(samples.select(np.arange(4)).batches(2, generator()))
    loader = samples._loader
    assert loader is not None
    assert sorted(firsts(samples.select(np.arange(4, 9)).batches(2, generator()))) == [4, 5, 6, 7, 8]
    assert samples._loader is loader
    assert not samples.resident


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_dataset_draws_follows_the_generator(num_workers: int) -> None:
    samples = DatasetSamples(Squares(noise=True), num_workers=num_workers)
    one, same, other = (
        [y.tolist() for _, y in samples.select(np.arange(6)).batches(2, generator(seed))] for seed in (0, 0, 1)
    )
    assert one == same != other
    if num_workers:
        in_this_process = DatasetSamples(Squares(noise=True)).select(np.arange(6)).batches(2, generator())
        assert one == [y.tolist() for _, y in in_this_process]
        # Evaluation within a pass is allowed, a second pass is not.
        first = samples.select(np.arange(6)).batches(2, generator())
        next(first)
        assert firsts(samples.batches(10)) == list(range(20))
        next(first)
        next(samples.select(np.arange(6)).batches(2, generator()))
        with pytest.raises(RuntimeError, match="Another pass"):
            next(first)


def noisy(rows: list[Tensor]) -> Tensor:
    """Collate and add a number of each generator, as MixUp and masking of tokens draw them."""
    return torch.stack(rows) + torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002


@pytest.mark.long
def test_what_a_collate_function_draws_follows_the_generator() -> None:
    rows = torch.arange(6.0)
    here, away = DatasetSamples(rows, noisy), DatasetSamples(rows, noisy, num_workers=1)  # type: ignore[arg-type]
    expected, later, first, second = (
        [batch.tolist() for batch in samples.select(np.arange(6)).batches(2, generator())]
        for samples in (here, here, away, away)
    )
    assert expected == later == first == second


def open_file(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.targets = [40 + number] * 20  # type: ignore[attr-defined]


class Opened(Squares):
    """Squares whose targets each worker opens for itself, as it opens files."""

    def __getitem__(self, i: int) -> tuple[int, float]:
        return self.targets[i], 0.0


@pytest.mark.long
def test_a_worker_finds_the_users_dataset() -> None:
    samples = DatasetSamples(Opened(), num_workers=1, worker_init_fn=open_file)
    assert firsts(samples.select(np.arange(4)).batches(2, generator())) == [40] * 4
    assert firsts(samples.batches(2, np.arange(4))) == [40] * 4


@pytest.mark.long
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs processes that fork")
def test_workers_are_started_and_read_as_the_users_loader_says() -> None:
    class Counted(multiprocessing.context.ForkContext):
        started = 0

        def Process(self, *arguments: Any, **options: Any) -> Any:  # noqa: N802
            self.started += 1
            return super().Process(*arguments, **options)

    context = Counted()
    loader = DataLoader(
        Squares(4),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        multiprocessing_context=context,
        prefetch_factor=5,
        timeout=60,
    )
    samples, *_ = read_loader(loader, "Mine")
    assert sorted(firsts(samples.select(np.arange(4)).batches(2, generator()))) == [0, 1, 2, 3]
    assert context.started == 1
    assert firsts(samples.batches(2, np.arange(4))) == [0, 1, 2, 3]
    assert context.started == 2
    assert isinstance(samples, DatasetSamples)
    assert samples._loader is not None
    assert (samples._loader.prefetch_factor, samples._loader.timeout) == (5, 60)
    assert len(multiprocessing.active_children()) == 1, "a worker stays from pass to pass"
    samples.end_workers()
    assert not multiprocessing.active_children()
    assert sorted(firsts(samples.select(np.arange(4)).batches(2, generator()))) == [0, 1, 2, 3]
    samples.end_workers()


class Renumbered(Subset):
    """Some samples of a data set under other classes, which it names itself."""

    @property
    def targets(self) -> list[int]:
        return [5, 4, 5]


def test_labels_of_datasets() -> None:
    labelled = TensorDataset(torch.zeros(4, 2), torch.tensor([3, 1, 2, 0]))
    found = {
        "targets": dataset_labels(Squares(4)),
        "tensors": dataset_labels(labelled),
        "subset": dataset_labels(Subset(Subset(labelled, [2, 0, 1]), [1, 0])),
        "concatenation": dataset_labels(ConcatDataset([labelled, Squares(2)])),
        "floats": dataset_labels(TensorDataset(torch.zeros(4), torch.zeros(4))),
        "none": dataset_labels(TensorDataset(torch.zeros(4))),
        "half": dataset_labels(ConcatDataset([labelled, TensorDataset(torch.zeros(4))])),
        "own": dataset_labels(Renumbered(labelled, [2, 0, 1])),
    }
    assert {name: None if labels is None else labels.tolist() for name, labels in found.items()} == {
        "targets": [0, 1, 2, 0],
        "tensors": [3, 1, 2, 0],
        "subset": [3, 2],
        "concatenation": [3, 1, 2, 0, 0, 1],
        "floats": None,
        "none": None,
        "half": None,
        "own": [5, 4, 5],
    }


class Letters(VisionDataset):
    """Data set whose labels begin at 1, as those of EMNIST's letters do."""

    targets = (1, 2, 3, 1)

    def __len__(self) -> int:
        return len(self.targets)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda label: label - 1, [0, 1, 2, 0]),
        (lambda label: torch.tensor(label % 2), [1, 0, 1, 1]),
        (lambda label: torch.eye(4)[label], [1, 2, 3, 1]),
        (lambda label: label / 2, [1, 2, 3, 1]),
        (None, [1, 2, 3, 1]),
    ],
)
def test_classes_are_those_that_a_torchvision_dataset_reads(transform: Any, expected: list[int]) -> None:
    labels = dataset_labels(Letters(target_transform=transform))
    assert labels is not None
    assert labels.tolist() == expected


def test_plain_tensor_datasets_take_the_fast_path() -> None:
    dataset = TensorDataset(torch.arange(5.0), torch.arange(5))
    fast = samples_of(Subset(dataset, [4, 2, 0]))
    assert isinstance(fast, TensorSamples)
    assert firsts(fast.batches(2)) == [4, 2, 0]
    assert isinstance(samples_of(dataset, collate_fn=list), DatasetSamples)
    assert isinstance(samples_of(TensorDataset(IMAGES, LABELS)), DatasetSamples)


def test_iterable_datasets_cannot_be_divided() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(UserError, match="Stream cannot be divided over clients"):
        DatasetSamples(Stream())
