"""Test columns of Hugging Face data sets: test labels by name, missing values, and what a tokenizer may return."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fl.data import ByGroup, HuggingFace
from lightning_fl.errors import UserError

datasets = pytest.importorskip("datasets", reason="needs the extra hf: pip install -e '.[hf]'")
Array2D, ClassLabel, List, Value = datasets.Array2D, datasets.ClassLabel, datasets.List, datasets.Value
TEXT, WHOLE, REAL = Value("string"), Value("int64"), Value("float32")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def column_set(values: list, kind: Any, name: str = "y") -> Any:
    """Return a data set with a column of values beside numbers in `x`."""
    other = {} if name == "x" else {"x": [float(row) for row in range(len(values))]}
    features = {**({} if name == "x" else {"x": REAL}), name: kind}
    return datasets.Dataset.from_dict({**other, name: values}, features=datasets.Features(features))


def set_up(path: Path, **options: Any) -> HuggingFace:
    data = HuggingFace(str(path), **{"input": "x", "target": "y", "num_clients": 1, **options})
    data.setup()
    return data


def labels_of(folder: Path, train: Any, test: Any) -> tuple[int | None, list[int], list[int]]:
    """Return the number of classes, and the labels of training and test sets that are saved on their own."""
    train.save_to_disk(folder / "train")
    test.save_to_disk(folder / "test")
    data = set_up(folder / "train", test_split=str(folder / "test"))
    targets = [batch[1] for part in (data.train, data.test) for batch in part.batches(9)]
    assert targets[1].tolist() == data.test.labels.tolist()
    return data.num_classes, data.train.labels.tolist(), data.test.labels.tolist()


AB, BA, ABC = (ClassLabel(names=list(names)) for names in ("ab", "ba", "cab"))


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (([0, 1, 0], AB), ([0, 1, 0, 0], BA)),
        (([0, 1, 0], AB), ([2, 1, 2, 2], ABC)),  # the class c has no test sample
        (([0, 1, 0], AB), (["b", "a", "b", "b"], TEXT)),
        ((["a", "b", "a"], TEXT), (["b", "a", "b", "b"], TEXT)),
        ((["a", "b", "a"], TEXT), ([0, 1, 0, 0], BA)),
        (([0, 1, 0], AB), ([1, 0, 1, 1], WHOLE)),  # as `datasets` writes class labels to CSV
        (([0, 1, 0], WHOLE), ([1, 0, 1, 1], AB)),
        (([0, 1, 0], WHOLE), ([1, 0, 1, 1], WHOLE)),
    ],
)
def test_test_labels_are_those_of_the_training_set_by_name(tmp_path: Path, train: tuple, test: tuple) -> None:
    assert labels_of(tmp_path, column_set(*train), column_set(*test)) == (2, [0, 1, 0], [1, 0, 1, 1])


@pytest.mark.parametrize("transform", [None, float], ids=["in memory", "row by row"])
def test_whole_numbers_too_large_for_classes_are_quantities(
    transform: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = [12, 350_000_000, 7]
    column_set(values, WHOLE).save_to_disk(tmp_path / "train")
    with caplog.at_level("INFO"):
        data = set_up(tmp_path / "train", transform=transform)
    assert "taken for quantities; make the column 'y' class labels or text if they are classes." in caplog.text
    assert data.num_classes is data.train.labels is data.server_histogram is None
    ((_, targets),) = data.train.batches(9)
    assert targets.tolist() == values


def test_classes_without_a_training_sample_are_classes(tmp_path: Path) -> None:
    assert labels_of(tmp_path, column_set([1, 2], ABC), column_set(["c", "a"], TEXT)) == (3, [1, 2], [0, 1])


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            (["a", "b"], TEXT),
            (["a", "bb"], TEXT),
            "'y' of TEST has the label 'bb', which is no class of .*train; did you mean 'b'",
        ),
        (([0, 1], AB), (["a", "c"], TEXT), "'y' of TEST has the label 'c', which is no class of .*; allowed: a, b"),
        (([0, 1], AB), ([1, 0], ABC), "'y' of TEST has the label 'c', which is no class"),
        ((["a", "b"], TEXT), ([1, 0], ABC), "'y' of TEST has the label 'c', which is no class"),
        (([0, 1], AB), ([0, -1], BA), "'y' of TEST has the label -1, which is no class"),
        (([0, 1], AB), ([0, -1], AB), "'y' of TEST has the label -1, which is no class"),
        (([0, 1], AB), ([0, 7], WHOLE), "labels of the test set go from 0 to 7, but num_classes=2 allows 0 to 1"),
        ((["a", "b"], TEXT), ([0, 1], WHOLE), "'y' has text in .*train but whole numbers in TEST: give both one kind"),
        (([0, 1], WHOLE), (["0", "1"], TEXT), "'y' has whole numbers in .*train but text in TEST"),
        (([0, 1], AB), ([0.0, 1.0], REAL), "'y' has class labels in .*train but real numbers in TEST"),
        (([0, 1], WHOLE), ([0.0, 1.0], REAL), "'y' has whole numbers in .*train but real numbers in TEST"),
        (([0.5, 1], REAL), (["a", "b"], TEXT), "'y' has real numbers in .*train but text in TEST"),
        (([0, 1], WHOLE), ([[0], [1]], List(WHOLE)), "'y' has whole numbers in .*train but lists in TEST"),
    ],
)
def test_test_labels_of_no_training_class_are_refused(tmp_path: Path, train: tuple, test: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("TEST", str(tmp_path / "test"))):
        labels_of(tmp_path, column_set(*train), column_set(*test))


def test_numbers_that_happen_to_be_whole_are_no_classes_of_test_data(tmp_path: Path) -> None:
    column_set([0.5, 1.5], REAL).save_to_disk(tmp_path / "train")
    column_set([1, 2], WHOLE).save_to_disk(tmp_path / "test")
    data = set_up(tmp_path / "train", test_split=str(tmp_path / "test"))
    assert (data.num_classes, data.train.labels) == (None, None)


def test_a_split_of_the_same_folder_is_named_by_its_split(tmp_path: Path) -> None:
    splits = {"train": column_set([0, 1], AB), "test": column_set([1, 0], ABC)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "all")
    with pytest.raises(UserError, match=r"'y' of split 'test' of .*all has the label 'c'"):
        set_up(tmp_path / "all", test_split="test")


@pytest.mark.long
def test_a_saved_split_test_is_found_unless_another_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test").mkdir()  # is not the split
    splits = {name: column_set([0, 1] * number, AB) for number, name in enumerate(("train", "test", "more"), 1)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "all")
    datasets.DatasetDict(train=splits["train"]).save_to_disk(tmp_path / "alone")
    assert len(set_up(tmp_path / "all").test) == 4
    assert len(set_up(tmp_path / "all", test_split="more").test) == 6
    assert set_up(tmp_path / "all", split="test").test is None
    assert set_up(tmp_path / "alone").test is None


@pytest.mark.parametrize("target", ["y", None])
@pytest.mark.parametrize(
    ("empty", "message"),
    [("train", "all has no training samples"), ("test", "split 'test' of .*all has no test samples")],
)
def test_a_split_without_samples_is_refused(tmp_path: Path, empty: str, message: str, target: str | None) -> None:
    splits = {name: column_set([0, 1], WHOLE) for name in ("train", "test")}
    splits[empty] = splits[empty].filter(lambda row: False)
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "all")
    with pytest.raises(UserError, match=f"{message}: give at least one"):
        set_up(tmp_path / "all", target=target)


def test_a_column_that_only_the_test_file_lacks_is_reported_with_the_test_file(tmp_path: Path) -> None:
    column_set([0, 1], WHOLE).save_to_disk(tmp_path / "train")
    column_set([0, 1], WHOLE, "yy").save_to_disk(tmp_path / "test")
    with pytest.raises(UserError, match=f"target='y' is no column of {tmp_path / 'test'}; did you mean 'yy'"):
        set_up(tmp_path / "train", test_split=str(tmp_path / "test"))


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("bad.csv", "x,y\n1,2\n1,2,3,4\n", "Expected 2 fields in line 3, saw 4"),
        ("bad.jsonl", '{"x": 1}\n{"x": \n', "JSON parse error: Invalid value. in row 1"),
        ("empty.csv", "", "No columns to parse from file"),
    ],
)
def test_a_malformed_file_is_refused_with_the_cause(tmp_path: Path, name: str, content: str, cause: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"datasets cannot read '.*{name}' .*{cause}") as caught:
        set_up(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, None, 2.0, None], REAL),
        (["a", None, "b", None], TEXT),
        ([[1.0, 2.0], [None, 2.0], [1.0, 2.0], [None, None]], List(REAL)),
        ([[1, 2], [1, None], [1, 2], [None, 2]], List(WHOLE)),
        ([[1, 2], None, [1, None], [1, 2]], List(WHOLE)),
        ([[1, 2], [1, None], [1, 2], [None, None]], List(WHOLE, length=2)),
        ([[[1.0], [2.0]], [[1.0], [None]], [[3.0], [4.0]], [[1.0], None]], List(List(REAL))),
        ([[[1.0, 2.0]], [[None, 2.0]], [[3.0, 4.0]], [[None, 1.0]]], Array2D((1, 2), "float32")),
    ],
)
def test_rows_without_a_value_are_refused(tmp_path: Path, values: list, kind: Any) -> None:
    column_set(values, kind, "x").save_to_disk(tmp_path / "a")
    message = (
        f"column 'x' of {tmp_path / 'a'} lacks a value in 2 of 4 rows, the first of which is row 1, counted from 0"
    )
    with pytest.raises(UserError, match=message):
        set_up(tmp_path / "a", target=None)


def test_rows_without_a_value_are_counted_over_files_and_splits(tmp_path: Path) -> None:
    parts = [column_set(values, List(REAL), "x") for values in ([[1.0], [2.0]], [[3.0], [None]], [[None], [5.0]])]
    whole = datasets.concatenate_datasets(parts)
    datasets.DatasetDict(train=parts[0], test=whole).save_to_disk(tmp_path / "all")
    message = "'x' of split 'test' of .*all lacks a value in 2 of 6 rows, the first of which is row 3"
    with pytest.raises(UserError, match=message):
        set_up(tmp_path / "all", target=None, test_split="test")
    datasets.DatasetDict(train=whole.select([3, 0, 4])).save_to_disk(tmp_path / "some")
    with pytest.raises(UserError, match=r"'x' of .*some lacks a value in 2 of 3 rows, the first of which is row 0"):
        set_up(tmp_path / "some", target=None)


def test_not_a_number_is_a_value(tmp_path: Path) -> None:
    column_set([[1.0, float("nan")], [2.0, 3.0]], List(REAL), "x").save_to_disk(tmp_path / "a")
    (inputs,) = set_up(tmp_path / "a", target=None).train.batches(2)
    assert torch.isnan(inputs).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("tokenizer", "shown"),
    [
        (lambda texts: texts, "'abc' for text 0"),
        (lambda texts: [list(text) for text in texts], r"\['a', 'b', 'c'\] for text 0"),
        (lambda texts: [[1], [1.5]], r"\[1.5\] for text 1"),
        (lambda texts: torch.ones(2, 3), r"tensor\(\[1., 1., 1.\]\) for text 0"),
        (lambda texts: [[1, None], [2]], r"\[1, None\] for text 0"),
        (lambda texts: [[True], [1]], r"\[True\] for text 0"),
        (lambda texts: [[[1]], [[2]]], r"\[\[1\]\] for text 0"),
        (lambda texts: [[[1], [1, 2]], [2]], r"\[\[1\], \[1, 2\]\] for text 0"),
        (lambda texts: [1, 2], "1 for text 0"),
        (lambda texts: [[2**70], [1]], r"\[1180591620717411303424\] for text 0"),
        (lambda texts: None, "got None"),
        (lambda texts: 3, "got 3"),
        (lambda texts: {"ids": [[1], [2]]}, r"got \{'ids': "),
        (lambda texts: {"input_ids": None}, r"got \{'input_ids': None\}"),
    ],
)
def test_a_tokenizer_that_returns_no_whole_numbers_is_refused(
    tmp_path: Path, tokenizer: Callable[[list[str]], Any], shown: str
) -> None:
    column_set(["abc", "de"], TEXT, "x").save_to_disk(tmp_path / "a")
    with pytest.raises(UserError, match="tokenizer must return a list of whole numbers for each text.* " + shown):
        set_up(tmp_path / "a", target=None, tokenizer=tokenizer, length=3)


@pytest.mark.parametrize(
    "tokenizer",
    [
        lambda texts: [[1, 2, 3, 4], []],
        lambda texts: [torch.tensor([1, 2, 3]), torch.tensor([])],
        lambda texts: np.array([[1, 2, 3], [0, 0, 0]], dtype=np.uint16),
        lambda texts: {"input_ids": torch.tensor([[1, 2, 3], [0, 0, 0]])},
    ],
)
def test_a_tokenizer_may_return_lists_arrays_and_tensors(tmp_path: Path, tokenizer: Callable[[list[str]], Any]) -> None:
    column_set(["abc", "de"], TEXT, "x").save_to_disk(tmp_path / "a")
    (tokens,) = set_up(tmp_path / "a", target=None, tokenizer=tokenizer, length=3).train.batches(2)
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 0]]


def test_a_stray_whole_number_is_said(tmp_path: Path) -> None:
    column_set([0, 1, 0, 77], WHOLE).save_to_disk(tmp_path / "train")
    with pytest.warns(UserWarning, match="the largest label is 77, but only 3 different .*: correct the column 'y' if"):
        assert set_up(tmp_path / "train").num_classes == 78


@pytest.mark.long
def test_names_that_pandas_takes_for_missing_are_texts_in_csv(tmp_path: Path) -> None:
    """`NA` is the country Namibia, and missing only in a column of numbers; an empty text is missing in both."""
    (tmp_path / "a.csv").write_text("g,x,y\nNA,1.5,NA\nNone,2.5,None\nnull,3.5,b\nNA,4.5,nan\n")
    data = set_up(tmp_path / "a.csv", groups="g", partition=ByGroup(), num_clients=None)
    assert data.client_names.tolist() == ["NA", "None", "null"]
    assert data.client_sizes.tolist() == [2, 1, 1]
    assert data.train.labels.tolist() == [0, 1, 2, 3]  # NA, None, b, nan
    ((x, _),) = data.train.batches(9)
    assert x.tolist() == [1.5, 2.5, 3.5, 4.5]
    (tmp_path / "b.csv").write_text("x,y\n1.5,NA\nNA,b\n")
    with pytest.raises(UserError, match=r"column 'x' of .* lacks a value in 1 of 2 rows, the first of which is row 1"):
        set_up(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text("x,y\n1.5,NA\n2.5,\n")
    with pytest.raises(UserError, match=r"column 'y' of .* lacks a value in 1 of 2 rows, the first of which is row 1"):
        set_up(tmp_path / "c.csv")


def test_a_column_of_lists_names_no_groups(tmp_path: Path) -> None:
    column_set([[1], [2, 3]], List(WHOLE), "users").save_to_disk(tmp_path / "train")
    with pytest.raises(UserError, match="groups='users' is no column of the data with a name per sample"):
        set_up(tmp_path / "train", target="x", groups="users", partition=ByGroup(), num_clients=None)
    with pytest.raises(UserError, match="needs the group of each sample, but the data have none"):
        set_up(tmp_path / "train", target="x", partition=ByGroup(), num_clients=None)
