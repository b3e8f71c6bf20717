"""Outputs of a prediction, for callbacks that write them: the `predict_loop` of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, SequentialSampler

from lightning_fl.data.samples.loaders import SampleLoader


class Predictions:
    """Outputs of `predict_step` and the samples that it read, as Lightning's `BasePredictionWriter` asks for them.

    Attributes:
        outputs: outputs of each loader, batch by batch.
        current_batch_indices: positions of the present batch's samples in its dataset; [] if the loader does not read in order.
        epoch_batch_indices: the same of all batches so far, for each loader.
    """

    def __init__(self, loaders: Sequence[Any] = ()) -> None:
        self.outputs: list[list[Any]] = [[] for _ in loaders]
        self.current_batch_indices: list[int] = []
        self.epoch_batch_indices: list[list[list[int]]] = [[] for _ in loaders]
        self._next = [0 if _reads_in_order(loader) else None for loader in loaders]

    @property
    def predictions(self) -> list[Any]:
        """The outputs; one list for each loader if there are several."""
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def add(self, loader_index: int, batch: Any, output: Any) -> None:
        """Add the output for a batch."""
        self.outputs[loader_index].append(output)
        start, self.current_batch_indices = self._next[loader_index], []
        if start is None:
            return
        try:
            size = extract_batch_size(batch)
        except MisconfigurationException:  # nothing in the batch has a size
            self._next[loader_index] = None
            return
        self.current_batch_indices = list(range(start, start + size))
        self.epoch_batch_indices[loader_index].append(self.current_batch_indices)
        self._next[loader_index] = start + size


def _reads_in_order(loader: Any) -> bool:
    """True if a loader reads its dataset from the first sample to the last."""
    if isinstance(loader, SampleLoader):
        return loader.indices is None and not loader.shuffles
    return isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
