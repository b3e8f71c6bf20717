"""Test data sets of the library `datasets`: copies in all formats agree, columns, and what is refused."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import lightning_fl.data.datasets.huggingface as huggingface
from lightning_fl.data import ByGroup, DatasetSamples, Federated, HuggingFace, Leaf, Shards, TensorSamples
from lightning_fl.data.samples.evaluation_pipeline import with_transforms_of
from lightning_fl.errors import UserError


def test_without_the_package_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package datasets, .*: pip install 'lightning-fl\[hf\]'"):
        HuggingFace("anything")


HAS_DATASETS = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not HAS_DATASETS, reason="needs the package datasets")
if HAS_DATASETS:
    import datasets
    from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
    from datasets import Image as ImageColumn

WRITERS = ["f2", "f0", "f1", "f0", "f2", "f0"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_DATASETS:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def digits(count: int = 6, seed: int = 0, size: int = 28) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, size, size), dtype=np.uint8))


def image_set(count: int = 6, seed: int = 0) -> "Dataset":
    columns = {
        "image": [Image.fromarray(pixels) for pixels in digits(count, seed)],
        "label": [index % 3 for index in range(count)],
        "writer_id": (WRITERS * 2)[:count],
    }
    names = Features({"image": ImageColumn(), "label": ClassLabel(names=list("abcd")), "writer_id": Value("string")})
    return Dataset.from_dict(columns, features=names)


def number_set() -> "Dataset":
    x = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32).tolist()
    columns = {"x": x, "y": ["no", "yes", "no", "maybe", "no", "yes"], "writer_id": WRITERS}
    return Dataset.from_dict(
        columns, features=Features({"x": List(Value("float32")), "y": Value("string"), "writer_id": Value("string")})
    )


def set_up(*arguments, **options) -> HuggingFace:
    data = HuggingFace(*arguments, **{"num_clients": 2, **options})
    data.setup()
    return data


def everything(data: HuggingFace) -> list[torch.Tensor]:
    parts = [part for part in (data.train, data.test) if part is not None]
    return [tensor for part in parts for batch in part.batches(100) for tensor in batch]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.long
@needs_datasets
def test_copies_of_images_agree_and_writers_are_clients(tmp_path: Path) -> None:
    train, test = image_set(), image_set(5, seed=1)
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "dict")
    train.save_to_disk(tmp_path / "train")
    test.save_to_disk(tmp_path / "test")
    train.to_parquet(tmp_path / "train.parquet")
    test.to_parquet(tmp_path / "test.parquet")
    arrow, arrow_test = (next((tmp_path / part).glob("*.arrow")) for part in ("train", "test"))
    by_writer = {"partition": ByGroup(), "num_clients": None, "groups": "writer_id"}
    first = set_up(str(tmp_path / "dict"), test_split="test", **by_writer)
    assert isinstance(first.train, TensorSamples)
    images, labels = everything(first)[:2]
    assert torch.equal(images, torch.from_numpy(np.stack(digits())).unsqueeze(1).float() / 255)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert (first.num_classes, first.in_channels, first.image_size) == (4, 1, 28)
    assert first.client_names.tolist() == ["f0", "f1", "f2"]
    assert [sorted(part.tolist()) for part in first.client_indices] == [[1, 3, 5], [2], [0, 4]]
    assert [part.tolist() for part in first.client_test_indices] == [[1, 3], [2], [0, 4]]
    for path, test_split in (
        (tmp_path / "train", tmp_path / "test"),
        (tmp_path / "train.parquet", tmp_path / "test.parquet"),
        (arrow, arrow_test),
    ):
        other = set_up(str(path), test_split=str(test_split), **by_writer)
        assert equal(everything(other), everything(first)), path
        assert other.client_names.tolist() == first.client_names.tolist()
        assert all(np.array_equal(a, b) for a, b in zip(other.client_indices, first.client_indices, strict=True))


@pytest.mark.long
@needs_datasets
def test_copies_of_numbers_agree_in_json_and_csv_too(tmp_path: Path) -> None:
    train = number_set()
    train.save_to_disk(tmp_path / "saved")
    train.to_parquet(tmp_path / "data.parquet")
    train.to_json(tmp_path / "data.jsonl")
    train.to_json(tmp_path / "data.json")
    options = {"input": "x", "target": "y", "groups": "writer_id", "partition": ByGroup()}
    first = set_up(str(tmp_path / "saved"), **options)
    x, y = everything(first)
    assert np.array_equal(x.numpy(), np.array(train["x"][:], dtype=np.float32))
    assert y.tolist() == [1, 2, 1, 0, 1, 2]  # maybe, no, yes
    assert (first.num_classes, first.in_channels, first.image_size, first.test) == (3, None, None, None)
    for name in ("data.parquet", "data.jsonl", "data.json"):
        assert equal(everything(set_up(str(tmp_path / name), **options)), everything(first)), name
    flat = train.remove_columns("x").add_column("z", [0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
    flat.to_csv(tmp_path / "data.csv")
    data = set_up(str(tmp_path / "data.csv"), input="z", target="y", groups="writer_id", partition=ByGroup())
    assert data.client_names.tolist() == first.client_names.tolist()
    assert everything(data)[0].tolist() == [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(UserError, match=r"HuggingFace has no test data"):
        data.val_dataloader()


@needs_datasets
def test_groups_of_missing_or_unknown_columns_are_refused(tmp_path: Path) -> None:
    number_set().save_to_disk(tmp_path / "saved")
    options = {"input": "x", "target": "y", "partition": ByGroup()}
    with pytest.raises(UserError, match=r"groups='writer' is no column .* did you mean 'writer_id'"):
        set_up(str(tmp_path / "saved"), groups="writer", **options)
    broken = number_set().remove_columns("writer_id").add_column("writer_id", ["a", "b", None, "a", "b", "a"])
    broken.save_to_disk(tmp_path / "broken")
    with pytest.raises(UserError, match="no name for 1 of 6 samples, the first of which is sample 2"):
        set_up(str(tmp_path / "broken"), groups="writer_id", **options)


@needs_datasets
def test_test_data_without_the_column_of_users_are_common_to_all(tmp_path: Path) -> None:
    DatasetDict(train=image_set(), test=image_set(5).remove_columns("writer_id")).save_to_disk(tmp_path / "saved")
    data = set_up(str(tmp_path / "saved"), test_split="test", groups="writer_id", partition=ByGroup())
    assert (len(data.test), len(data.client_test_indices)) == (5, 0)


@needs_datasets
def test_targets_may_be_numbers_or_missing(tmp_path: Path) -> None:
    columns = {"x": [[1, 2], [3, 4]], "age": [1.5, 2.5], "next": [[2, 3], [4, 5]]}
    Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    data = set_up(str(tmp_path / "saved"), input="x", target="age")
    assert (data.num_classes, data.train.labels) == (None, None)
    assert [tensor.dtype for tensor in everything(data)] == [torch.int64, torch.float32]
    data = set_up(str(tmp_path / "saved"), input="x", target="next")
    assert everything(data)[1].tolist() == [[2, 3], [4, 5]]
    data = set_up(str(tmp_path / "saved"), input="x", target=None)
    assert torch.equal(next(data.train.batches(2)), torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(UserError, match="needs the class of each sample"):
        set_up(str(tmp_path / "saved"), input="x", target="age", partition=Shards())


@needs_datasets
def test_text_goes_through_a_tokenizer(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["abc", "", "abcdef"], "y": [0, 1, 0]}).save_to_disk(tmp_path / "saved")

    def tokenizer(texts: list[str]) -> list[list[int]]:
        return [[ord(letter) - 96 for letter in text] for text in texts]

    for given in (tokenizer, lambda texts: {"input_ids": tokenizer(texts)}):
        data = set_up(str(tmp_path / "saved"), input="text", target="y", tokenizer=given, length=4)
        assert everything(data)[0].tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [1, 2, 3, 4]]
    with pytest.raises(UserError, match="input='text' is a column of text: give a tokenizer"):
        set_up(str(tmp_path / "saved"), input="text", target="y")
    with pytest.raises(UserError, match="returned 1 rows of tokens for 3 texts"):
        set_up(str(tmp_path / "saved"), input="text", target="y", tokenizer=lambda texts: [[1]])


@needs_datasets
def test_a_transform_reads_images_in_every_pass_and_large_ones_stay_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_set().save_to_disk(tmp_path / "saved")
    whole = set_up(str(tmp_path / "saved"))
    data = set_up(str(tmp_path / "saved"), transform=lambda image: torch.tensor(image.size))
    assert isinstance(data.train, DatasetSamples)
    assert everything(data)[0].tolist() == [[28, 28]] * 6
    monkeypatch.setattr(huggingface, "MOST_BYTES", 6 * 28 * 28 - 1)
    large = set_up(str(tmp_path / "saved"))
    assert isinstance(large.train, DatasetSamples)
    assert equal(everything(large), everything(whole))


@needs_datasets
def test_colour_images_have_three_channels_and_other_sizes_are_refused(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)
    Dataset.from_dict({"image": [Image.fromarray(p) for p in pixels], "label": [0, 1]}).save_to_disk(
        tmp_path / "colour"
    )
    data = set_up(str(tmp_path / "colour"))
    assert (data.in_channels, data.image_size) == (3, None)
    assert torch.equal(everything(data)[0], torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    mixed = [Image.fromarray(p) for p in (*digits(1), *digits(1, size=30))]
    Dataset.from_dict({"image": mixed, "label": [0, 1]}).save_to_disk(tmp_path / "mixed")
    with pytest.raises(UserError, match="image 1 in column 'image' is 1×30×30, but the first one is 1×28×28"):
        set_up(str(tmp_path / "mixed"))


@needs_datasets
@pytest.mark.parametrize("most_bytes", [2**32, 0], ids=["decoded once", "read in each pass"])
def test_images_without_8_bits_per_channel_are_named(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "MOST_BYTES", most_bytes)
    deep = [Image.fromarray(digits(1)[0]), Image.fromarray(np.full((28, 28), 20_000, dtype=np.uint16))]
    Dataset.from_dict({"image": deep, "label": [0, 1]}).save_to_disk(tmp_path / "deep")
    with pytest.raises(
        UserError, match=r"image 1 in column 'image' of .*deep has pixels of 16 .*, or give a transform"
    ):
        everything(set_up(str(tmp_path / "deep")))
    names = Features({"image": ImageColumn(), "label": Value("int64")})
    Dataset.from_dict({"image": [deep[0], None], "label": [0, 1]}, features=names).save_to_disk(tmp_path / "gap")
    with pytest.raises(UserError, match=r"image 1 in column 'image' of .*gap is missing: leave this row out"):
        everything(set_up(str(tmp_path / "gap")))
    Dataset.from_dict({"image": deep[:1] * 2, "label": [0, 1]}).save_to_disk(tmp_path / "large")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(UserError, match=r"image 0 in column 'image' of .*large is not readable \(Image size"):
        everything(set_up(str(tmp_path / "large")))


@needs_datasets
def test_without_test_data_the_sentence_names_their_split(tmp_path: Path) -> None:
    DatasetDict(train=image_set(), held_out=image_set()).save_to_disk(tmp_path / "dict")
    with pytest.raises(UserError, match=r"no test data: name their split, .*\(--data.test_split test\), or set val_fr"):
        set_up(str(tmp_path / "dict")).val_dataloader()


@pytest.mark.long
@needs_datasets
def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    image_set().save_to_disk(tmp_path / "saved")
    DatasetDict(train=image_set()).save_to_disk(tmp_path / "dict")
    (tmp_path / "data.txt").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    for arguments, message in (
        ({"path": tmp_path / "nowhere"}, "There is no folder or file .*nowhere"),
        ({"path": tmp_path / "data.txt"}, r"has the suffix '.txt'; allowed: .arrow, .parquet"),
        ({"path": tmp_path / "bad.parquet"}, r"datasets cannot read '.*bad.parquet' \("),
        ({"path": tmp_path / "dict", "test_split": "tset"}, "has no split 'tset'; allowed: train"),
        ({"path": tmp_path / "saved", "split": "validation"}, "has no splits, so split='validation' is none of them"),
        ({"path": tmp_path / "saved", "test_split": "test"}, "has no splits, so split='test' is none of them"),
        ({"path": tmp_path / "saved", "input": "img"}, "input='img' is no column of .*; did you mean 'image'"),
        ({"path": tmp_path / "saved", "target": "labels"}, "target='labels' is no column of .*; did you mean 'label'"),
        ({"path": tmp_path / "saved", "length": 0}, "length must be a whole number of at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            set_up(**{**arguments, "path": str(arguments["path"])})


@needs_datasets
def test_a_hugging_face_dataset_of_a_datamodule_has_its_columns_as_groups() -> None:
    class Module(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(number_set().with_format("torch"), batch_size=2, shuffle=True)

    data = Federated(Module(), None, ByGroup(), groups="writer_id")
    data.setup("fit")
    assert data.client_names.tolist() == ["f0", "f1", "f2"]
    assert [sorted(part.tolist()) for part in data.client_indices] == [[1, 3, 5], [2], [0, 4]]


@needs_datasets
def test_a_validation_split_with_further_columns_shows_the_format_of_those_that_training_has() -> None:
    train = number_set().with_format("torch")
    further = number_set().add_column("q", [0] * len(train)).with_format("numpy", columns=["y", "q"])
    shown = with_transforms_of(train, further)
    assert shown.format["type"] == "numpy"
    assert shown.format["columns"] == ["y"]


@pytest.mark.process
@needs_datasets
def test_leaf_files_and_a_saved_copy_give_equal_runs(tmp_path: Path) -> None:
    """Train both from the command line: users are clients, and the server's model is the same bit for bit."""
    saved, folders = {}, {}
    for part, count, seed in (("train", 12, 0), ("test", 6, 1)):
        pixels, writers = digits(count, seed), (WRITERS * 2)[:count]
        labels = np.random.default_rng(seed).integers(0, 62, count).tolist()
        data = {user: {"x": [], "y": []} for user in dict.fromkeys(writers)}
        for image, label, user in zip(pixels, labels, writers, strict=True):
            data[user]["x"].append((image.flatten() / 255).tolist())
            data[user]["y"].append(label)
        folders[part] = tmp_path / "leaf" / part
        folders[part].mkdir(parents=True)
        content = {"users": list(data), "num_samples": [len(x["y"]) for x in data.values()], "user_data": data}
        (folders[part] / "all.json").write_text(json.dumps(content))
        order = [index for user in data for index, name in enumerate(writers) if name == user]
        columns = {
            "image": [Image.fromarray(pixels[index]) for index in order],
            "character": [labels[index] for index in order],
            "writer_id": [writers[index] for index in order],
        }
        types = {"image": ImageColumn(), "character": ClassLabel(num_classes=62), "writer_id": Value("string")}
        saved[part] = Dataset.from_dict(columns, features=Features(types))
    DatasetDict(saved).save_to_disk(tmp_path / "saved")
    leaf = ["--data", "Leaf", "--data.train", str(folders["train"]), "--data.test", str(folders["test"])]
    copy = ["--data", "HuggingFace", "--data.path", str(tmp_path / "saved"), "--data.test_split", "test"]
    copy += [
        "--data.target",
        "character",
        "--data.groups",
        "writer_id",
        "--data.partition",
        "ByGroup",
        "--data.num_clients",
        "null",
    ]
    curves = []
    for name, flags in (("a", leaf), ("b", copy)):
        command = [sys.executable, "-c", "from lightning_fl.cli import main; main()", "fit"]
        command += ["--model", "ImageClassifier", "--model.network", "linear"]
        command += [*flags, "--data.batch_size", "2", "--trainer.max_rounds", "2", "--trainer.clients_per_round", "2"]
        command += ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "3 clients by ByGroup" in done.stderr + done.stdout
        checkpoint = torch.load(tmp_path / name / "model.ckpt", weights_only=True)
        curves.append(list(checkpoint["state_dict"].values()))
    assert equal(*curves)
    own = Leaf(str(folders["train"]), str(folders["test"]))
    own.setup()
    assert own.client_names.tolist() == ["f0", "f1", "f2"]


def test_a_script_beside_the_data_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError):
        HuggingFace(str(folder), num_clients=1).setup("fit")
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
@needs_datasets
@pytest.mark.parametrize("given", ["test_transform", "a test split", "nothing"])
def test_held_out_images_are_read_as_test_images(given: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The training transform makes every pixel 7; the test transform makes it 5."""
    saved = {"train": image_set(12)} | ({"test": image_set(3)} if given == "a test split" else {})
    DatasetDict(saved).save_to_disk(tmp_path / "saved")

    def constant(number: float) -> Any:
        return lambda image: torch.full((1, 28, 28), number)

    options = {"test_transform": constant(5.0)} if given == "test_transform" else {}
    data = set_up(str(tmp_path / "saved"), transform=constant(7.0), val_fraction=0.5, **options)
    held_out = torch.cat([x for x, _ in data.val_dataloader()])
    assert len(held_out) == 6
    assert {x.unique().item() for x, _ in data.client(0).batches(1, torch.Generator())} == {7.0}
    said = [str(one.message) for one in recwarn if "held-out samples" in str(one.message)]
    if given == "a test split":
        stored = np.stack(digits(12)).astype(np.float32) / 255
        wanted = torch.from_numpy(stored[data.client_val_indices.joined]).unsqueeze(1)
        torch.testing.assert_close(held_out, wanted)
    else:
        assert held_out.unique().item() == (5.0 if given == "test_transform" else 7.0)
    assert len(said) == (given == "nothing")
    assert all("through the transform: give test_transform if" in one for one in said)


@needs_datasets
def test_held_out_samples_of_a_wrapped_data_set_have_the_transform_of_validation(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def constant(number: float) -> Any:
        return lambda rows: {"x": [torch.full((2,), number) for _ in rows["x"]], "y": rows["y"]}

    def held_out(train: "Dataset", shown: "Dataset | None", **options: Any) -> Any:
        class Loaders(L.LightningDataModule):
            def train_dataloader(self) -> DataLoader:
                return DataLoader(train, batch_size=2)

            def val_dataloader(self) -> DataLoader:
                return DataLoader(shown, batch_size=2) if shown is not None else []  # type: ignore[arg-type, return-value]

        data = Federated(Loaders(), num_clients=2, val_fraction=0.5, **options)
        data.setup("fit")
        assert {
            value.item() for batch in data.client(0).batches(2, torch.Generator()) for value in batch["x"][:, 0]
        } == {7}
        return {value.item() for batch in data.val_dataloader() for value in batch["x"][:, 0]}

    table = number_set()
    train = table.with_transform(constant(7.0))
    assert held_out(train, table.with_transform(constant(5.0))) == {5}
    assert held_out(train, train) == {7}
    assert held_out(train, None, eval_transform=constant(3.0)) == {3}
    assert not [one for one in recwarn if "held-out samples" in str(one.message)]
    with pytest.warns(UserWarning, match="through the transform of Dataset: give eval_transform if"):
        assert held_out(train, None) == {7}
