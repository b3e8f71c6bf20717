"""Methods under their papers' names, each a recipe of slots."""

from lightning_fl.algorithms.algorithm import Algorithm
from lightning_fl.algorithms.fedadam_ssm.efficient_adam import EfficientAdam
from lightning_fl.algorithms.fedadam_ssm.fedadam import FairnessTop, FedAdam, FedAdamSSM, FedAdamTop
from lightning_fl.algorithms.fedadam_ssm.one_bit_adam import OneBitAdam
from lightning_fl.algorithms.fedavg import FedAvg
from lightning_fl.algorithms.feddp import FedDP
from lightning_fl.algorithms.feddumap.data_sharing import DataSharing
from lightning_fl.algorithms.feddumap.fedap import FedAP, FedDUAP, FedDUMAP
from lightning_fl.algorithms.feddumap.fedda import FedDA, FedDUDA
from lightning_fl.algorithms.feddumap.feddf import FedDF
from lightning_fl.algorithms.feddumap.feddu import FedDU, FedDUDM, FedDUM, FedDUS, FedDUSM
from lightning_fl.algorithms.feddumap.fedkt import FedKT
from lightning_fl.algorithms.feddumap.hrank import HRank
from lightning_fl.algorithms.feddumap.hybrid_fl import HybridFL
from lightning_fl.algorithms.feddumap.imc import IMC
from lightning_fl.algorithms.feddumap.momentum import DeviceM, ServerM
from lightning_fl.algorithms.feddumap.prunefl import PruneFL
from lightning_fl.algorithms.fedldf import HDFL, FedADP, FedLDF, RandomLayers
from lightning_fl.algorithms.fednova import FedNova
from lightning_fl.algorithms.fedopt import FedOpt, ServerAdagrad, ServerAdam, ServerYogi
from lightning_fl.algorithms.fedpaq import FedPAQ
from lightning_fl.algorithms.fedprox import FedProx
from lightning_fl.algorithms.method import Method as Method
from lightning_fl.algorithms.personal.apfl import APFL
from lightning_fl.algorithms.personal.ditto import Ditto
from lightning_fl.algorithms.personal.fedbn import FedBN
from lightning_fl.algorithms.personal.fedrep import FedRep
from lightning_fl.algorithms.personal.pfedme import PFedMe
from lightning_fl.algorithms.scaffold import SCAFFOLD

__all__ = [
    "APFL",
    "HDFL",
    "IMC",
    "SCAFFOLD",
    "Algorithm",
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
    "FedAvg",
    "FedBN",
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
    "FedKT",
    "FedLDF",
    "FedNova",
    "FedOpt",
    "FedPAQ",
    "FedProx",
    "FedRep",
    "HRank",
    "HybridFL",
    "OneBitAdam",
    "PFedMe",
    "PruneFL",
    "RandomLayers",
    "ServerAdagrad",
    "ServerAdam",
    "ServerM",
    "ServerYogi",
]
