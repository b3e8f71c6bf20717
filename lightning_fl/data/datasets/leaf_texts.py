"""Texts of LEAF (arXiv:1812.01097) as numbers: Sent140's tweets and Reddit's comments, with the vocabularies that number them.

Words of Sent140 become numbers as in LEAF's `models/utils/language_utils.py`, and tokens of Reddit as in its
`models/reddit/stacked_lstm.py`.
"""

from __future__ import annotations

import re
import reprlib
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fl.data.datasets.leaf_files import User, read_json
from lightning_fl.errors import UserError, require

NUM_WORDS = 25
"""Words of an input of Sent140."""
NUM_TOKENS = 10
"""Tokens of a sequence of Reddit."""
PADDING, UNKNOWN = "<PAD>", "<UNK>"
"""Tokens of Reddit's vocabulary for padding and for unknown tokens."""


def _entries(file: Path) -> Any:
    """Return the words or numbers of a vocabulary, which may stand under "vocab"."""
    require(
        file.suffix not in (".pck", ".pkl", ".pickle"),
        f"{file} is a pickle, which is not loaded because it can run any code; if you trust it, turn it into JSON in Python: "
        f"import json, pickle; json.dump(pickle.load(open({str(file)!r}, 'rb')), open({str(file.with_suffix('.json'))!r}, 'w'))",
    )
    content = read_json(file)
    vocabulary = content.get("vocab") if isinstance(content, dict) else None
    return vocabulary if isinstance(vocabulary, list | dict) else content


def read_words(file: Path) -> dict[str, int]:
    """Return the numbers of words: their positions in the list."""
    words = _entries(file)
    require(
        isinstance(words, list) and all(isinstance(word, str) for word in words),
        f"{file} is no vocabulary: it must be a list of words, or an object with such a list as 'vocab'.",
    )
    numbers = {word: number for number, word in enumerate(words)}
    require(0 < len(numbers) == len(words), f"{file} must have words, and each once, to number them by their places.")
    return numbers


def read_numbers(file: Path) -> dict[str, int]:
    """Return the numbers of the tokens of Reddit's vocabulary. Several tokens may have one number, as LEAF's may."""
    entries = _entries(file)
    numbers = read_words(file) if isinstance(entries, list) else entries
    require(
        isinstance(numbers, dict) and all(type(number) is int and 0 <= number < 2**31 for number in numbers.values()),
        f"{file} is no vocabulary of Reddit: it must be an object with the number of each token, from 0, or a list of tokens, or "
        "an object with either as 'vocab'.",
    )
    missing = [token for token in (PADDING, UNKNOWN) if token not in numbers]
    require(not missing, f"{file} lacks {' and '.join(missing)}: number this token, too, as LEAF's vocabulary does.")
    return numbers


def tweets(user: User, words: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the first words of a user's tweets, (n, 25) int64, and classes (n,)."""
    numbers = np.full((len(user.x), NUM_WORDS), len(words), dtype=np.int64)
    for position, (tweet, label) in enumerate(zip(user.x, user.y, strict=True)):
        text = tweet[4] if isinstance(tweet, list) and len(tweet) > 4 else None
        if not isinstance(text, str):
            given = reprlib.repr(tweet)
            raise UserError(
                f"{user.place}, sample {position}: x must be a list of id, date, query, user and text, got {given}."
            )
        require(
            type(label) is int and label in (0, 1),
            f"{user.place}, sample {position}: y must be 0 or 1, got {label!r}.",
        )
        found = [words.get(word, len(words)) for word in re.findall(r"[\w']+|[.,!?;]", text)[:NUM_WORDS]]
        numbers[position, : len(found)] = found
    return numbers, np.array(user.y, dtype=np.int64)


def comments(user: User, numbers: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the tokens in a user's comments, (n, 10) int64, and of the tokens that follow them, (n, 10)."""
    rows: dict[str, list[list[int]]] = {"x": [], "target_tokens of y": []}
    for position, (x, y) in enumerate(zip(user.x, user.y, strict=True)):
        place = f"{user.place}, sample {position}"
        targets: Any = y.get("target_tokens") if isinstance(y, dict) else None
        for name, sequences in zip(rows, (x, targets), strict=True):
            require(
                isinstance(sequences, list) and all(_is_sequence(sequence) for sequence in sequences),
                f"{place}: {name} must be a list of lists of {NUM_TOKENS} tokens, got {reprlib.repr(sequences)}.",
            )
            rows[name] += [[numbers.get(token, numbers[UNKNOWN]) for token in sequence] for sequence in sequences]
        require(
            len(x) == len(targets), f"{place}: x has {len(x):,} lists of tokens, but target_tokens {len(targets):,}."
        )
    inputs, labels = (np.array(row, dtype=np.int64).reshape(-1, NUM_TOKENS) for row in rows.values())
    return inputs, labels


def _is_sequence(tokens: Any) -> bool:
    return isinstance(tokens, list) and len(tokens) == NUM_TOKENS and all(isinstance(token, str) for token in tokens)
