"""Equations of docstrings as HTML, which wraps at any width: who, what, and the part that does it, with real subscripts.

In a docstring they are lines whose columns stand two or more spaces apart, as `lightning-fl list NAME` prints them:

    client k:  y ← y − η ∇F_k(y; minibatch), E passes          rule: LocalOptimizer
               upload Δ_k = y − w                              codec: Dense, exchange: OneShot
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from html import escape
from typing import NamedTuple

from citations import HTML, cited

SYMBOLS = re.compile(r"[←Σ∇ΔηΠ√‖⊙]")
GAP = re.compile(r"(?<![;,.]) {2,}| {3,}")
"""Space between columns; after a semicolon two spaces only separate equations."""
PART = re.compile(r"(rule|codec|uplink|downlink|exchange|aggregator|steps?|personal|callback|pace|data): ")
LONGEST_LABEL = 24
"""Characters of the longest first column, which says who or when."""
FAR = 4
"""Spaces in front of a last column that says which part a line is, or what a symbol means."""
CODE = re.compile(r"`([^`]*)`")
MARK = r"(?P<mark>[⁺*'\u0302]?)"
SCRIPTS = (
    (r"(?P<mark>)_\{(?P<text>[^{}]*)\}", "sub"),
    (rf"(?<=(?<![A-Za-z0-9_])[A-Za-z]){MARK}_(?P<text>\w+)", "sub"),
    (rf"(?<=[^\x00-\x7F]){MARK}_(?P<text>\w+)", "sub"),
    (r"(?<=[a-z])(?P<mark>)_(?P<text>[a-z])(?!\w)", "sub"),
    (r"(?P<mark>)\^(?P<text>\([^)]*\)|[−-]?\w+|[−-]?½)", "sup"),
)
"""Patterns of scripts: in braces; after one letter; after a symbol; of one letter, after a word; and superscripts. Names such as
`clients_per_round` have none."""


class Line(NamedTuple):
    """Line of equations.

    Attributes:
        who: who does it, or when, or the method that does it; may be empty.
        what: equations, or words, of one column or several.
        part: the part that does it, or what a symbol means; may be empty.
        is_inner: True if the line stands below the `who` of an earlier one.
    """

    who: str
    what: list[str]
    part: str
    is_inner: bool


def is_equations(text: str) -> bool:
    """True if an aligned paragraph has mathematical symbols."""
    return bool(SYMBOLS.search(text))


def read_line(text: str) -> Line:
    """Return the columns of a line.

    >>> read_line("server:    w ← w + Δ;  m ← m + Δ          step: Apply")
    Line(who='server', what=['w ← w + Δ;  m ← m + Δ'], part='step: Apply', is_inner=False)
    >>> read_line("             TopK   the k largest   of each           codec: TopK")
    Line(who='', what=['TopK', 'the k largest', 'of each'], part='codec: TopK', is_inner=True)
    """
    is_inner = text.startswith(" ")
    text = text.strip()
    cells = GAP.split(text)
    who = ""
    if not is_inner and len(cells) > 1 and len(cells[0]) <= LONGEST_LABEL and not PART.match(cells[0]):
        who = cells.pop(0).rstrip(":;")
    is_far = len(cells) > 1 and text.endswith(" " * FAR + cells[-1])
    part = cells.pop() if is_far or PART.match(cells[-1]) else ""
    return Line(who, cells, part, is_inner)


def equations(text: str) -> str:
    """Return a paragraph of aligned lines as one block of HTML, which has no empty line."""
    lines = joined(map(read_line, text.splitlines()))
    return "\n".join(['<div class="equations">', *map(row, lines), "</div>"])


def joined(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines, those of a sentence between equations as one."""
    sentence: list[str] = []
    for line in lines:
        if is_words := not (line.is_inner or line.who or line.part):
            sentence += line.what
        elif sentence:
            yield Line("", [" ".join(sentence)], "", False)
            sentence = []
        if not is_words:
            yield line
    if sentence:
        yield Line("", [" ".join(sentence)], "", False)


def row(line: Line) -> str:
    """Return a line as a row of the block."""
    what = "".join(f"<span>{typeset(cell)}</span>" for cell in line.what)
    kind = "inner" if line.is_inner else "who" if line.who else "words"
    return (
        f'<div class="{kind}"><b>{typeset(line.who)}</b>'
        f'<div class="what">{what}</div><div class="part">{typeset(line.part)}</div></div>'
    )


def typeset(text: str) -> str:
    """Return a text with subscripts, superscripts and links on papers; what is in backticks as code, all else as it stands.

    >>> typeset("w_k^(l) + p*_k of `init_fedavg`")
    'w<sub>k</sub><sup>(l)</sup> + p*<sub>k</sub> of <code>init_fedavg</code>'
    >>> typeset("τ_eff, ∇_{w_g}, clients_per_round")
    'τ<sub>eff</sub>, ∇<sub>w<sub>g</sub></sub>, clients_per_round'
    """
    parts = [escape(part, quote=False) for part in CODE.split(text)]
    parts[::2] = map(scripts, parts[::2])
    parts[1::2] = (f"<code>{part}</code>" for part in parts[1::2])
    return cited("".join(parts), HTML)


def scripts(text: str) -> str:
    """Return a text with its subscripts and superscripts as tags."""
    for pattern, tag in SCRIPTS:
        text = re.sub(pattern, partial(script, tag), text)
    return text


def script(tag: str, found: re.Match[str]) -> str:
    """Return a script in its tag, behind the mark of its base."""
    return f"{found['mark']}<{tag}>{scripts(found['text'])}</{tag}>"
