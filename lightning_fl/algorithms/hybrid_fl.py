"""Hybrid-FL: Yoshida et al., Hybrid-FL for Wireless Networks: Cooperative Learning Mechanism Using Non-IID Data, ICC 2020
(arXiv:1905.07210), as in FedDUMAP (Liu et al., ACM TIST 2024, doi:10.1145/3690648).

server:    w_s ← w after E local epochs on the server's n_0 samples
           w ← (Σ_k n_k w_k + n_0 w_s) / (Σ_k n_k + n_0)                         steps: Apply, ServerAsClient
the rest is FedAvg. The original also schedules clients by their channels and takes samples from some of them.
"""

from __future__ import annotations

from typing import Any

from lightning_fl.algorithms.method import Method
from lightning_fl.steps import Apply, ServerAsClient


class HybridFL(Method):
    """FedAvg in which the server takes part as one more client."""

    def __init__(self, **slots: Any) -> None:
        """Fill the step slot."""
        super().__init__((Apply(), ServerAsClient()), **slots)
