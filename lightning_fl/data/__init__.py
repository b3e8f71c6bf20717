"""Data for federated learning: data sets, their partition over clients and server, and loaders for training."""

from lightning_fl.data.datasets.arrays import Arrays
from lightning_fl.data.datasets.augment import crop_and_flip
from lightning_fl.data.datasets.celeba import CelebA
from lightning_fl.data.datasets.digits import Digits
from lightning_fl.data.datasets.huggingface import HuggingFace
from lightning_fl.data.datasets.image_data_module import ImageDataModule
from lightning_fl.data.datasets.image_folder import ImageFolder
from lightning_fl.data.datasets.leaf import Leaf
from lightning_fl.data.datasets.torchvision import CIFAR10, CIFAR100, SVHN, FashionMNIST
from lightning_fl.data.federated_data_module import FederatedDataModule
from lightning_fl.data.non_iid_degree import divergence, label_histograms, non_iid_degree
from lightning_fl.data.partitions.by_group import ByGroup
from lightning_fl.data.partitions.classes import Classes, ClassPriors
from lightning_fl.data.partitions.client_indices import ClientIndices
from lightning_fl.data.partitions.dirichlet import Dirichlet
from lightning_fl.data.partitions.given_indices import GivenIndices
from lightning_fl.data.partitions.partition import Partition, Pool
from lightning_fl.data.partitions.shards import Shards
from lightning_fl.data.partitions.sizes import IID, LogNormalSizes, QuantitySkew, Sizes
from lightning_fl.data.samples.dataset_samples import DatasetSamples
from lightning_fl.data.samples.loaders import SampleLoader
from lightning_fl.data.samples.tensor_samples import Normalize, Samples, Selection, TensorSamples
from lightning_fl.data.shift import Corruption, Noise, Rotation, Shift
from lightning_fl.data.sources import Source
from lightning_fl.data.users import Groups
from lightning_fl.data.wrapped_datamodule import Federated

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "SVHN",
    "Arrays",
    "ByGroup",
    "CelebA",
    "ClassPriors",
    "Classes",
    "ClientIndices",
    "Corruption",
    "DatasetSamples",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "Federated",
    "FederatedDataModule",
    "GivenIndices",
    "Groups",
    "HuggingFace",
    "ImageDataModule",
    "ImageFolder",
    "Leaf",
    "LogNormalSizes",
    "Noise",
    "Normalize",
    "Partition",
    "Pool",
    "QuantitySkew",
    "Rotation",
    "SampleLoader",
    "Samples",
    "Selection",
    "Shards",
    "Shift",
    "Sizes",
    "Source",
    "TensorSamples",
    "crop_and_flip",
    "divergence",
    "label_histograms",
    "non_iid_degree",
]
