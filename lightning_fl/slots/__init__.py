"""The six slots of an algorithm: rule, codec, exchange, aggregator, step and personal.

A part is a frozen dataclass of hyper-parameters, whose annotations give their ranges (`lightning_fl.checks.ranges`). It holds
no tensor, module or loader: state is passed to its methods and lives in `Run` alone. The methods of the base classes do nothing,
or as little as the slot allows, so a subclass defines only the methods that differ.

Tensors are flat: the d trainable parameters are one vector (d,), see `lightning_fl.vectors.layout`. The d_b values of all float
buffers are one vector (d_b,). A message is a dict of such vectors. Their names are `kind` or `kind/name`, for example `model` or
`moments/control`; the ledger counts bits by kind (`KINDS`). In an upload every vector is a delta: client minus server.
"""

from lightning_fl.slots.aggregator import Aggregator, Merging, kept_columns
from lightning_fl.slots.codec import Codec, Packed, Payload, Traits, through
from lightning_fl.slots.exchange import Capacities, Channel, Exchange, Job, Result, TrainedModel, Upload, Uploader
from lightning_fl.slots.forwarding import forwards
from lightning_fl.slots.message import (
    CHOSEN,
    MEAN_GRADIENT,
    PROPOSAL,
    SENT,
    UPLOAD_WEIGHTS,
    UPLOADS,
    Message,
    State,
    check_tensors,
    compressible,
    is_finite,
    several_models,
)
from lightning_fl.slots.pace import Pace
from lightning_fl.slots.part import Part, check_inner, parts_in
from lightning_fl.slots.personal import (
    Owned,
    OwnModel,
    OwnSamples,
    OwnTraining,
    Personal,
    Phase,
    adapter,
    has_client_models,
    model_keeper,
    owned_by,
    phased,
)
from lightning_fl.slots.pruning_turn import PruningTurn
from lightning_fl.slots.round_context import Draw, RoundContext
from lightning_fl.slots.rule import Gradients, LocalTraining, Rule, message_of
from lightning_fl.slots.server import Learner, Server, ServerTraining
from lightning_fl.slots.step import Step
from lightning_fl.slots.turns import ServerTurn, SetupTurn
from lightning_fl.slots.validation import Validation
from lightning_fl.slots.vector_codec import VectorCodec
from lightning_fl.slots.width import WIDTHS, Width
from lightning_fl.vectors.kinds import KINDS, kind_of

__all__ = [
    "CHOSEN",
    "KINDS",
    "MEAN_GRADIENT",
    "PROPOSAL",
    "SENT",
    "UPLOADS",
    "UPLOAD_WEIGHTS",
    "WIDTHS",
    "Aggregator",
    "Capacities",
    "Channel",
    "Codec",
    "Draw",
    "Exchange",
    "Gradients",
    "Job",
    "Learner",
    "LocalTraining",
    "Merging",
    "Message",
    "OwnModel",
    "OwnSamples",
    "OwnTraining",
    "Owned",
    "Pace",
    "Packed",
    "Part",
    "Payload",
    "Personal",
    "Phase",
    "PruningTurn",
    "Result",
    "RoundContext",
    "Rule",
    "Server",
    "ServerTraining",
    "ServerTurn",
    "SetupTurn",
    "State",
    "Step",
    "TrainedModel",
    "Traits",
    "Upload",
    "Uploader",
    "Validation",
    "VectorCodec",
    "Width",
    "adapter",
    "check_inner",
    "check_tensors",
    "compressible",
    "forwards",
    "has_client_models",
    "is_finite",
    "kept_columns",
    "kind_of",
    "message_of",
    "model_keeper",
    "owned_by",
    "parts_in",
    "phased",
    "several_models",
    "through",
]
