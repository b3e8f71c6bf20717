"""The server's training enters the average (Hybrid-FL: Yoshida et al., ICC 2020, as FedDUMAP of ACM TIST 2024 has it)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fl.slots import Server, ServerTurn, State, Step


@dataclass(frozen=True)
class ServerAsClient(Step):
    """w ← (n' w_h + n_0 w_s) / (n' + n_0).

    w_h is the proposal, of n' samples, and w_s what local training on the server's n_0 samples makes of the model before the
    round, unlike `DynamicServerUpdate`, which starts from w_h. Float buffers likewise. Without server data the proposal stays.
    """

    def check(self, server: Server) -> None:
        """Warn if there are no server data."""
        if not server.num_samples:
            rank_zero_warn("there are no server data, so the server trains nothing: give --data.server_fraction.")

    def __call__(self, turn: ServerTurn, state: State) -> State:
        """Take the server's model into the average."""
        if turn.server.num_samples:
            trained = turn.server.train({"model": turn.params, "buffers": turn.buffers})
            share = trained.weight / (turn.num_samples + trained.weight)
            turn.move({"model": turn.params - turn.proposal, "buffers": turn.buffers - turn.proposed_buffers}, share)
            turn.move(trained.message, share)
        return state
