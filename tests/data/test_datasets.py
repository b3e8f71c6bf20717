"""Test each data set on a few fabricated files in the real formats."""

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from lightning_fl.data import CIFAR10, CIFAR100, SVHN, Arrays, Digits, FashionMNIST, FederatedDataModule, ImageFolder
from lightning_fl.data.datasets import arrays
from lightning_fl.errors import UserError

RNG = np.random.default_rng(0)


def read_all(module: FederatedDataModule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all training images and labels, in file order."""
    module.setup()
    batches = list(module.train.batches(7))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def random_images(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def expected(nhwc: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(nhwc).permute(0, 3, 1, 2).float() / 255


# Digits


@pytest.mark.long
def test_digits() -> None:
    module = Digits(num_clients=5)
    images, labels = read_all(module)
    assert images.shape == (1437, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert module.test is not None
    assert len(module.test) == 360
    counts = np.bincount(module.test.labels)
    assert counts.min() >= 34
    assert counts.max() <= 38
    assert np.bincount(labels).sum() == 1437


@pytest.mark.long
def test_enlarged_digits_and_another_seed() -> None:
    images, labels = read_all(Digits(num_clients=5, image_size=32))
    assert images.shape == (1437, 1, 32, 32)
    small, same_labels = read_all(Digits(num_clients=5))
    assert torch.equal(labels, same_labels)
    enlarged = torch.nn.functional.interpolate(small, size=32, mode="bilinear")
    assert torch.allclose(images, enlarged, atol=1.01 / 255)
    _, other_labels = read_all(Digits(num_clients=5, seed=1))
    assert not torch.equal(labels, other_labels)
    with pytest.raises(UserError, match=r"image_size must .*, got 7"):
        Digits(image_size=7)


# torchvision's files


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept fabricated files, whose checksums are not the real ones."""
    for module in ("cifar", "svhn"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda path, *_: Path(path).is_file())


def write_cifar(folder: Path, files: dict[str, tuple[np.ndarray, list[int]]], key: str) -> None:
    folder.mkdir()
    for name, (images, labels) in files.items():
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        (folder / name).write_bytes(pickle.dumps({"data": rows, key: labels}))


@pytest.mark.usefixtures("trusting")
def test_cifar10(tmp_path: Path) -> None:
    parts = {f"data_batch_{i}": (random_images(4, 32, 32, 3), [i, 0, 9, 3]) for i in range(1, 6)}
    parts["test_batch"] = (random_images(3, 32, 32, 3), [1, 2, 3])
    write_cifar(tmp_path / "cifar-10-batches-py", parts, "labels")
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    module = CIFAR10(root=str(tmp_path), num_clients=4, client_fraction=0.8)
    images, labels = read_all(module)
    assert torch.equal(images, expected(np.concatenate([parts[f"data_batch_{i}"][0] for i in range(1, 6)])))
    assert labels.tolist() == [label for i in range(1, 6) for label in (i, 0, 9, 3)]
    assert (module.num_classes, module.in_channels) == (10, 3)
    # The files are already shuffled, so the clients get the first 80 % of them in order.
    assert set(np.concatenate(module.client_indices)) == set(range(16))
    assert module.test is not None
    assert torch.equal(next(module.test.batches(3))[0], expected(parts["test_batch"][0]))


@pytest.mark.usefixtures("trusting")
def test_cifar100(tmp_path: Path) -> None:
    parts = {"train": (random_images(6, 32, 32, 3), [99, 0, 1, 2, 3, 4]), "test": (random_images(2, 32, 32, 3), [5, 6])}
    write_cifar(tmp_path / "cifar-100-python", parts, "fine_labels")
    (tmp_path / "cifar-100-python" / "meta").write_bytes(
        pickle.dumps({"fine_label_names": [str(i) for i in range(100)]})
    )
    module = CIFAR100(root=str(tmp_path), num_clients=2)
    images, labels = read_all(module)
    assert torch.equal(images, expected(parts["train"][0]))
    assert labels.tolist() == [99, 0, 1, 2, 3, 4]
    assert module.label_histograms is not None
    assert module.label_histograms.shape == (2, 100)


def test_fashion_mnist(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    train = random_images(6, 28, 28)
    for name, images in (("train", train), ("t10k", random_images(2, 28, 28))):
        header = struct.pack(">IIII", 0x803, len(images), 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = bytes(range(len(images)))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(images)) + labels)
    module = FashionMNIST(root=str(tmp_path), num_clients=2)
    images, labels = read_all(module)
    assert torch.equal(images, expected(train[..., None]))
    assert labels.tolist() == list(range(6))
    assert (module.num_classes, module.in_channels) == (10, 1)


@pytest.mark.usefixtures("trusting")
def test_svhn(tmp_path: Path) -> None:
    train = random_images(5, 32, 32, 3)
    for name, images in (("train", train), ("test", random_images(2, 32, 32, 3))):
        labels = np.arange(1, len(images) + 1)
        labels[-1] = 10
        savemat(tmp_path / f"{name}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": labels[:, None]})
    images, labels = read_all(SVHN(root=str(tmp_path), num_clients=2))
    assert torch.equal(images, expected(train))
    # SVHN's files label the digit zero '10'.
    assert labels.tolist() == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("data", [CIFAR10, CIFAR100, FashionMNIST, SVHN])
def test_absent_files(data: type[CIFAR10], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=f"{data.__name__} needs {data.files} in {tmp_path}.*download=True.*--data Arrays"
    ):
        data(root=str(tmp_path)).setup()


def test_a_failed_download_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", unreachable)
    with pytest.raises(UserError, match=r"CIFAR10 could not be downloaded to .* \(OSError: no network\)"):
        CIFAR10(root=str(tmp_path), download=True).prepare_data()


# Image folders


def write_folder(root: Path) -> dict[str, np.ndarray]:
    written = {}
    for part in ("train", "test"):
        for name in "ab":
            (root / part / name).mkdir(parents=True)
            for i in range(3):
                written[f"{part}/{name}/{i}"] = random_images(5, 6, 3)
                Image.fromarray(written[f"{part}/{name}/{i}"]).save(root / part / name / f"{i}.png")
    return written


def test_image_folder(tmp_path: Path) -> None:
    written = write_folder(tmp_path)
    module = ImageFolder(str(tmp_path), num_clients=2)
    assert (module.num_classes, module.in_channels, module.image_size) == (2, 3, None)  # 6×5 pixels
    images, labels = read_all(module)
    assert torch.equal(images, expected(np.stack([written[f"train/{name}/{i}"] for name in "ab" for i in range(3)])))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_image_folder_resizes_and_turns_grey_into_colour(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.fromarray(random_images(9, 9)).save(tmp_path / "train" / "a" / "grey.jpg")
    module = ImageFolder(str(tmp_path), image_size=4, num_clients=2)
    assert module.image_size == 4
    assert read_all(module)[0].shape == (7, 3, 4, 4)


def test_image_folder_of_square_images_knows_their_size(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(random_images(9, 9, 3)).save(tmp_path / part / "a" / "0.png")
    assert ImageFolder(str(tmp_path)).image_size == 9


@pytest.mark.long
def test_image_folder_says_which_files_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    write_folder(tmp_path)
    (tmp_path / "train" / "a" / ".DS_Store").write_bytes(b"")
    with caplog.at_level("INFO", "lightning.pytorch"):
        ImageFolder(str(tmp_path), num_clients=2).setup()
    assert "leaves out" not in caplog.text
    for name in ("a/notes.txt", "b/README"):
        (tmp_path / "train" / name).write_text("no image")
    with caplog.at_level("INFO", "lightning.pytorch"):
        ImageFolder(str(tmp_path), num_clients=2).setup()
    assert f"leaves out 2 of the files in {tmp_path / 'train'}, because" in caplog.text
    assert "suffixes: .txt (1), none (1). Convert" in caplog.text
    assert not [one for one in recwarn if "leaves out" in str(one.message)]
    for i in range(3):
        Image.fromarray(random_images(6, 5, 3)).save(tmp_path / "test" / "b" / f"more{i}.JFIF", format="JPEG")
    data, sentence = (
        ImageFolder(str(tmp_path), num_clients=2),
        r"leaves out 3 of the files in .*test, because .*: \.jfif \(3\)\.",
    )
    with pytest.warns(UserWarning, match=sentence):
        data.setup()
    assert len(data.test) == 6  # type: ignore[arg-type]
    for number in range(7):
        (tmp_path / "train" / "a" / f"x.a{number}").write_text("")
    with caplog.at_level("INFO", "lightning.pytorch"), pytest.warns(UserWarning, match="leaves out 3"):
        ImageFolder(str(tmp_path), num_clients=2).setup()
    assert "and 4 more suffixes. Convert" in caplog.text


def test_image_folder_mistakes(tmp_path: Path) -> None:
    layout = r"expected images in ROOT/train/CLASS/ and ROOT/test/CLASS/"
    with pytest.raises(UserError, match=f"train is missing or has no class folders: {layout}"):
        ImageFolder(str(tmp_path)).setup()
    write_folder(tmp_path)
    Image.fromarray(random_images(9, 9, 3)).save(tmp_path / "train" / "b" / "large.png")
    with pytest.raises(UserError, match=r"large\.png is 9×9 pixels but .*0\.png is 6×5 pixels: set image_size"):
        ImageFolder(str(tmp_path), num_clients=2).setup()
    (tmp_path / "train" / "b" / "large.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"large\.png is not a readable image"):
        ImageFolder(str(tmp_path), num_clients=2).setup()
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(UserError, match=r"has the classes \['a', 'b'\] but .* has \['a', 'b', 'c'\]"):
        ImageFolder(str(tmp_path), num_clients=2).setup()
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(UserError, match=f"has no images .*{layout}"):
        ImageFolder(str(tmp_path), num_clients=2).setup()


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_images_of_more_than_8_bits_are_refused(mode: str, tmp_path: Path) -> None:
    """Test that they do not become white, as Pillow clips them."""
    write_folder(tmp_path)
    values = np.full((5, 6), 20_000, dtype={"I;16": "<u2", "I;16B": ">u2", "I": "<i4", "F": "<f4"}[mode])
    image = Image.frombytes(mode, (6, 5), values.tobytes())
    image.save(tmp_path / "train" / "b" / "deep.tiff")
    with pytest.raises(UserError, match=r"deep\.tiff has pixels of .* without a scale: convert such images to 8 bits"):
        ImageFolder(str(tmp_path), num_clients=2).setup()


def test_a_very_large_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(UserError, match=r"0\.png is not a readable image \(Image size \(30 pixels\) exceeds limit"):
        ImageFolder(str(tmp_path), num_clients=2).setup()


def test_links_do_not_lead_round_in_circles(tmp_path: Path) -> None:
    write_folder(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Image.fromarray(random_images(5, 6, 3)).save(elsewhere / "more.png")
    (tmp_path / "train" / "b" / "linked").symlink_to(elsewhere, target_is_directory=True)
    data = ImageFolder(str(tmp_path), num_clients=2)
    data.setup()
    count = len(list((tmp_path / "train").rglob("*.png")))
    assert len(data.train) == count + 1
    (tmp_path / "train" / "a" / "loop").symlink_to(tmp_path / "train", target_is_directory=True)
    with pytest.raises(UserError, match=r"leads again to the folder of .*a, whose images would count twice: remove"):
        ImageFolder(str(tmp_path), num_clients=2).setup()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    write_folder(tmp_path)
    os.mkfifo(tmp_path / "train" / "b" / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png is no file"):
        ImageFolder(str(tmp_path), num_clients=2).setup()


# Arrays


def write_arrays(path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {
        "train_images": random_images(8, 6, 5, 3),
        "train_labels": np.arange(8) % 4,
        "test_images": random_images(4, 6, 5, 3),
        "test_labels": np.arange(4),
    }
    np.savez(path, **{name: array for name, array in {**arrays, **changes}.items() if array is not None})
    return path


def test_arrays_from_a_file(tmp_path: Path) -> None:
    images = random_images(8, 6, 5, 3)
    module = Arrays(str(write_arrays(tmp_path / "a.npz", train_images=images)), num_clients=2)
    assert (module.num_classes, module.in_channels) == (4, 3)
    read, labels = read_all(module)
    assert torch.equal(read, expected(images))
    assert labels.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (module.num_classes, module.in_channels) == (4, 3)


def test_arrays_of_grey_images_with_labels_in_a_column(tmp_path: Path) -> None:
    grey, few = random_images(8, 6, 5), random_images(4, 6, 5)
    path = write_arrays(
        tmp_path / "a.npz", train_images=grey, test_images=few, train_labels=np.arange(8, dtype=np.uint8)[:, None]
    )
    module = Arrays(str(path), num_clients=2)
    images, labels = read_all(module)
    assert torch.equal(images, expected(grey[..., None]))
    assert labels.tolist() == list(range(8))
    assert (module.num_classes, module.in_channels, module.image_size) == (8, 1, None)  # 6×5 pixels


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train_labels": None, "train_label": np.arange(8)}, "lacks train_labels .did you mean 'train_label'"),
        (
            {"train_images": np.zeros((8, 6, 5, 3))},
            "train_images of .* is float64 .8, 6, 5, 3.: expected uint8 images",
        ),
        ({"train_images": random_images(8, 5)}, "train_images of .* is uint8 .8, 5."),
        ({"train_images": random_images(8, 3, 6, 5)}, "with channels first: pass uint8 images as n×H×W×C"),
        ({"test_labels": np.arange(4.0)}, "test_labels of .* is float64 .4,.: expected integer labels"),
        ({"test_labels": np.arange(3)}, "test has 4 samples but 3 labels"),
        ({"test_labels": np.int64(3)}, r"test_labels of .* is int64 \(\): expected integer labels"),
        ({"train_groups": np.array([{}] * 8)}, "train_groups of .* has objects, which may run code"),
        ({"test_images": random_images(4, 6, 6, 3)}, "make them equal"),
        ({"train_labels": np.array([{}] * 8)}, "is not a readable .npz file"),
    ],
)
def test_odd_files(tmp_path: Path, changes: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Arrays(str(write_arrays(tmp_path / "a.npz", **changes)), num_clients=2).setup()


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(UserError, match="There is no file"):
        Arrays(str(path)).setup()
    path.write_bytes(write_arrays(tmp_path / "b.npz").read_bytes()[:300])
    with pytest.raises(UserError, match=r"is not a readable \.npz file"):
        Arrays(str(path)).setup()
    np.save(tmp_path / "c.npy", np.zeros(3))
    with pytest.raises(UserError, match="is a single array"):
        Arrays(str(tmp_path / "c.npy")).setup()


def test_an_array_that_claims_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "a.npz")
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    true, huge = b"'shape': (4, 6, 5, 3), }", b"'shape': (4, 600000000000, 5, 3), }"
    claimed = members["test_images.npy"].replace(true + (len(huge) - len(true)) * b" ", huge)
    assert claimed != members["test_images.npy"]
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (members | {"test_images.npy": claimed}).items():
            file.writestr(name, content)
    with pytest.raises(UserError, match=r"test_images of .*a\.npz does not fit into memory"):
        Arrays(str(path)).setup()


def test_arrays_from_python() -> None:
    x, y = torch.randn(20, 7), torch.randn(20, 2)
    regression = Arrays(train=(x, y), test=(x, y), num_clients=4)
    regression.setup()
    assert (regression.num_classes, regression.in_channels, regression.label_histograms) == (None, None, None)
    ((x_read, y_read),) = regression.train.batches(20)
    assert torch.equal(x_read, x)
    assert torch.equal(y_read, y)
    lone = Arrays(train=x, test=x, num_clients=4)
    lone.setup()
    assert torch.equal(next(lone.train.batches(20)), x)
    images = Arrays(
        train=(torch.randn(20, 3, 4, 4), np.arange(20) % 3), test=(torch.randn(2, 3, 4, 4), np.array([0, 1]))
    )
    assert (images.num_classes, images.in_channels, images.image_size) == (3, 3, 4)


def test_mistakes_from_python() -> None:
    x, y = torch.randn(20, 7), torch.arange(20)
    for arguments in ({}, {"train": x}, {"path": "a.npz", "train": x, "test": x}):
        with pytest.raises(UserError, match="either path, or train and test together"):
            Arrays(**arguments)
    with pytest.raises(UserError, match=r"train must be \(x, y\) or x alone"):
        Arrays(train=(x, y, y), test=x).setup()
    with pytest.raises(UserError, match="x of train is a str: pass a tensor, an array"):
        Arrays(train="x", test=x).setup()
    with pytest.raises(UserError, match="augment=True needs images"):
        Arrays(train=(x, y), test=(x, y), augment=True).setup()


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ((np.zeros(()), np.zeros(4)), "x of train is a single number"),
        ((np.zeros((4, 2)), np.zeros(())), "y of train is a single number"),
        ((np.array([{}] * 4), np.zeros(4)), "x of train has the type object: pass an array or a tensor of numbers"),
        ((np.zeros((4, 2)), np.array(["a"] * 4)), "y of train has the type <U1: pass an array or a tensor of numbers"),
        ((np.zeros((4, 2), dtype=np.uint16), np.zeros(4)), "x of train has the type uint16, which torch cannot index"),
        ((np.ma.masked_equal(np.ones((4, 2)), 1), np.zeros(4)), "x of train has masked entries"),
    ],
)
def test_arrays_that_are_no_samples_are_refused(train: tuple, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Arrays(train=train, test=train, num_clients=2).setup()


def test_numpy_arrays_of_any_layout_are_read() -> None:
    x, y = np.arange(8.0, dtype=">f4").reshape(4, 2)[::-1], np.arange(4, dtype=">i8")[::-1]
    data = Arrays(train=(x, y), test=(x, y), num_clients=2)
    data.setup()
    read, labels = next(data.train.batches(4))
    assert (read.tolist(), labels.tolist()) == (x.tolist(), y.tolist())
    turns = Arrays(train=(x, 1j * y), test=(x, 1j * y), num_clients=2)
    turns.setup()
    assert (turns.num_classes, turns.train.labels) == (None, None), "complex targets are no classes"


def test_a_test_label_that_no_training_sample_has_is_said() -> None:
    x, y = torch.zeros(20, 2), torch.arange(20) % 4
    data = Arrays(train=(x, y.clamp(max=2)), test=(x, y), num_clients=2)
    with pytest.warns(UserWarning, match=r"5 of 20 test samples have a label that no training sample has \(3\)"):
        data.setup()


def test_a_part_without_samples_is_named() -> None:
    x, y = torch.zeros(6, 1, 8, 8), torch.arange(6)
    with pytest.raises(UserError, match="no test samples: give at least one"):
        _ = Arrays(train=(x, y), test=(x[:0], y[:0]), num_clients=2).num_classes


def test_a_stray_label_does_not_make_a_million_classes() -> None:
    x, y = torch.zeros(20, 1, 8, 8), torch.arange(20) % 4
    stray = y.clone()
    stray[3] = 1_000_000
    with pytest.raises(
        UserError, match="the largest label is 1,000,000, but only 5 different labels occur in 40 samples"
    ):
        _ = Arrays(train=(x, stray), test=(x, y), num_clients=2).num_classes
    stray[3] = 30
    with pytest.warns(UserWarning, match=r"the largest label is 30, but only 5 .* so the model gets 31 classes"):
        assert Arrays(train=(x, stray), test=(x, y), num_clients=2).num_classes == 31
    assert Arrays(train=(x, stray), test=(x, y), num_clients=2, num_classes=40).num_classes == 40


def test_tables_lists_and_sparse_matrices_are_arrays() -> None:
    pd = pytest.importorskip("pandas")
    from scipy.sparse import csr_array, csr_matrix

    x = np.eye(12, 5, dtype=np.float32)
    y = np.arange(12) % 3
    frame = pd.DataFrame(x)
    forms: dict[str, Any] = {
        "arrays": (x, y),
        "tables": (frame, pd.Series(y)),
        "a table of targets": (frame, pd.DataFrame(y)),
        "a list of tables": [frame, pd.Series(y)],
        "numbers that may be missing": (frame, pd.Series(y, dtype="Int64")),
        "lists": (x.tolist(), y.tolist()),
        "a list of arrays": (list(x), y),
        "a list of tensors": (list(torch.from_numpy(x)), list(torch.from_numpy(y))),
        "sparse": (csr_matrix(x), y),
        "a sparse array": (csr_array(x), y),
        "a sparse tensor": (torch.from_numpy(x).to_sparse(), y),
    }
    for name, form in forms.items():
        data = Arrays(train=form, test=form, num_clients=2)
        data.setup()
        (read,) = data.train.batches(12)
        assert torch.equal(read[0], torch.from_numpy(x)), name
        assert torch.equal(read[1], torch.from_numpy(y)), name
        assert data.num_classes == 3, name
    for alone in (x.tolist(), list(torch.from_numpy(x)), csr_matrix(x), frame, [[1.0, 2.0], [3.0, 4.0]]):
        data = Arrays(train=alone, test=alone, num_clients=2)
        data.setup()
        (read,) = data.train.batches(12)
        assert torch.equal(read, torch.from_numpy(x) if len(read) == 12 else torch.tensor(alone))


def test_what_is_no_array_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pd = pytest.importorskip("pandas")
    from scipy.sparse import csr_matrix

    x, y = torch.zeros(6, 2), torch.arange(6)
    for given, sentence in (
        (({"a": 1}, y), "x of train is a dict: pass a tensor, an array, a list, a table or a sparse matrix"),
        (([[1.0], [1.0, 2.0]], y), r"x of train is no list of equally long rows of numbers \(expected sequence"),
        ((x, list("abcdef")), "y of train is no list of equally long rows of numbers"),
        (
            (x, pd.Series(list("abcdef"))),
            "y of train has the type (object|str)[a-z]*: pass an array or a tensor of numbers",
        ),
        ((x, y, y), r"train must be \(x, y\) or x alone, not a tuple of 3 parts"),
        ((), r"train must be \(x, y\) or x alone, not a tuple of 0 parts"),
        ([x, y, y], "x of train is no list of equally long rows of numbers"),
        ([], "no train samples"),
    ):
        with pytest.raises(UserError, match=sentence):
            Arrays(train=given, test=given, num_clients=2).setup()
    monkeypatch.setattr(arrays, "MOST_DENSE_BYTES", 6 * 2 * 8 - 1)
    sparse = csr_matrix(np.eye(6, 2))
    with pytest.raises(
        UserError, match=r"x of train is a sparse matrix \(6, 2\), which would take 0 GiB with its zeros: wrap"
    ):
        Arrays(train=(sparse, y), test=(sparse, y), num_clients=2).setup()
