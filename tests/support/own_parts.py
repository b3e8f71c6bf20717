"""Method of a user's, one of whose parameters is a part with a default that has values of its own."""

from lightning_fl.algorithms import Algorithm
from lightning_fl.slots import Step
from lightning_fl.steps import Apply, Momentum


class WithStep(Algorithm):
    """FedAvg with a second step."""

    def __init__(self, step: Step = Momentum(beta=0.5, dampening=False)) -> None:  # noqa: B008
        """Fill the step slot.

        Args:
            step: The second step.
        """
        super().__init__(steps=(Apply(), step))
