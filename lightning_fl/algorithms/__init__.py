"""Methods by the names of their papers; each fills the six slots."""

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.apfl import APFL
from lightning_fl.algorithms.centralised import Centralised
from lightning_fl.algorithms.dasha import DASHA
from lightning_fl.algorithms.data_sharing import DataSharing
from lightning_fl.algorithms.ditto import Ditto
from lightning_fl.algorithms.efficient_adam import EfficientAdam
from lightning_fl.algorithms.fedadam import FairnessTop, FedAdam, FedAdamSSM, FedAdamTop
from lightning_fl.algorithms.fedap import FedAP, FedDUAP, FedDUMAP
from lightning_fl.algorithms.fedasync import FedAsync
from lightning_fl.algorithms.fedavg import FedAvg
from lightning_fl.algorithms.fedbn import FedBN
from lightning_fl.algorithms.fedbuff import FedBuff
from lightning_fl.algorithms.fedda import FedDA, FedDUDA
from lightning_fl.algorithms.feddf import FedDF
from lightning_fl.algorithms.feddp import FedDP
from lightning_fl.algorithms.feddu import FedDU, FedDUDM, FedDUM, FedDUS, FedDUSM
from lightning_fl.algorithms.feddyn import FedDyn
from lightning_fl.algorithms.federated_dropout import FederatedDropout
from lightning_fl.algorithms.fedexp import FedExP
from lightning_fl.algorithms.fedkt import FedKT
from lightning_fl.algorithms.fedldf import HDFL, FedADP, FedLDF, RandomLayers
from lightning_fl.algorithms.fednova import FedNova
from lightning_fl.algorithms.fedopt import FedOpt, ServerAdagrad, ServerAdam, ServerYogi
from lightning_fl.algorithms.fedpaq import FedPAQ
from lightning_fl.algorithms.fedprox import FedProx
from lightning_fl.algorithms.fedrep import FedRep
from lightning_fl.algorithms.fedsam import FedSAM
from lightning_fl.algorithms.fjord import FjORD
from lightning_fl.algorithms.heterofl import HeteroFL
from lightning_fl.algorithms.hrank import HRank
from lightning_fl.algorithms.hybrid_fl import HybridFL
from lightning_fl.algorithms.ifca import IFCA
from lightning_fl.algorithms.imc import IMC
from lightning_fl.algorithms.local_only import LocalOnly
from lightning_fl.algorithms.method import Method as Method
from lightning_fl.algorithms.momentum import DeviceM, ServerM
from lightning_fl.algorithms.moon import MOON
from lightning_fl.algorithms.one_bit_adam import OneBitAdam
from lightning_fl.algorithms.perfedavg import PerFedAvg
from lightning_fl.algorithms.pfedme import PFedMe
from lightning_fl.algorithms.prunefl import PruneFL
from lightning_fl.algorithms.scaffnew import Scaffnew
from lightning_fl.algorithms.scaffold import SCAFFOLD

__all__ = [
    "APFL",
    "DASHA",
    "HDFL",
    "IFCA",
    "IMC",
    "MOON",
    "SCAFFOLD",
    "Algorithm",
    "Centralised",
    "DataSharing",
    "DeviceM",
    "Ditto",
    "EfficientAdam",
    "FairnessTop",
    "FedADP",
    "FedAP",
    "FedAdam",
    "FedAdamSSM",
    "FedAdamTop",
    "FedAsync",
    "FedAvg",
    "FedBN",
    "FedBuff",
    "FedDA",
    "FedDF",
    "FedDP",
    "FedDU",
    "FedDUAP",
    "FedDUDA",
    "FedDUDM",
    "FedDUM",
    "FedDUMAP",
    "FedDUS",
    "FedDUSM",
    "FedDyn",
    "FedExP",
    "FedKT",
    "FedLDF",
    "FedNova",
    "FedOpt",
    "FedPAQ",
    "FedProx",
    "FedRep",
    "FedSAM",
    "FederatedDropout",
    "FjORD",
    "HRank",
    "HeteroFL",
    "HybridFL",
    "LocalOnly",
    "OneBitAdam",
    "PFedMe",
    "PerFedAvg",
    "PruneFL",
    "RandomLayers",
    "Scaffnew",
    "ServerAdagrad",
    "ServerAdam",
    "ServerM",
    "ServerYogi",
]
