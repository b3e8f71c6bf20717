"""Noise that is correlated from round to round: tree aggregation (DP-FTRL; Kairouz et al., ICML 2021).

After t rounds of a pass the sum of all A so far has the noise n_t = Σ of the nodes in t's binary decomposition, at most
log₂ t + 1 nodes instead of t. Round t adds n_t − n_{t−1}. A node is drawn again from the seed, the pass and its position, so
there is no state.
"""

from __future__ import annotations

Node = tuple[int, int]
"""Level and index of a node: it spans the rounds index · 2^level + 1 … (index + 1) · 2^level."""


def nodes(rounds: int) -> set[Node]:
    """Return the nodes that make up the first rounds of a pass.

    >>> sorted(nodes(6)), nodes(0)
    ([(1, 2), (2, 0)], set())
    """
    found, begun = set(), 0
    for level in reversed(range(rounds.bit_length())):
        if rounds >> level & 1:
            found.add((level, begun >> level))
            begun += 1 << level
    return found


def changed_nodes(rounds: int) -> list[tuple[Node, float]]:
    """Return the nodes that a round adds (1) or takes back (−1), given the rounds of the pass with it.

    >>> changed_nodes(4)
    [((0, 2), -1.0), ((1, 0), -1.0), ((2, 0), 1.0)]
    """
    now, before = nodes(rounds), nodes(rounds - 1)
    return sorted([(node, 1.0) for node in now - before] + [(node, -1.0) for node in before - now])


def number_of(node: Node) -> int:
    """Return a number that no other node of the tree has, above 0.

    >>> [number_of(node) for node in ((0, 0), (1, 0), (0, 1), (2, 0))]
    [1, 2, 3, 4]
    """
    level, index = node
    return (2 * index + 1) << level
