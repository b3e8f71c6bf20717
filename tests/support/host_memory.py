"""Accelerator emulated in host memory (`host_memory.cpp`), and a watch on its operations.

`register()` changes torch for the rest of the process, so use a separate process.
"""

import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.fabric.accelerators import CPUAccelerator
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAME = "host_memory"
DEVICE = f"{NAME}:0"


def register(build_folder: Path) -> None:
    """Compile the accelerator and register it in torch as `host_memory`."""
    torch.utils.rename_privateuse1_backend(NAME)
    source = Path(__file__).with_suffix(".cpp")
    extension = cpp_extension.load("host_memory_accelerator", [str(source)], build_directory=str(build_folder))
    extension.register_hooks()
    backend = ModuleType(NAME)
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "manual_seed_all": lambda seed: None,  # random numbers are the CPU's
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
    }
    vars(backend).update(functions)
    torch._register_device_module(NAME, backend)


class HostMemory(CPUAccelerator):
    """Lightning accelerator for the device."""

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(DEVICE)]

    @staticmethod
    def auto_device_count() -> int:
        return 1


# Operations that accept tensors of several devices on GPUs too.
CROSSING = {"_to_copy", "copy_", "_copy_from", "index", "index_put_", "_index_put_impl_", "lift_fresh", "set_"}


# Operations that compute nothing: they make room, or another tensor on the same memory.
NO_KERNELS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
    "_reshape_alias",
    "_unsafe_view",
    "lift_fresh",
}


# Operations whose result on the host, or whose shape, depends on numbers of the accelerator.
READING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount", "_unique2", "unique_consecutive"}


def launches(func: Any) -> bool:
    """True if an operation on a GPU's tensors launches a kernel or a copy, at least one: it makes no view and no empty tensor."""
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
    return not is_view and func.overloadpacket.__name__ not in NO_KERNELS


def makes_wait(name: str, args: Any, kwargs: Any) -> bool:
    """True if the host waits for the work of a GPU in this operation, of which some tensor is on the accelerator."""
    if name in READING:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("_to_copy", "copy_"):  # a copy to or from the host, unless it may go on by itself
        source = args[0] if name == "_to_copy" else args[1]
        to = torch.device(kwargs.get("device") or source.device) if name == "_to_copy" else args[0].device
        goes_on = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        return source.device.type != to.type and not (goes_on and to.type == NAME)
    if name == "lift_fresh":  # `torch.tensor(numbers, device=…)` copies before torch lets anyone see it
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        fills = name != "index" and len(args[1]) == 1 and args[2].dim() == 0  # as `masked_fill`, without positions
        return bool(masks) and not fills
    return False


class Watch(TorchDispatchMode):
    """Record operations that a GPU would refuse or make the host wait for.

    Attributes:
        mixed: operations with tensors on several devices, with the place in the code.
        waits: number of times that each place in the code waited for the accelerator: to read its numbers on the host, or to
            copy some there.
        launches: number of times that each operation computed or copied something on the accelerator. A GPU launches a kernel for
            each, or several.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixed: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        # Numbers on the host may take part in arithmetic with any tensor, except in these operations.
        placed = {x.device.type for x in tensors if x.dim() or name in ("cat", "stack", "dot")}
        if len(placed) > 1 and name not in CROSSING:
            self.mixed[f"{name} of {[f'{x.device.type} {tuple(x.shape)}' for x in tensors]} at {_place()}"] += 1
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == NAME or any(x.device.type == NAME for x in tensors):
            if makes_wait(name, args, kwargs):
                self.waits[f"{name} at {_place()}"] += 1
            if launches(func):
                self.launches[name] += 1
        return func(*args, **kwargs)


def _place() -> str:
    """Return the place in the package's code."""
    frames = [f for f in traceback.extract_stack() if "lightning_fl" in f.filename or "/callbacks/" in f.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:]))
