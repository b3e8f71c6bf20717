"""Test modules with batch normalisation: averages, bits, skipped batches."""

import copy
import warnings

import pytest
import torch
from compared_runs import MakeTrainer
from roster import problem
from torch import Tensor, nn
from toys import Normalised, Perceptron, federation

from lightning_fl import UserError
from lightning_fl.algorithms import Algorithm, DeviceM, FedAvg, FedDA, FedProx, ServerM


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedProx(mu=0), ServerM(beta=0), FedDA(beta=0), DeviceM(local_beta=0, variant="mime_lite")],
    ids=lambda a: a.name,
)
def test_buffers_are_averaged_by_samples_and_counters_take_the_maximum(
    algorithm: Algorithm, make_trainer: MakeTrainer
) -> None:
    module = Normalised()
    server = copy.deepcopy(module)
    rounds, given = 2, problem(rounds=2, epochs=2)
    for t in range(rounds):
        states, sizes = [], []
        for k in given.cohort(t):
            client = copy.deepcopy(server)
            optimizer = client.configure_optimizers()
            for x, y in given.batches(t, k):
                if len(x) == 1:
                    continue
                optimizer.zero_grad()
                client.loss((torch.tensor(x).float(), torch.tensor(y).float())).backward()
                optimizer.step()
            states.append(client.state_dict())
            sizes.append(len(given.x[k]))
        merged = {}
        for name, value in server.state_dict().items():
            stacked = torch.stack([state[name] for state in states])
            if value.is_floating_point():
                weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
                merged[name] = torch.einsum("k,k...->...", weights, stacked.double()).float()
            else:
                merged[name] = stacked.max(0).values
        server.load_state_dict(merged)
    trainer = make_trainer(max_rounds=rounds, local_epochs=2)
    trainer.fit(module, federation(), algorithm)
    for name, value in server.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=2e-6, msg=name)
    assert module.norm.num_batches_tracked.dtype == torch.int64


def test_a_last_batch_of_one_is_skipped_with_batch_norm_alone_and_said(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    said = "1 of 1 clients leave out their last batch"
    caplog.set_level("INFO")
    lone = federation(sizes=(5,))  # a batch of four and one of one
    normalised = Normalised()
    trainer = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=3)
    trainer.fit(normalised, lone)
    assert normalised.norm.num_batches_tracked == 3
    assert trainer.run.num_steps == 3
    assert said in caplog.text
    caplog.clear()
    plain = make_trainer(max_rounds=1, clients_per_round=1, local_epochs=3)
    plain.fit(Perceptron(), federation(sizes=(5,)))
    assert plain.run.num_steps == 6
    assert said not in caplog.text


def test_a_client_of_one_sample_trains_nothing_and_breaks_nothing(make_trainer: MakeTrainer) -> None:
    module = Normalised()
    trainer = make_trainer(max_rounds=1, clients_per_round=3)
    trainer.fit(module, federation(sizes=(1, 1, 4)))
    assert trainer.callback_metrics["clients/accepted"] == 3
    assert trainer.run.num_steps == 1


def test_batch_norm_without_running_statistics(make_trainer: MakeTrainer) -> None:
    """Test the variant common in federated work; it uses the batch's statistics in evaluation too and refuses a batch of one."""
    module = Perceptron()
    module.hidden = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, track_running_stats=False))
    trainer = make_trainer(max_rounds=1)
    trainer.fit(module, federation())
    assert trainer.callback_metrics["model/macs"] == 20
    assert trainer.callback_metrics["comm/uplink_bits"] == 3 * 32 * (26 + 8)


def test_batches_of_one_sample_are_refused_where_a_channel_has_one_value(make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"Normalised has batch normalisation.*set batch_size to 2 or more.*GroupNorm"):
        make_trainer().fit(Normalised(), federation(batch_size=1))


def test_batches_of_one_sample_train_where_a_channel_has_several_values(make_trainer: MakeTrainer) -> None:
    class Spatial(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x.unsqueeze(1)).squeeze(1))

    module = Spatial()
    before = copy.deepcopy(module.state_dict())
    make_trainer(max_rounds=0).fit(module, federation(batch_size=1))
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)
    make_trainer().fit(module, federation(batch_size=1))
    assert not torch.equal(module.norm.running_mean, before["norm.running_mean"])


def test_clients_of_one_sample_that_nobody_can_train_on_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        UserError, match=r"Normalised has batch normalisation.*no client has more: give clients more samples"
    ):
        make_trainer().fit(Normalised(), federation(sizes=(1, 1, 1, 1)))


def test_some_clients_of_one_sample_are_worth_a_warning(make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match=r"Normalised has batch normalisation.*2 of 4 clients have no more"):
        make_trainer().fit(Normalised(), federation(sizes=(1, 5, 1, 6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_trainer().fit(Perceptron(), federation(sizes=(1, 5, 1, 6)))
