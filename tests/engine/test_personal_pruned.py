"""Any exchange, with personal parameters or without, before and after a structured pruning, by both runners."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from compared_runs import MakeTrainer
from torch import Tensor, nn
from toys import Perceptron, Pruning, federation

from lightning_fl.aggregators import MaskedMean, WeightedMean
from lightning_fl.algorithms import Algorithm
from lightning_fl.exchanges import DrawnClients, DrawnLayers, LayerDivergence, OneShot, PrunedUnits
from lightning_fl.pruning import Plan, plans_of

EXCHANGES: dict[str, Callable[[], Any]] = {
    "OneShot": OneShot,
    "DrawnClients": lambda: DrawnClients(n=2),
    "DrawnLayers": lambda: DrawnLayers(n=2),
    "LayerDivergence": lambda: LayerDivergence(n=2),
    "PrunedUnits": lambda: PrunedUnits(keep=0.5),
}


class Deep(Perceptron):
    """Three layers: `hidden` can be pruned, and `output` can belong to the clients."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.middle(torch.tanh(self.hidden(x)))))


class PruneHidden(Pruning):
    def plan(self, module: nn.Module) -> Plan:
        kept = torch.tensor([unit for unit in range(len(module.hidden.bias)) if unit not in self.drop])
        axes = {"hidden.weight": {0: kept}, "hidden.bias": {0: kept}, "middle.weight": {1: kept}}
        return Plan(filters={"hidden": kept}, axes=axes, widths={"hidden": 4})


@pytest.mark.parametrize(("name", "personal", "pruned"), [*product(EXCHANGES, [[], ["output"]], [False, True])])
def test_exchange_by_personal_by_pruned_by_runner(
    name: str, personal: list[str], pruned: bool, make_trainer: MakeTrainer
) -> None:
    aggregator = WeightedMean() if name == "OneShot" else MaskedMean()
    initial, fitted = Deep(), {}
    for runner in ("serial", "stacked"):
        module = copy.deepcopy(initial)
        trainer = make_trainer(
            max_rounds=4, clients_per_round=4, runner=runner, callbacks=[PruneHidden(when=2)] if pruned else []
        )
        algorithm = Algorithm(exchange=EXCHANGES[name](), aggregator=aggregator, personal=personal)
        trainer.fit(module, federation(), algorithm)
        assert trainer.callback_metrics["clients/accepted"] == 4
        assert len(plans_of(module)) == pruned
        sent = {parameter for group in trainer.fit_loop.engine.context.groups for parameter in group.parameters}
        assert sent == set(trainer.run.layout.names)
        assert ("output.weight" in sent) == (not personal)
        assert len(module.hidden.bias) == (3 if pruned else 4)
        assert {len(state["personal"]) for state in trainer.run.clients.values()} == ({10} if personal else set())
        fitted[runner] = module
    for ours, theirs in zip(fitted["serial"].parameters(), fitted["stacked"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
