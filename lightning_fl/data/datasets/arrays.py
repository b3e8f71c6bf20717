"""`Arrays`: data from an `.npz` file of images and labels, or from tensors or arrays in Python."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from zipfile import is_zipfile

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from lightning_fl.data.datasets.image_data_module import ImageDataModule
from lightning_fl.data.split_checks import are_quantities, describe_largest, most_differ, needing_classes, warn_of_gaps
from lightning_fl.data.users import Groups
from lightning_fl.errors import UserError, nearest, require

KEYS = ("train_images", "train_labels", "test_images", "test_labels")
GROUPS = ("train_groups", "test_groups")
ARRAYS = (Tensor, np.ndarray)
MOST_DENSE_BYTES = 2**33
"""Size up to which a sparse matrix is read with its zeros."""


class Arrays(ImageDataModule):
    """Data from an `.npz` file (`train_images train_labels test_images test_labels`), or tensors or arrays from Python.

    Args:
        path: the `.npz` file: uint8 images n×H×W×C or n×H×W, integer labels (n,); it may also have `train_groups` and
            `test_groups` (n,), the user of each image.
        train: (x, y) or x alone, as tensors, arrays, lists, tables of pandas or sparse matrices, instead of a path. A uint8 x
            holds images n×H×W×C or n×H×W; any other x stays unchanged, so float images are n×C×H×W. An integer y (n,) holds the
            class of each sample, or quantities if some are negative, or if the largest is at least the number of samples and most
            differ or are as large; any other y holds targets. A batch is the list [x, y]; for x alone the tensor x, and for (x,)
            the list [x], as in a `TensorDataset`.
        test: same format as train; both are given, or neither.
        num_classes: number of classes, at least 1; None: the largest label plus one.
        **kwargs: arguments of ImageDataModule and FederatedDataModule.
    """

    changeable = ImageDataModule.changeable | {"path"}
    class_remedy = "(y of whole numbers, (n,)): give train and test such a y"

    def __init__(
        self,
        path: str | None = None,
        train: Any = None,
        test: Any = None,
        num_classes: Annotated[int, Ge(1)] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require(
            (train is None) == (test is None) and (path is None) != (train is None),
            "Arrays takes either path, or train and test together.",
        )
        self.path = path
        self._given = (train, test)
        self._num_classes = num_classes

    @property
    def num_classes(self) -> int | None:
        """Given number of classes, or the largest label plus one (reads the data); None without integer labels."""
        return self._shape[0] if self._num_classes is None else self._num_classes

    @property
    def in_channels(self) -> int | None:
        """Channels of the images (reads the data); None if they are not n×C×H×W."""
        return self._shape[1]

    @property
    def image_size(self) -> int | None:
        """Height and width of the images in pixels (reads the data); None if they are not n×C×H×H."""
        return self._shape[2]

    def read(self) -> tuple[tuple[Tensor, ...] | Tensor, tuple[Tensor, ...] | Tensor]:
        """Read and check the arrays."""
        train, test = self._tensors
        # Cache the shape first: after this, only TensorSamples keeps the tensors.
        _ = self._shape
        del self._tensors
        return (train[0], test[0]) if self.path is None and _is_alone(self._given[0]) else (train, test)

    @cached_property
    def _tensors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        arrays = self._given if self.path is None else _read_file(self.path)
        train, test = _tensors_of("train", arrays[0]), _tensors_of("test", arrays[1])
        require(
            _is_alone(arrays[0]) == _is_alone(arrays[1]),
            "train and test must have the same form: (x, y), (x,) or x alone.",
        )
        shapes = [[tuple(tensor.shape[1:]) for tensor in part] for part in (train, test)]
        require(
            shapes[0] == shapes[1],
            f"A training sample has the shapes {shapes[0]}, but a test sample has {shapes[1]}: make them equal.",
        )
        dtypes = [", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in part) for part in (train, test)]
        require(dtypes[0] == dtypes[1], f"train has the types {dtypes[0]}, but test has {dtypes[1]}: make them equal.")
        for name, part in (("train", train), ("test", test)):
            require(len(part[0]) > 0, f"{self.path or 'Arrays'} has no {name} samples: give at least one.")
        return train, test

    def read_groups(self) -> tuple[Groups | None, Groups | None]:
        """Return the groups that the file has, if any."""
        if self.path is None:
            return None, None
        arrays = _load(self.path, (), GROUPS)
        train, test = (Groups.of(arrays[key]) if key in arrays else None for key in GROUPS)
        return train, test

    def _counted(self, train: Tensor, test: Tensor) -> int | None:
        """Return the number of classes of labels (n,), None of quantities; refuse more than samples, warn if few occur."""
        values, of_training = torch.cat([train, test]).numpy(), train.numpy()
        count = int(values.max()) + 1
        if self._num_classes is None:
            # A single very large label is a mistake.
            can_be_quantities = values.min() < 0 or most_differ(of_training)
            if can_be_quantities and are_quantities(of_training, "give num_classes", needing_classes(self)):
                return None
            remedy = "correct the labels, or give num_classes"
            largest = describe_largest(values, count)
            require(count <= len(values), f"{largest} in {len(values):,} samples: {remedy}.")
            warn_of_gaps(values, count, remedy)
        return count

    @cached_property
    def _shape(self) -> tuple[int | None, int | None, int | None]:
        """Numbers of classes, of channels, and of pixels per side."""
        train, test = self._tensors
        inputs, targets = train[0], [*train[1:], *test[1:]]
        are_classes = bool(targets) and all(part.ndim == 1 and len(part) and _are_whole(part) for part in targets)
        num_classes = self._counted(train[1], test[1]) if are_classes else None
        _, channels, height, width = inputs.shape if inputs.ndim == 4 else (None,) * 4
        return num_classes, channels, height if height == width else None


def _read_file(path: str) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return the training and the test arrays of a file."""
    arrays = _load(path, KEYS)
    for key, array in arrays.items():
        images = key.endswith("images")
        is_allowed = (
            array.dtype == np.uint8 and array.ndim in (3, 4) if images else array.dtype.kind in "iu" and array.ndim
        )
        wanted = "uint8 images n×H×W×C or n×H×W" if images else "integer labels (n,)"
        require(bool(is_allowed), f"{key} of {path} is {array.dtype} {array.shape}: expected {wanted}.")
    train_x, train_y, test_x, test_y = (arrays[key] for key in KEYS)
    return (train_x, train_y), (test_x, test_y)


def _load(path: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return arrays of an `.npz` file by name.

    Raises:
        UserError: there is no such file, it cannot be read, or a required array is missing.
    """
    require(Path(path).is_file(), f"There is no file {Path(path).resolve()}.")
    place = path
    try:
        file = np.load(path, allow_pickle=False)
        require(
            isinstance(file, np.lib.npyio.NpzFile),
            f"{path} is a single array: use an .npz file with {', '.join(KEYS)}.",
        )
        with file:
            missing = [key for key in required if key not in file]
            if missing:
                hints = [f"{key} ({nearest(key, file.files)})" for key in missing] if file.files else missing
                raise UserError(f"{path} lacks {'; '.join(hints)}.")
            arrays = {}
            for key in (*required, *(key for key in optional if key in file)):
                place = f"{key} of {path}"
                arrays[key] = file[key]
            return arrays
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(f"{place} does not fit into memory ({error}).") from error
    except Exception as error:  # of NumPy, zipfile and zlib, which a damaged file can make fail anywhere
        # For a file that is not a zip, NumPy suggests loading a pickle: leave its message out.
        reason = f" ({error})" if is_zipfile(path) else ""
        reason = (
            f": {place} has objects, which may run code when they are read" if "Object arrays" in reason else reason
        )
        raise UserError(f"{path} is not a readable .npz file{reason}.") from error


def _is_array(value: Any) -> bool:
    """True for a tensor, an array, a table of pandas or another package, or a sparse matrix."""
    return isinstance(value, ARRAYS) or hasattr(value, "to_numpy") or hasattr(value, "toarray")


def _is_alone(value: Any) -> bool:
    """True if data are x alone, and not (x, y) or (x,): also a list, unless it has one or two arrays, which are the parts."""
    are_parts = isinstance(value, list) and len(value) in (1, 2) and all(map(_is_array, value))
    return not isinstance(value, tuple) and not are_parts


def _as_array(name: str, value: Any) -> Tensor | np.ndarray:
    """Return samples as a tensor or an array, as torch or their own package converts them.

    Raises:
        UserError: they cannot be converted, or would take too much memory.
    """
    require(
        _is_array(value) or isinstance(value, (list, tuple)),
        f"{name} is a {type(value).__name__}: pass a tensor, an array, a list, a table or a sparse matrix.",
    )
    if hasattr(value, "toarray"):
        size = int(np.prod(value.shape, dtype=np.float64)) * value.dtype.itemsize
        require(
            size <= MOST_DENSE_BYTES,
            f"{name} is a sparse matrix {value.shape}, which would take {size / 2**30:,.0f} GiB with its zeros: wrap a data set "
            "that reads its rows in Federated.",
        )
        return value.toarray()
    if isinstance(value, Tensor):
        return value.to_dense() if value.layout != torch.strided else value
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "to_numpy"):
        return np.asarray(value.to_numpy())
    try:
        if value and isinstance(value[0], Tensor):
            return torch.stack(list(value))
        return np.asarray(value) if value and isinstance(value[0], np.ndarray) else torch.tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"{name} is no list of equally long rows of numbers ({' '.join(str(error).split())})."
        ) from error


def _tensors_of(name: str, value: Any) -> tuple[Tensor, ...]:
    given = (value,) if _is_alone(value) else tuple(value)
    require(
        len(given) in (1, 2),
        f"{name} must be (x, y) or x alone, not a {type(value).__name__} of {len(given)} parts.",
    )
    parts = [_as_array(f"{letter} of {name}", part) for letter, part in zip("xy", given, strict=False)]
    inputs = _tensor(f"x of {name}", parts[0])
    require(
        inputs.dtype not in (torch.uint16, torch.uint32, torch.uint64),
        f"x of {name} has the type {str(inputs.dtype).removeprefix('torch.')}, which torch cannot index: pass uint8 images, or "
        "floats such as x / 65535.",
    )
    tensors = [_images(name, inputs)]
    if len(parts) == 2:
        tensors.append(_labels(_tensor(f"y of {name}", parts[1])))
        require(
            len(tensors[0]) == len(tensors[1]),
            f"{name} has {len(tensors[0]):,} samples but {len(tensors[1]):,} labels: give one label per sample.",
        )
    return tuple(tensors)


def _tensor(name: str, value: Tensor | np.ndarray) -> Tensor:
    """Return a tensor of samples; raise `UserError` if an array has no samples or no numbers."""
    try:
        # torch takes neither another byte order nor negative strides.
        native = value if isinstance(value, Tensor) else np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        tensor = torch.as_tensor(native)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} has the type {value.dtype}: pass an array or a tensor of numbers.") from error
    require(value.ndim > 0, f"{name} is a single number: pass one entry per sample.")
    require(not np.ma.is_masked(value), f"{name} has masked entries: leave these samples out, or fill them.")
    return tensor


def _images(name: str, inputs: Tensor) -> Tensor:
    if inputs.dtype != torch.uint8:
        return inputs
    shape = tuple(inputs.shape)
    require(len(shape) in (3, 4), f"The {name} images are uint8 with shape {shape}: expected n×H×W×C or n×H×W.")
    if len(shape) == 3:
        return inputs.unsqueeze(1)
    channels_first = shape[1] in (1, 3, 4) and shape[3] not in (1, 3, 4)
    require(
        not channels_first,
        f"The {name} images have the shape {shape}, with channels first: pass uint8 images as n×H×W×C.",
    )
    return inputs.permute(0, 3, 1, 2)


def _labels(targets: Tensor) -> Tensor:
    if not _are_whole(targets):
        return targets
    return (targets.squeeze(1) if targets.ndim == 2 and targets.shape[1] == 1 else targets).long()


def _are_whole(targets: Tensor) -> bool:
    """True for whole numbers, which may be classes."""
    return not (targets.is_floating_point() or targets.is_complex())
