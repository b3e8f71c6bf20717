"""Kinds of message entries, by which bits are counted; this module loads no torch, so that reports may use it."""

KINDS = ("model", "moments", "mask", "scalars", "buffers", "data", "keys")
"""Kinds of messages; the last are keys of secure sums and their shares."""


def kind_of(name: str) -> str:
    """Return the kind of a message entry, under which the ledger counts its bits.

    >>> kind_of("moments/control")
    'moments'
    """
    kind = name.partition("/")[0]
    if kind not in KINDS:
        raise ValueError(f"a message entry is named after its kind ({', '.join(KINDS)}); got {name!r}")
    return kind
