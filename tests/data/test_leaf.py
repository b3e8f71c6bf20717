"""Test LEAF's JSON files: what is read, and which sentence a malformed file gives."""

import json
import os
import pickle
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fl import FederatedTrainer
from lightning_fl.data import ByGroup, Leaf
from lightning_fl.errors import UserError

PLAY = "to be, or not to be: that is the question: Whether 'tis nobler in the mind to suffer the slings"


def write(file: Path, samples: dict[str, tuple[list, list]], **changes) -> Path:
    """Write a file of LEAF; `changes` replace its entries."""
    content = {
        "users": list(samples),
        "num_samples": [len(x) for x, _ in samples.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in samples.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))
    return file.parent


def writer(count: int, seed: int = 0) -> tuple[list, list]:
    """Return `count` images of FEMNIST with classes."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 256, (count, 784)) / 255).tolist(), rng.integers(0, 62, count).tolist()


def role(count: int) -> tuple[list, list]:
    """Return `count` texts of Shakespeare with their next characters."""
    return [PLAY[place : place + 80] for place in range(count)], [PLAY[place + 80] for place in range(count)]


def test_femnist_makes_each_writer_of_all_files_a_client(tmp_path: Path) -> None:
    users = {"f0": writer(3, 0), "f1": writer(2, 1), "f2": writer(1, 2)}
    write(tmp_path / "train" / "b.json", {name: users[name] for name in ("f2", "f0")})
    write(tmp_path / "train" / "a.json", {"f1": users["f1"], "f9": ([], [])})
    write(tmp_path / "test" / "a.json", {"f1": writer(2, 5), "new": writer(1, 6)})
    data = Leaf(str(tmp_path / "train"), str(tmp_path / "test"), batch_size=3)
    assert (data.num_classes, data.in_channels, data.image_size) == (62, 1, 28)
    data.setup()
    assert data.client_names.tolist() == ["f0", "f1", "f2"]
    assert data.client_sizes.tolist() == [3, 2, 1]
    for k, name in enumerate(data.client_names):
        images, labels = next(data.client(k).batches(9))
        order = np.lexsort(images.flatten(1).numpy().T[:1])
        x, y = np.array(users[name][0]), np.array(users[name][1])
        own = np.argsort(x[:, 0].astype(np.float32), kind="stable")
        np.testing.assert_allclose(images[order].flatten(1).numpy(), x[own], atol=1e-7)
        assert labels[order].tolist() == y[own].tolist()
    assert [len(part) for part in data.client_test_indices] == [0, 2, 0]
    assert len(data.test) == 3


def test_one_file_values_between_the_levels_and_small_writers(tmp_path: Path) -> None:
    x, y = writer(3)
    x[0][5] = 0.123456
    write(tmp_path / "train.json", {"a": (x, y), "b": writer(1)})
    data = Leaf(str(tmp_path / "train.json"), str(tmp_path / "train.json"), partition=ByGroup(2), num_clients=1)
    data.setup()
    assert data.client_names.tolist() == ["a"]
    images = torch.cat([images for images, _ in data.train.batches(10)])
    np.testing.assert_allclose(images.flatten(1).numpy(), np.array(x + writer(1)[0]), atol=1e-7)


def test_shakespeare_is_numbers_of_characters_and_the_next_one(tmp_path: Path) -> None:
    write(tmp_path / "all.json", {"HAMLET": role(4), "OPHELIA": role(2)})
    data = Leaf(str(tmp_path), str(tmp_path), kind="shakespeare")
    assert (data.num_classes, data.in_channels, data.image_size) == (80, None, None)
    data.setup()
    assert data.client_names.tolist() == ["HAMLET", "OPHELIA"]
    texts, next_ones = next(data.test.batches(4))
    assert (texts.shape, texts.dtype) == ((4, 80), torch.int64)
    # language_utils.ALL_LETTERS of LEAF
    alphabet = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
    assert ["".join(alphabet[number] for number in text) for text in texts.tolist()] == role(4)[0]
    assert [alphabet[number] for number in next_ones.tolist()] == role(4)[1]


GOOD = writer(2)


@pytest.mark.parametrize(
    ("users", "changes", "message"),
    [
        ({"a": GOOD}, {"num_samples": [3]}, r"a\.json, user 'a': num_samples is 3, but x has 2 samples and y 2"),
        ({"a": (GOOD[0], [1])}, {}, r"user 'a': num_samples is 2, but x has 2 samples and y 1"),
        ({"a": GOOD}, {"num_samples": [2, 2]}, r"a\.json has 1 users but 2 num_samples"),
        ({"a": GOOD}, {"num_samples": None}, r"a\.json is no file of LEAF: it lacks a list 'num_samples'"),
        ({"a": GOOD}, {"user_data": []}, r"it lacks a mapping 'user_data'"),
        ({"a": GOOD}, {"users": ["a", "a"], "num_samples": [2, 2]}, "names a user twice"),
        ({"a": GOOD, "": GOOD}, {}, r"a\.json has a user whose name is empty"),
        (
            {"a": GOOD},
            {"users": [None]},
            r"a\.json has the user None in users: name every user by text or a whole number",
        ),
        ({"a": GOOD}, {"users": ["b"]}, "has user_data of 'a', which users does not name"),
        ({"a": GOOD}, {"users": ["a", "b"], "num_samples": [2, 2]}, "user 'b': user_data lacks the lists x and y"),
        ({"a": ([[0.0] * 783, [0.0] * 784], [0, 1])}, {}, "user 'a', sample 0: x must have 784 numbers .* got 783"),
        ({"a": ([[0.0] * 783 + ["1"]], [0])}, {}, "user 'a': x has a value that is no number"),
        ({"a": ([[0.0] * 783 + ["one"]], [0])}, {}, "user 'a': x has a value that is no number"),
        ({"a": ([[0.0] * 783 + [[]]], [0])}, {}, "user 'a': x has a value that is no number"),
        ({"a": ([[0.0] * 783 + [2.0]], [0])}, {}, r"user 'a': pixels must lie in \[0, 1\], but go from 0 to 2"),
        ({"a": (GOOD[0], [1, 62])}, {}, "user 'a', sample 1: y must be a whole number from 0 to 61, got 62"),
        ({"a": (GOOD[0], [1, "b"])}, {}, "sample 1: y must be a whole number .* got 'b'"),
    ],
)
def test_a_malformed_femnist_file_is_named_with_the_user(tmp_path: Path, users, changes, message) -> None:
    folder = write(tmp_path / "a.json", users, **changes)
    data = Leaf(str(folder), str(folder))
    with pytest.raises(UserError, match=message):
        data.setup()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ((["short"], ["a"]), "user 'R', sample 0: x must be text of 80 characters, got 'short'"),
        ((["a" * 80], ["ab"]), "sample 0: y must be text of 1 character, got 'ab'"),
        ((["a" * 79 + "ü"], ["a"]), r"x has \['ü'\], none of LEAF's 80 characters"),
        (([[1] * 80], ["a"]), "x must be text of 80 characters"),
    ],
)
def test_a_malformed_shakespeare_file_is_named_with_the_user(tmp_path: Path, samples, message: str) -> None:
    folder = write(tmp_path / "a.json", {"R": samples})
    with pytest.raises(UserError, match=message):
        Leaf(str(folder), str(folder), kind="shakespeare").setup()


def test_files_that_cannot_be_read_are_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"users": [],\n "num_samples": [}\n')
    with pytest.raises(UserError, match=r"bad\.json, line 2, is not JSON"):
        Leaf(str(tmp_path), str(tmp_path)).setup()
    for content in (100_000 * "[", '{"users": ' + 5_000 * "1" + "}"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=r"bad\.json is not JSON that can be read \(.*\)\.$"):
            Leaf(str(tmp_path), str(tmp_path)).setup()
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match=r"bad\.json is not readable"):
        Leaf(str(tmp_path), str(tmp_path)).setup()
    with pytest.raises(UserError, match=r"nowhere has no JSON files"):
        Leaf(str(tmp_path / "nowhere"), str(tmp_path)).setup()
    (tmp_path / "bad.json").unlink()
    write(tmp_path / "a.json", {"u": ([], [])})
    with pytest.raises(UserError, match="has no samples"):
        Leaf(str(tmp_path), str(tmp_path)).setup()
    with pytest.raises(UserError, match="kind 'femnits' is unknown; did you mean 'femnist'"):
        Leaf("a", "b", kind="femnits")


def test_a_user_in_two_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"u": GOOD})
    write(tmp_path / "b.json", {"u": GOOD})
    with pytest.raises(UserError, match=r"User 'u' is in .*a\.json and again in .*b\.json"):
        Leaf(str(tmp_path), str(tmp_path)).setup()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match=r"pipe\.json is no file"):
        Leaf(str(tmp_path), str(tmp_path)).setup()


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    marked = write(tmp_path / "a.json", {"a": writer(2), "b": writer(1)}) / "a.json"
    marked.write_text(marked.read_text(), encoding="utf-8-sig")
    assert marked.read_bytes().startswith(b"\xef\xbb\xbf")
    data = Leaf(str(marked), str(marked))
    data.setup()
    assert data.client_names.tolist() == ["a", "b"]


def task(count: int, seed: int, dimensions: int = 6) -> tuple[list, list]:
    """Return samples of a task of Synthetic with classes 0 to 4."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, dimensions)).tolist(), (np.arange(count) % 5).tolist()


def test_synthetic_makes_each_task_a_client(tmp_path: Path) -> None:
    tasks = {"0": task(3, 0), "1": task(5, 1)}
    train = write(tmp_path / "train" / "data.json", tasks)
    test = write(tmp_path / "test" / "data.json", {"1": task(6, 2)})
    data = Leaf(str(train), str(test), kind="synthetic")
    data.setup()
    assert (data.num_classes, data.in_channels, data.client_sizes.tolist()) == (5, None, [3, 5])
    for client, (x, y) in enumerate(tasks.values()):
        vectors, labels = next(data.client(client).batches(9))
        order = np.argsort(vectors[:, 0].numpy())
        expected = np.array(x, dtype=np.float32)
        own = np.argsort(expected[:, 0])
        assert (vectors[order].numpy() == expected[own]).all()
        assert labels[order].tolist() == np.array(y)[own].tolist()
    assert [len(part) for part in data.client_test_indices] == [0, 6]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (([[1.0, 2.0], [3.0]], [0, 1]), "user '1': x has samples of different lengths"),
        (([["a", "b"]], [0]), "user '1': x must have lists of finite numbers"),
        (([[1.0] * 6], [0.5]), "user '1', sample 0: y must be a whole number from 0 to 9,999, got 0.5"),
        (task(1, 0, dimensions=3), "user '1': x has samples of 3 numbers, and those of others have 6"),
    ],
)
def test_synthetic_samples_that_do_not_fit_are_refused(samples: tuple[list, list], said: str, tmp_path: Path) -> None:
    train = write(tmp_path / "train" / "data.json", {"0": task(3, 0), "1": samples})
    with pytest.raises(UserError, match=said):
        Leaf(str(train), str(train), kind="synthetic").setup()


def test_synthetic_test_samples_of_another_length_are_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train" / "data.json", {"0": task(3, 0)})
    test = write(tmp_path / "test" / "data.json", {"0": task(3, 0, dimensions=4)})
    with pytest.raises(UserError, match=r"have 6 numbers, and those in .*test 4\."):
        Leaf(str(train), str(test), kind="synthetic").setup()


WORDS = ["good", ",", "it's", "!", "Good", "morning"]


def written_words(folder: Path, content: Any = WORDS) -> str:
    """Write a vocabulary, and return its path."""
    (folder / "words.json").write_text(json.dumps(content))
    return str(folder / "words.json")


def tweet(text: Any) -> list:
    """Return a sample of Sent140, as LEAF's `data_to_json.py` writes it."""
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", "someone", text, "training"]


@pytest.mark.parametrize("content", [WORDS, {"vocab": WORDS, "emba": [[0.5]] * 7}], ids=["list", "embs.json"])
def test_sent140_is_numbers_of_words(tmp_path: Path, content: Any) -> None:
    texts = ["Good   morning, it's 9am #good!!", "", "good GOOD " * 20]
    numbers = [[4, 5, 1, 2, 6, 0, 3, 3], [], [0, 6] * 12 + [0]]
    train = write(tmp_path / "train" / "all.json", {"ann": ([tweet(text) for text in texts], [1, 0, 1])})
    data = Leaf(str(train), str(train), kind="sent140", vocabulary=written_words(tmp_path, content))
    data.setup()
    words, labels = next(data.test.batches(3))
    assert words.tolist() == [row + [6] * (25 - len(row)) for row in numbers]
    assert (words.dtype, labels.tolist(), data.num_classes) == (torch.int64, [1, 0, 1], 2)


@pytest.mark.parametrize(
    ("words", "x", "y", "said"),
    [
        (WORDS, tweet(3), 1, "user 'ann', sample 0: x must be a list of id, date, query, user and text, got "),
        (WORDS, "good", 1, "x must be a list of id, date, query, user and text, got 'good'"),
        (WORDS, tweet("good"), 4, "user 'ann', sample 0: y must be 0 or 1, got 4"),
        (["good", "good"], tweet("good"), 1, r"words\.json must have words, and each once"),
        ([], tweet("good"), 1, r"words\.json must have words, and each once"),
        ({"emba": []}, tweet("good"), 1, r"words\.json is no vocabulary: it must be a list of words, or an object"),
        (["good", 1], tweet("good"), 1, r"words\.json is no vocabulary"),
    ],
)
def test_malformed_tweets_and_vocabularies_are_named(words: Any, x: Any, y: Any, said: str, tmp_path: Path) -> None:
    train = write(tmp_path / "train" / "all.json", {"ann": ([x], [y])})
    with pytest.raises(UserError, match=said):
        Leaf(str(train), str(train), kind="sent140", vocabulary=written_words(tmp_path, words)).setup()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"kind": "sent140"},
            "kind 'sent140' needs a vocabulary: give a JSON file with a list of words, or LEAF's embs",
        ),
        ({"kind": "femnist", "vocabulary": "words.json"}, "kind 'femnist' has no vocabulary: leave it out"),
        ({"kind": "reddit"}, r"kind 'reddit' needs a vocabulary: .* reddit_vocab\.pck written as JSON"),
    ],
)
def test_kinds_and_vocabularies_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Leaf("train", "test", **given)


# As LEAF's build_vocab.py numbers them: a word more frequent than <PAD> shares the number of <UNK>.
TOKENS = {"<PAD>": 0, "<UNK>": 1, "the": 1, "<BOS>": 2, "<EOS>": 3, "cat": 5, "sat": 6, ".": 7}
VOCABULARY = {"vocab": TOKENS, "size": 12, "unk_symbol": 1, "pad_symbol": 0}
COMMENTS = {
    "ann": ["the cat sat .", "the dog sat on the big cat .", ""],
    "bob": ["the cat . " * 7],
}


def commenter(texts: list[str]) -> tuple[list, list]:
    """Return a user of Reddit, as LEAF's `preprocess.py` writes it."""
    x, y = [], []
    for text in texts:
        read, following = ["<BOS>", *text.split(), "<EOS>"], [*text.split(), "<EOS>", "<PAD>"]
        padding = ["<PAD>"] * (-len(read) % 10)
        counts = [1.0] * len(read) + [0.0] * len(padding)
        chunks = [
            [row[start : start + 10] for start in range(0, len(row), 10)]
            for row in (read + padding, following + padding, counts)
        ]
        x.append(chunks[0])
        y.append({"subreddit": "cats", "target_tokens": chunks[1], "count_tokens": chunks[2]})
    return x, y


def batch_of_leaf(user: tuple[list, list], vocabulary: dict[str, Any]) -> list[tuple]:
    """Return a user's sequences and targets, as `batch_data` of LEAF's `stacked_lstm.py` feeds them in one batch."""
    numbers = defaultdict(lambda: vocabulary["unk_symbol"], vocabulary["vocab"])
    read, following = [], []
    for comment, label in zip(*user, strict=True):
        read.extend(comment)
        following.extend(label["target_tokens"])
    return [
        (tuple(numbers[word] for word in row), tuple(numbers[word] for word in next_row))
        for row, next_row in zip(read, following, strict=True)
    ]


@pytest.mark.parametrize("content", [VOCABULARY, TOKENS], ids=["reddit_vocab.pck", "object"])
def test_reddit_is_sequences_of_tokens_and_the_next_ones_as_in_leaf(tmp_path: Path, content: Any) -> None:
    users = {name: commenter(texts) for name, texts in COMMENTS.items()}
    train = write(tmp_path / "train" / "a.json", users | {"eve": ([], [])}, num_samples=[5, 9, 1])
    test = write(tmp_path / "test" / "a.json", {"bob": users["bob"]}, num_samples=None)
    data = Leaf(str(train), str(test), kind="reddit", vocabulary=written_words(tmp_path, content))
    data.setup()
    assert (data.num_classes, data.has_classes, data.client_names.tolist()) == (None, False, ["ann", "bob"])
    for client, user in enumerate(users.values()):
        read, following = next(data.client(client).batches(99))
        assert (read.dtype, following.dtype, read.shape[1:], following.shape[1:]) == (torch.int64,) * 2 + ((10,),) * 2
        rows = zip(map(tuple, read.tolist()), map(tuple, following.tolist()), strict=True)
        assert sorted(rows) == sorted(batch_of_leaf(user, VOCABULARY))
    assert [len(part) for part in data.client_test_indices] == [0, 3]


class NextWord(LightningModule):
    """LSTM that predicts the next word; its loss leaves padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 12)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int = 0) -> torch.Tensor:
        tokens, targets = batch
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.long
def test_a_round_on_reddit_is_a_step_on_the_sequences_of_leaf(tmp_path: Path) -> None:
    user = commenter(COMMENTS["ann"])
    train = write(tmp_path / "train" / "a.json", {"ann": user})
    data = Leaf(
        str(train),
        str(train),
        kind="reddit",
        vocabulary=written_words(tmp_path, VOCABULARY),
        batch_size=len(user[0]) + 9,
    )
    module = NextWord()
    expected = deepcopy(module)
    trainer = FederatedTrainer(
        max_rounds=1, clients_per_round=1, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False
    )
    trainer.fit(module, data)
    read, following = map(torch.tensor, zip(*batch_of_leaf(user, VOCABULARY), strict=True))
    before = deepcopy(expected)
    optimizer = expected.configure_optimizers()
    expected.training_step([read, following]).backward()
    optimizer.step()
    for trained, stepped, first in zip(module.parameters(), expected.parameters(), before.parameters(), strict=True):
        assert not torch.equal(stepped, first)
        torch.testing.assert_close(trained, stepped, atol=1e-6, rtol=1e-5)


def test_a_list_numbers_the_tokens_of_reddit_by_their_places(tmp_path: Path) -> None:
    train = write(tmp_path / "train" / "a.json", {"ann": commenter(["the cat"])})
    words = ["<EOS>", "cat", "<UNK>", "<BOS>", "<PAD>"]
    data = Leaf(str(train), str(train), kind="reddit", vocabulary=written_words(tmp_path, {"vocab": words}))
    data.setup()
    read, following = next(data.test.batches(1))
    assert read.tolist() == [[3, 2, 1, 0] + [4] * 6]
    assert following.tolist() == [[2, 1, 0] + [4] * 7]


def test_a_pickled_vocabulary_is_refused_with_the_code_that_turns_it_into_json(tmp_path: Path) -> None:
    train = write(tmp_path / "train" / "a.json", {"ann": commenter(["the cat"])})
    (tmp_path / "reddit_vocab.pck").write_bytes(pickle.dumps(VOCABULARY))
    with pytest.raises(UserError, match=r"reddit_vocab\.pck is a pickle, which is not loaded") as refused:
        Leaf(str(train), str(train), kind="reddit", vocabulary=str(tmp_path / "reddit_vocab.pck")).setup()
    exec(str(refused.value).split("in Python: ")[1].rstrip("."))
    assert json.loads((tmp_path / "reddit_vocab.json").read_text()) == VOCABULARY
    Leaf(str(train), str(train), kind="reddit", vocabulary=str(tmp_path / "reddit_vocab.json")).setup()


ROW = ["the"] * 10
NEXT = {"target_tokens": [ROW]}


@pytest.mark.parametrize(
    ("words", "x", "y", "said"),
    [
        (
            TOKENS,
            [ROW[:9]],
            NEXT,
            r"all\.json, user 'ann', sample 0: x must be a list of lists of 10 tokens, got \[\[.*\]\]\.$",
        ),
        (TOKENS, ROW, NEXT, "sample 0: x must be a list of lists of 10 tokens"),
        (TOKENS, [[*ROW[1:], 3]], NEXT, "sample 0: x must be a list of lists of 10 tokens"),
        (TOKENS, None, NEXT, "sample 0: x must be a list of lists of 10 tokens, got None"),
        (TOKENS, [ROW], {}, "user 'ann', sample 0: target_tokens of y must be a list of lists of 10 tokens, got None"),
        (TOKENS, [ROW], 1, "target_tokens of y must be a list of lists of 10 tokens, got None"),
        (TOKENS, [ROW, ROW], NEXT, "user 'ann', sample 0: x has 2 lists of tokens, but target_tokens 1"),
        (
            TOKENS | {"cat": -1},
            [ROW],
            NEXT,
            r"words\.json is no vocabulary of Reddit: it must be an object with the number",
        ),
        (TOKENS | {"cat": 10**30}, [ROW], NEXT, r"words\.json is no vocabulary of Reddit"),
        (TOKENS | {"cat": True}, [ROW], NEXT, r"words\.json is no vocabulary of Reddit"),
        ("cat", [ROW], NEXT, r"words\.json is no vocabulary of Reddit"),
        ({"the": 0}, [ROW], NEXT, r"words\.json lacks <PAD> and <UNK>"),
        (["<PAD>", "the"], [ROW], NEXT, r"words\.json lacks <UNK>"),
    ],
)
def test_malformed_comments_and_their_vocabularies_are_named(
    words: Any, x: Any, y: Any, said: str, tmp_path: Path
) -> None:
    train = write(tmp_path / "train" / "all.json", {"ann": ([x], [y])})
    with pytest.raises(UserError, match=said):
        Leaf(str(train), str(train), kind="reddit", vocabulary=written_words(tmp_path, words)).setup()


def test_a_reddit_user_with_more_comments_than_labels_is_named(tmp_path: Path) -> None:
    x, y = commenter(["the cat", "the cat sat"])
    train = write(tmp_path / "train" / "all.json", {"ann": (x, y[:1])})
    with pytest.raises(UserError, match=r"all\.json, user 'ann': x has 2 samples and y 1\."):
        Leaf(str(train), str(train), kind="reddit", vocabulary=written_words(tmp_path, TOKENS)).setup()
