"""Data for federated learning: data sets, how they are divided over clients and server, and how training reads them."""

from lightning_fl.data.arrays import Arrays
from lightning_fl.data.augment import crop_and_flip
from lightning_fl.data.dataset_samples import DatasetSamples
from lightning_fl.data.degree import divergence, label_histograms, non_iid_degree
from lightning_fl.data.digits import Digits
from lightning_fl.data.downloads import CIFAR10, CIFAR100, SVHN, FashionMNIST
from lightning_fl.data.federated import Federated
from lightning_fl.data.folder import ImageFolder
from lightning_fl.data.images import ImageDataModule
from lightning_fl.data.loaders import SampleLoader
from lightning_fl.data.module import FederatedDataModule
from lightning_fl.data.partition import IID, Dirichlet, Partition, Shards
from lightning_fl.data.samples import Normalize, Samples, Selection, TensorSamples
from lightning_fl.data.sources import Source

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "SVHN",
    "Arrays",
    "DatasetSamples",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "Federated",
    "FederatedDataModule",
    "ImageDataModule",
    "ImageFolder",
    "Normalize",
    "Partition",
    "SampleLoader",
    "Samples",
    "Selection",
    "Shards",
    "Source",
    "TensorSamples",
    "crop_and_flip",
    "divergence",
    "label_histograms",
    "non_iid_degree",
]
