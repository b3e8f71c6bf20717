"""Test CelebA's files: who becomes a client, with which images and classes, and which sentence a malformed file gives."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fl.data import CelebA
from lightning_fl.errors import UserError

PERSONS = [7, 12, 7, 3, 12, 7, 12, 7, 12, 12, 7, 7, 3, 12]
"""Person of each image: 7 and 12 have six images, 3 has two."""
SMILING = [1, -1, -1, 1, 1, -1, 1, 1, -1, -1, 1, -1, 1, 1]


def write(root: Path, order: list[int] | None = None, **texts: str) -> Path:
    """Write CelebA's files, with the images in some order of lines; `texts` replace whole files."""
    order = list(range(len(PERSONS))) if order is None else order
    images = root / "img_align_celeba"
    images.mkdir(parents=True)
    for number in order:
        pixels = np.full((6, 4, 3), number * 10, dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number:06}.jpg", format="PNG")  # exact, whatever the name
    lines = [f"{number:06}.jpg  {-SMILING[number]} {SMILING[number]:2}" for number in order]
    texts = {
        "identity_CelebA": "\n".join(f"{number:06}.jpg {PERSONS[number]}" for number in order),
        "list_attr_celeba": "\n".join([str(len(order)), "Male Smiling ", *lines]) + "\n",
    } | texts
    for name, text in texts.items():
        (root / f"{name}.txt").write_text(text)
    return root


def contents(data: CelebA) -> list[list[tuple[int, int]]]:
    """Return number and class of each image of each client, training images first, in their order."""
    parts = []
    for k in range(data.num_clients):
        images, labels = next(data.client(k).batches(99))
        tested = data.test.select(data.client_test_indices[k])
        more, more_labels = next(tested.batches(99))
        pixels = torch.cat([images, more]).flatten(1)
        assert torch.equal(pixels.amin(1), pixels.amax(1))
        numbers = (pixels[:, 0] * 255 / 10).round().int().tolist()
        parts.append([*zip(numbers, torch.cat([labels, more_labels]).tolist(), strict=True)])
    return parts


def test_persons_with_enough_images_are_the_clients(tmp_path: Path) -> None:
    data = CelebA(str(write(tmp_path)), image_size=5, test_fraction=0.3)
    assert (data.num_classes, data.in_channels, data.image_size) == (2, 3, 5)
    data.setup()
    assert data.client_names.tolist() == ["7", "12"], "3 has fewer than five images"
    assert data.client_sizes.tolist() == [4, 4]
    assert [len(part) for part in data.client_test_indices] == [2, 2]
    for person, images in zip((7, 12), contents(data), strict=True):
        of_person = [
            (n, int(smiles == 1)) for n, (who, smiles) in enumerate(zip(PERSONS, SMILING, strict=True)) if who == person
        ]
        assert sorted(images) == of_person


@pytest.mark.long
def test_the_order_of_the_lines_does_not_matter_and_the_seed_does(tmp_path: Path) -> None:
    found = []
    for name, order, seed in (("a", None, 0), ("b", [*range(13, -1, -1)], 0), ("c", None, 1)):
        data = CelebA(str(write(tmp_path / name, order)), image_size=5, test_fraction=0.3, seed=seed)
        data.setup()
        found.append([{number for number, _ in part[-2:]} for part in contents(data)])
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_another_attribute_fewer_images_and_some_persons(tmp_path: Path) -> None:
    data = CelebA(str(write(tmp_path)), "Male", image_size=5, min_images=2, test_fraction=0.9)
    data.setup()
    assert data.client_names.tolist() == ["3", "7", "12"]
    assert data.client_sizes.tolist() == [1, 1, 1], "each keeps one image for training"
    assert all(label == int(SMILING[number] == -1) for part in contents(data) for number, label in part)
    some = CelebA(str(tmp_path), image_size=5, min_images=2, num_clients=2)
    some.setup()
    assert some.num_clients == 2


@pytest.mark.parametrize(
    ("texts", "arguments", "message"),
    [
        (
            {"list_attr_celeba": "14\nMale Smiling\n0.jpg 1\n"},
            {},
            r"list_attr_celeba.txt, line 3, must have 3 words, got 2",
        ),
        ({"list_attr_celeba": "1\nMale Smiling\n0.jpg 1 0\n"}, {}, r"txt, line 3: Smiling must be 1 or -1, got '0'"),
        ({"list_attr_celeba": "0\nMale Smiling\n"}, {}, r"list_attr_celeba.txt has no images"),
        ({"list_attr_celeba": ""}, {}, r"list_attr_celeba.txt, line 2, must name the attributes"),
        ({"list_attr_celeba": "2\nSmiling\na.jpg 1\na.jpg 1"}, {}, r"has a.jpg in line 3 and again in line 4"),
        ({"identity_CelebA": "000000.jpg 7\n"}, {}, r"identity_CelebA.txt does not name the person on 000001.jpg"),
        ({"identity_CelebA": "000000.jpg"}, {}, r"identity_CelebA.txt, line 1, must have 2 words, got 1"),
        ({}, {"attribute": "Smilling"}, r"attribute='Smilling' is none of .*list_attr_celeba.txt.*Smiling"),
        ({}, {"min_images": 7}, r"No person has 7 images; the most are 6: lower min_images"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, texts: dict, arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CelebA(str(write(tmp_path, **texts)), image_size=5, **arguments).setup()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"list_attr_celeba.txt is not readable .*root must have CelebA's own files"):
        CelebA(str(tmp_path)).setup()
    write(tmp_path)
    (tmp_path / "img_align_celeba" / "000000.jpg").unlink()
    with pytest.raises(UserError, match=r"000000.jpg is not a readable image"):
        CelebA(str(tmp_path), image_size=5).setup()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    for name, message in (("identity_CelebA.txt", "is no file"), ("img_align_celeba/000000.jpg", "is no file")):
        folder = write(tmp_path / name.partition(".")[0])
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=message):
            CelebA(str(folder), image_size=5).setup()


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    marked = write(tmp_path / "marked")
    for file in marked.glob("*.txt"):
        file.write_text(file.read_text(), encoding="utf-8-sig")
    read = [CelebA(str(root), image_size=5) for root in (marked, write(tmp_path / "plain"))]
    for data in read:
        data.setup()
    assert contents(read[0]) == contents(read[1])
