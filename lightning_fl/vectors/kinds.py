"""Kinds of message entries, by which bits are counted; this module loads no torch, so that reports may use it."""

from lightning_fl.errors import UserError

KINDS = ("model", "moments", "mask", "scalars", "buffers", "data", "keys")
"""Kinds of messages; the last are keys of secure sums and their shares."""


def kind_of(name: str) -> str:
    """Return the kind of a message entry, under which the ledger counts its bits.

    Raises:
        UserError: the name begins with no kind.

    >>> kind_of("moments/control")
    'moments'
    """
    kind = name.partition("/")[0]
    if kind not in KINDS:
        raise UserError(
            f"{name!r} is no entry of a message, whose name begins with its kind ({', '.join(KINDS)}): name vectors (d,) "
            "moments/…, single numbers scalars/…, and bools mask/…."
        )
    return kind
