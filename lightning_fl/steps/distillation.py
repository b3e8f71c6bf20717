"""Ensemble distillation on the server's samples (FedDF; Lin et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from annotated_types import Ge, Gt, Interval
from torch import Tensor

from lightning_fl.checks import Called, whole_share
from lightning_fl.errors import require
from lightning_fl.slots import PROPOSAL, UPLOADS, Server, ServerTurn, State, Step


@dataclass(frozen=True)
class Distillation(Step):
    """Adam on KL(t ‖ softmax(z(w)/T)), t = softmax(Σ_k z_k / KT), over minibatches of the server's inputs.

    z are the logits of the student, which starts as the proposal, and z_k those of the clients' models in evaluation mode. The
    learning rate falls to 0 along a cosine. If some of the server's samples are held out for validation, the best validated
    model is kept, else the last; labels are used only for validation. The student's batch normalisation updates its statistics
    with the server's inputs.

    Reports `feddf/loss`, `feddf/steps` and, with validation, `feddf/accuracy`.

    Attributes:
        max_steps: Adam steps in a round, at least 0; the paper takes up to 10,000.
        batch_size: samples in a minibatch, at least 1.
        learning_rate: learning rate of Adam, above 0.
        temperature: T > 0.
        average: average the teachers' `logits` or their `probs`.
        clip_norm: bound of the gradient's norm, above 0.
        val_fraction: share of the server's samples held out for validation, in [0, 1).
        val_every_n_steps: steps from one validation to the next, at least 1.
        patience: steps without improvement after which it stops, at least 1; they count from the first validation.
        freeze_batch_norm: keep the student in evaluation mode.
    """

    changeable = frozenset(
        {"max_steps", "batch_size", "learning_rate", "temperature", "clip_norm", "val_every_n_steps", "patience"}
    )
    needs = uses = frozenset({UPLOADS, PROPOSAL})
    _called = "{} of the distillation"
    max_steps: Annotated[int, Ge(0)] = 200
    batch_size: Annotated[int, Ge(1)] = 128
    learning_rate: Annotated[float, Gt(0)] = 1e-3
    temperature: Annotated[float, Gt(0)] = 1.0
    average: Annotated[Literal["logits", "probs"], Called("average")] = "logits"
    clip_norm: Annotated[float, Gt(0)] = 5.0
    val_fraction: Annotated[float, Interval(ge=0, lt=1), Called("val_fraction")] = 0.1
    val_every_n_steps: Annotated[int, Ge(1)] = 100
    patience: Annotated[int, Ge(1)] = 1000
    freeze_batch_norm: bool = False

    def check(self, server: Server) -> None:
        """Raise `UserError` without server data, or if the module lacks logits, or an accuracy to validate with."""
        if self.max_steps:
            server.require_samples()
            server.try_logits()
            if self._num_held_out(server):
                server.try_accuracy()
            num_samples = server.num_samples - self._num_held_out(server)
            require(
                min(num_samples, self.batch_size) > 1 or not self._skips_single_samples(server),
                "the student has batch normalisation, which cannot train on one sample: give the server more samples, the "
                "distillation a larger batch_size, or set freeze_batch_norm.",
            )

    def _skips_single_samples(self, server: Server) -> bool:
        return server.skips_single_samples and not self.freeze_batch_norm

    def _num_held_out(self, server: Server) -> int:
        return whole_share(self.val_fraction, server.num_samples) if server.has_labels else 0

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Replace the proposal by the distilled model."""
        if self.max_steps:
            self._distil(turn)
        return state

    def _distil(self, turn: ServerTurn) -> None:
        server = turn.server
        num_held_out = self._num_held_out(server)
        rows = torch.arange(server.num_samples - num_held_out)
        targets = self._targets(turn, rows)
        student = turn.proposal.clone().requires_grad_()
        buffers = turn.proposed_buffers.clone()
        optimizer = torch.optim.Adam([student], lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.max_steps)
        order = torch.Generator().manual_seed(server.seed)
        best, best_step = (-1.0, student.detach(), buffers), 0
        step, loss = 0, torch.zeros(())
        smallest = 2 if self._skips_single_samples(server) else 1
        while step < self.max_steps:
            shuffled = torch.randperm(len(rows), generator=order)
            batches = server.inputs(rows[shuffled], self.batch_size)
            for part, inputs in zip(shuffled.split(self.batch_size), batches, strict=True):
                if len(part) < smallest:
                    continue
                logits = server.logits(student, buffers, inputs, not self.freeze_batch_norm)
                log_probs = F.log_softmax(logits / self.temperature, dim=1)
                loss = F.kl_div(log_probs, targets[part.to(targets.device)], reduction="batchmean")
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_([student], self.clip_norm)
                optimizer.step()
                schedule.step()
                step += 1
                if num_held_out and (step % self.val_every_n_steps == 0 or step == self.max_steps):
                    accuracy = server.accuracy(student.detach(), buffers, slice(len(rows), None))
                    if accuracy > best[0]:
                        best, best_step = (accuracy, student.detach().clone(), buffers.clone()), step
                if step == self.max_steps or (best_step and step - best_step >= self.patience):
                    break
            else:
                continue
            break
        turn.metrics |= {"feddf/loss": loss.item(), "feddf/steps": step}
        if num_held_out:
            turn.metrics["feddf/accuracy"], turn.proposal, turn.proposed_buffers = best
        else:
            turn.proposal, turn.proposed_buffers = student.detach(), buffers

    def _targets(self, turn: ServerTurn, rows: Tensor) -> Tensor:
        """Return the ensemble's probabilities (rows, classes)."""
        models = turn.params + turn.merged[UPLOADS]
        buffers = turn.merged.get("uploads/buffers")
        mean: Tensor | float = 0.0
        with torch.no_grad():
            for position, model in enumerate(models):
                client_buffers = turn.buffers if buffers is None else turn.buffers + buffers[position]
                batches = turn.server.inputs(rows, self.batch_size)
                parts = [turn.server.logits(model, client_buffers, inputs) for inputs in batches]
                scaled = torch.cat(parts).double() / self.temperature
                mean = mean + (scaled if self.average == "logits" else scaled.softmax(1)) / len(models)
        assert isinstance(mean, Tensor)
        return (mean.softmax(1) if self.average == "logits" else mean).to(models.dtype)
