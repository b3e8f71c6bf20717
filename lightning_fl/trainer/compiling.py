"""Checks of the flag `compile`, and messages about steps that are not compiled."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_fl.clients.choose_runner import Runner
from lightning_fl.clients.stacked import Stacked, has_equal_clients
from lightning_fl.errors import UserError, require
from lightning_fl.flat_module import graph
from lightning_fl.flat_module.compiled_evaluation import CompiledEvaluation
from lightning_fl.flat_module.compiled_graphs import CompiledGraphs
from lightning_fl.flat_module.compiled_step import CompiledStep
from lightning_fl.processes import gather_objects
from lightning_fl.slots import Gradients
from lightning_fl.trainer.lightning_interface import TrainerInterface


def compile_steps(trainer: TrainerInterface) -> None:
    """Let the steps of training and evaluation in a run be compiled, or say in a line why they are not.

    Raises:
        UserError: a flag or the module does not allow it, or there is no compiler.
    """
    flat_module, method, name = trainer.active_module, trainer.algorithm, type(trainer.lightning_module).__name__
    require(
        not trainer.by_lightning,
        "trainer.compile compiles steps of the runners 'auto', 'serial' and 'stacked', but here Lightning's own loop makes them: "
        "leave it out, or compile the module yourself, with torch.compile.",
    )
    require(
        not flat_module.is_manual,
        f"trainer.compile needs one loss for each batch, but {name} makes its steps itself (automatic_optimization is False): "
        "leave it out, or compile the network yourself, with torch.compile.",
    )
    require(
        not trainer.detect_anomaly,
        "trainer.detect_anomaly looks into autograd's own graph, which trainer.compile replaces: leave one of them out.",
    )
    _require_compiler(flat_module.fabric.device.type)
    if method.exchange.cuts:
        _say("Clients train and are evaluated", f"clients of {method.name} train networks of several sizes")
        return
    flat_module.compiled_evaluation = CompiledEvaluation(flat_module)
    if any(Gradients.REPRESENTATIONS in rule.reads for rule in method.rules()):
        _say("Clients train", f"{method.name} compares what layers read within a step")
    else:
        flat_module.compiled = CompiledStep(flat_module)


def seconds_of_compiling(trainer: TrainerInterface) -> float:
    """Return the seconds of compiling since the last call, of the process that took longest, and say them.

    If one process cannot compile a step, all processes run eagerly from now on: the checkpoint keeps what the first one knows.
    """
    flat_module = trainer.active_module
    both = (flat_module.compiled, flat_module.compiled_evaluation)
    return sum(_seconds_of(compiled, trainer) for compiled in both if compiled is not None)


def _seconds_of(compiled: CompiledGraphs, trainer: TrainerInterface) -> float:
    all_seconds, numbers, reasons = zip(
        *gather_objects(trainer.fabric, (*compiled.take_times(), compiled.why_not)), strict=True
    )
    seconds, number, why_not = max(all_seconds), max(numbers), max(reasons)
    if number:
        shapes = "one shape" if number == 1 else f"{number} shapes"
        rank_zero_info(
            f"Compiling the {compiled.what} for {shapes} of batches took {seconds:.1f} s, which time/round_seconds leaves out."
        )
    if why_not and not compiled.why_not:
        compiled.end(why_not)
    return float(seconds)


def say_of_stacks(trainer: TrainerInterface, runner: Runner) -> None:
    """Say which steps of clients that train at once are compiled."""
    if trainer.active_module.compiled is not None and isinstance(runner, Stacked):
        of_all = "" if has_equal_clients(trainer.data) else " in which all have a full minibatch"
        rank_zero_info(
            f"torch compiles the steps of {runner.clients_at_once} clients at once{of_all}; others, such as those of clients "
            "left over in a round, run without it. With trainer.runner serial it compiles all."
        )


def _say(what: str, why: str) -> None:
    rank_zero_info(f"{what} without torch.compile, although trainer.compile asks for it, because {why}.")


def _require_compiler(device: str) -> None:
    """Raise `UserError` if there is no compiler for the code that torch writes for this device."""
    if graph.BACKEND != "inductor":
        return
    if device == "cuda":
        from torch.utils._triton import has_triton

        require(has_triton(), "trainer.compile needs the package triton on a GPU: install it, or leave the flag out.")
    elif device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UserError(
                "trainer.compile needs a C++ compiler, and torch finds none: install g++ or clang++, name one in the environment "
                "variable CXX, or leave the flag out."
            ) from error
