"""Test the sources of training samples and random batches of them."""

import numpy as np
import pytest
import torch

from lightning_fl.data import Arrays, ClientIndices, Dirichlet, Shards, TensorSamples, non_iid_degree


def module(**options):
    images = torch.arange(200.0).view(200, 1)
    labels = torch.arange(200) % 4
    data = Arrays(train=(images, labels), test=(images, labels), num_clients=8, num_classes=4, **options)
    data.setup()
    return data


def test_the_server_comes_first_if_it_holds_anything() -> None:
    data = module(client_fraction=0.8, server_fraction=0.1, partition=Shards(1))
    sources = data.sources()
    assert [source.client for source in sources] == [None, *range(8)]
    assert [source.num_samples for source in sources] == [16, *data.client_sizes]
    everyone = data.label_histograms.sum(0)
    for source in sources:
        counts = np.bincount(source.samples.labels[source.indices], minlength=4)
        assert source.degree == pytest.approx(float(non_iid_degree(counts, everyone)))
    assert module().sources()[0].client == 0


def test_clients_without_samples_are_left_out() -> None:
    data = module()
    data.client_indices = ClientIndices.of([part if k != 3 else part[:0] for k, part in enumerate(data.client_indices)])
    data._count_clients()
    assert [source.client for source in data.sources()] == [0, 1, 2, 4, 5, 6, 7]


def test_without_classes_everyone_is_typical() -> None:
    values = torch.arange(20.0).view(20, 1), torch.zeros(20)
    data = Arrays(train=values, test=values, num_clients=2)
    data.setup()
    assert [source.degree for source in data.sources()] == [0, 0]


def test_batches_are_random_samples_of_the_source_as_they_are() -> None:
    data = module(partition=Dirichlet(0.5))
    data.train = TensorSamples(*data.train._stored, augment=lambda images, generator: images * 0)
    source = data.sources()[2]
    images, labels = source.batch(5, np.random.default_rng(0))
    assert images.shape == (5, 1)
    assert set(images.flatten().int().tolist()) <= set(source.indices.tolist())
    assert len(set(images.flatten().tolist())) == 5
    assert torch.equal(labels, images.flatten().long() % 4)
    again, _ = source.batch(5, np.random.default_rng(0))
    other, _ = source.batch(5, np.random.default_rng(1))
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
    assert len(source.batch(10_000, np.random.default_rng(0))[0]) == source.num_samples
