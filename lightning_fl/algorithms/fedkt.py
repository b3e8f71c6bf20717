"""FedKT: Li et al., Practical One-Shot Federated Learning for Cross-Silo Setting, IJCAI 2021 (arXiv:2010.01017), without noise
for privacy.

before the first round the server's inputs X go to every client, and
client k:  s times: shuffles its samples and cuts them into t parts; a teacher learns from each part;
           X gets the labels that most teachers give; a student learns X with these labels
           uploads the s students
server:    X gets the labels with the most votes of all clients: s of a client whose students agree, none if they do not
           (`consistent`; else one of each student); samples without a vote are left out; the final model learns the rest
mode       one_shot: stop here; a round without clients has the result.
           init_fedavg: FedAvg continues from the final model, as in `fedkt_fedavg` of the authors' code

These are s·t + s trainings of each client and one of the server. All models train with Adam on the cross-entropy of hard labels.
The smallest class wins a tie. With t = 1 there is nothing to vote on among the teachers: as in the authors' code, they are
uploaded themselves, and X stays at the server. Their code draws new weights for each model. Here all start from the run's
initial model, which any client can build from the seed and which keeps pretrained weights; the models differ by their samples
and order.

Bits: 8·C·H·W·n_0 down for images in bytes and s·q·d up (with float buffers) for each client, booked as set-up.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_fl.algorithms.method import Method
from lightning_fl.checks import Called
from lightning_fl.data.samples.tensor_samples import Selection
from lightning_fl.data.split_checks import NO_CLASSES
from lightning_fl.errors import UserError, require
from lightning_fl.outputs.losses import say_lost
from lightning_fl.slots import Message, RoundContext, Server, SetupTurn, is_finite

PRESETS = {"paper": (2, 5, 100), "light": (1, 2, 20)}
"""Values of s, t and epochs."""


class FedKT(Method):
    """Knowledge transfer before FedAvg: clients' models vote on labels for the server's inputs, and the model learns them."""

    setup_reads_clients = True

    def __init__(
        self,
        mode: Literal["one_shot", "init_fedavg"] = "init_fedavg",
        preset: Literal["paper", "light"] = "paper",
        s: Annotated[int, Ge(1), Called("s of FedKT")] | None = None,
        t: Annotated[int, Ge(1), Called("t of FedKT")] | None = None,
        epochs: Annotated[int, Ge(1), Called("epochs of FedKT")] | None = None,
        learning_rate: Annotated[float, Gt(0), Called("learning_rate of FedKT")] = 1e-3,
        batch_size: Annotated[int, Ge(1), Called("batch_size of FedKT")] = 64,
        consistent: bool = True,
        **slots: Any,
    ) -> None:
        """Keep FedAvg's parts.

        Args:
            mode: Continue with FedAvg (init_fedavg), or stop after one round without training (one_shot).
            preset: Defaults of s, t and epochs: paper has 2, 5 and 100, light has 1, 2 and 20.
            s: Number of students per client, at least 1.
            t: Number of teachers per student, at least 1; 1 sends the teachers themselves.
            epochs: Epochs of each training, at least 1.
            learning_rate: Learning rate of Adam, above 0.
            batch_size: Batch size of these trainings, at least 1.
            consistent: Count a client's votes only where its students agree.
        """
        counts = (s, t, epochs)
        s, t, epochs = (
            preset_value if value is None else value
            for value, preset_value in zip(counts, PRESETS[preset], strict=True)
        )
        filled = [name for name, part in slots.items() if part is not None]
        require(
            mode == "init_fedavg" or not filled,
            f"mode='one_shot' has no round in which the slot {', '.join(filled)} would be used: leave it out.",
        )
        super().__init__(**slots)
        self.mode = mode
        self.trains_in_rounds = mode == "init_fedavg"
        self.s = s
        self.t = t
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.consistent = consistent

    def check(self, context: RoundContext, server: Server, cohort_size: int) -> None:
        """Raise `UserError` if the server has no data, the data no classes, or the module no logits."""
        super().check(context, server, cohort_size)
        server.require_samples()
        if not server.has_labels:
            raise UserError(f"FedKT's teachers learn classes, but these data have none {NO_CLASSES}.")
        server.try_logits()

    def prepare(self, turn: SetupTurn) -> None:
        """Run the whole method except FedAvg's rounds, and then prepare further steps."""
        names = turn.data.train.class_names
        require(
            names is None,
            "FedKT trains on the classes of the samples, but theirs are text, which only the data set numbers: give Federated "
            "class_of with these numbers.",
        )
        data, smallest = turn.data, int(turn.data.client_sizes[turn.data.client_sizes > 0].min())
        if smallest < self.t:
            rank_zero_warn(
                f"t={self.t} teachers of a student need as many samples; a client with fewer, such as {smallest}, trains one "
                "teacher per sample."
            )
        public = data.train.select(data.server_indices)
        votes = turn.learner.sum_over_clients(lambda client: self._votes_of(client, turn, public))
        labelled = (votes.sum(1) > 0).numpy() if votes.dim() else np.zeros(len(public), dtype=bool)
        rank_zero_info(
            f"FedKT: the clients' votes give {labelled.sum():,} of the server's {len(public):,} inputs a label."
        )
        if labelled.any():
            chosen = data.train.select(data.server_indices[labelled])
            random = np.random.default_rng(turn.server.seed)
            final = self._train(turn, chosen, votes[labelled].argmax(1), random)
            if is_finite(final):
                turn.params, turn.buffers = final["model"], final["buffers"]
        else:
            say_lost("no input of the server got a vote, so FedKT leaves the initial model as it is.")
        super().prepare(turn)

    def _votes_of(self, client: int, turn: SetupTurn, public: Selection) -> Tensor:
        """Train and send a client's students; return its votes (n_0, C), none if a student is not finite."""
        data, learner, random = turn.data, turn.learner, turn.channel.random(client)
        held, initial = data.client_indices[client], {"model": turn.params, "buffers": turn.buffers}
        if self.t > 1:
            turn.channel.send_down(client, {"data/inputs": data.train.stored(data.server_indices)[0]})
        ballots = []
        for _ in range(self.s):
            order = random.permutation(held)
            student, teachers = initial, []
            for part in np.array_split(order, min(self.t, len(order))):
                assert data.train.labels is not None
                labels = torch.from_numpy(data.train.labels[part])
                student = self._train(turn, data.train.select(part), labels, random)
                if self.t > 1:
                    teachers.append(learner.votes(student, public))
            if self.t > 1:
                student = self._train(turn, public, torch.stack(teachers).sum(0).argmax(1), random)
            delta = {name: x - initial[name] for name, x in student.items() if len(x)}
            seen = turn.channel.send_up(client, delta)
            if is_finite(seen):
                ballots.append(learner.votes({name: x + seen.get(name, 0) for name, x in initial.items()}, public))
        if len(ballots) < self.s:
            say_lost(f"a student of client {client} is not finite, so its votes do not count.")
            return torch.zeros((), dtype=torch.int64)
        return tally(torch.stack(ballots), self.consistent)

    def _train(self, turn: SetupTurn, samples: Selection, labels: Tensor, random: np.random.Generator) -> Message:
        start = {"model": turn.params, "buffers": turn.buffers}
        return turn.learner.train(start, samples, labels, self.epochs, self.batch_size, self.learning_rate, random)


def tally(ballots: Tensor, consistent: bool) -> Tensor:
    """Return a client's votes from those of its s students.

    Args:
        ballots: votes of the students (s, m, C), a one in every row.
        consistent: leave out samples on which the students differ.

    Returns:
        Number of votes (m, C) for each class.

    >>> students = torch.tensor([[[1, 0], [0, 1]], [[1, 0], [1, 0]]])
    >>> tally(students, consistent=True).tolist(), tally(students, consistent=False).tolist()
    ([[2, 0], [0, 0]], [[2, 0], [1, 1]])
    """
    votes = ballots.sum(0)
    return votes * (votes == len(ballots)) if consistent else votes
