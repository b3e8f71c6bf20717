"""What codecs declare, what is assumed of one that declares nothing, and names that are refused."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_fl.algorithms import Algorithm
from lightning_fl.cli import main
from lightning_fl.codecs import Dense, EntropyCoded, ErrorFeedback, Followed, RandomK, TopK
from lightning_fl.errors import UserError
from lightning_fl.slots import Codec, Message, Packed, Payload, RoundContext, State, Traits
from lightning_fl.steps import Apply, Compress
from lightning_fl.vectors.layout import NO_LAYOUT, Layout

CONTEXT = RoundContext(Layout(("a",), ((4,),)), NO_LAYOUT, num_clients=2)
DECLARE = r"\(Undeclared declares no traits, so the worst is assumed: .* such as traits = Traits.CONTRACTS\)"


class Undeclared(Codec):
    """Codec that sends halves, and says nothing about itself."""

    def encode(self, message: Message, memory: State, context: RoundContext) -> tuple[Payload, State]:
        return {name: Packed.whole(x / 2) for name, x in message.items()}, {}

    def decode(self, payload: Payload, context: RoundContext) -> Message:
        return {name: packed.content for name, packed in payload.items()}


class Declared(Undeclared):
    """The same, which declares what holds."""

    traits = Traits.CONTRACTS


@dataclass(frozen=True)
class Around(Undeclared):
    """Codec of the user's with another inside."""

    codec: Codec

    @property
    def traits(self) -> Traits:
        return self.codec.traits & ~Traits.UNBIASED | Traits.NEEDS_ERROR_FEEDBACK


@pytest.mark.parametrize(
    "build",
    [
        lambda codec: ErrorFeedback(codec),
        lambda codec: ErrorFeedback(TopK(0.5, values=Around(codec))),
        lambda codec: Compress(codec),
        lambda codec: Compress(codec, feedback=True),
        lambda codec: TopK(0.5, values=codec),
        lambda codec: RandomK(0.5, "none", values=codec),
        lambda codec: Algorithm(downlink=codec),
        lambda codec: Algorithm(uplink=codec).check_mask("Mask"),
    ],
)
def test_the_worst_is_assumed_of_a_codec_that_declares_nothing(build):
    with pytest.raises(UserError, match=DECLARE):
        build(Undeclared())
    build(Declared())


def test_a_plain_uplink_needs_no_declaration_and_error_feedback_keeps_what_it_loses():
    codec = Undeclared()
    Algorithm(uplink=codec, steps=[Apply(), Compress(codec, feedback=False)], downlink=Followed(codec))
    _, memory = ErrorFeedback(Declared()).encode({"model": torch.ones(4), "buffers": torch.ones(2)}, {}, CONTEXT)
    assert {name: kept.tolist() for name, kept in memory.items()} == {"residual/model": [0.5] * 4}


def test_wrappers_add_to_the_traits_inside():
    pytest.importorskip("constriction")
    assert ErrorFeedback(Around(Dense())).traits == (
        Traits.CONTRACTS | Traits.LOSSLESS | Traits.SUMS_SUFFICE | Traits.ERROR_FEEDBACK
    )
    assert EntropyCoded(Around(Dense())).traits == Traits.EXACT & ~Traits.UNBIASED | Traits.NEEDS_ERROR_FEEDBACK


@pytest.mark.parametrize(
    "name",
    [
        *(
            "sums_suffice",
            "needs_every_client",
            "catches_up",
            "has_error_feedback",
            "needs_error_feedback",
            "error_may_grow",
        ),
        *(
            "is_unbiased",
            "is_nearly_unbiased",
            "contracts",
            "is_idempotent",
            "deltas_only",
            "sends_few",
            "needs_shapes",
        ),
    ],
)
def test_a_trait_by_its_name_of_0_3_is_refused(name):
    trait = name.removeprefix("is_").removeprefix("has_").upper()
    assert trait in Traits.__members__
    with pytest.raises(UserError, match=f"Own sets {name} as in version 0.3: declare Traits.{trait} in `traits`"):
        type("Own", (Declared,), {name: True})


@pytest.mark.long
def test_the_command_line_refuses_it_in_the_same_words(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "own_former_codec.py").write_text(
        "from lightning_fl.codecs import Dense\n\n\nclass Own(Dense):\n    is_unbiased = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        main(
            f"fit --config quickstart --algorithm.uplink own_former_codec.Own --trainer.default_root_dir {tmp_path}".split()
        )
    assert "Own sets is_unbiased as in version 0.3: declare Traits.UNBIASED" in capsys.readouterr().err
    sys.modules.pop("own_former_codec", None)
