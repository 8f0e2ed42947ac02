"""Axis labels: token strings made visible, unique and safe for plotly's pseudo-HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from hooked_ssm.errors import ShapeError

LONGEST = 24  # characters of a token shown on an axis

Labels: TypeAlias = Sequence[str] | Sequence[int] | Tensor


def escape(text: object) -> str:
    """Return `text` as plotly shows it literally.

    plotly drops what looks like an unknown tag, so that "<bos>" would be an empty label, and takes
    "$...$" for LaTeX where MathJax is loaded.
    """
    return html.escape(str(text), quote=False).replace("$", "&#36;")


def fixed(number: float, digits: int) -> str:
    """Return a number with so many digits behind the point, and no -0.00."""
    return f"{round(number, digits) + 0.0:.{digits}f}"


def visible(token: object) -> str:
    """Return a token with its white space made visible and its middle cut if it is very long."""
    text = str(token).replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    stripped = text.lstrip(" ")
    text = "·" * (len(text) - len(stripped)) + stripped
    if not text:
        return "''"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 8]}…{text[-7:]}"


def _strings(labels: Labels) -> list[str]:
    return [str(x) for x in (labels.tolist() if hasattr(labels, "tolist") else labels)]


def checked(labels: Labels, length: int, what: str) -> list[str]:
    """Return `labels` as strings, one per position.

    Raises:
        ShapeError: Their number is not `length`.
    """
    if isinstance(labels, str):
        raise ShapeError(f"{what} is one string, {labels!r}; expected a list of {length} strings")
    strings = _strings(labels)
    if len(strings) != length:
        raise ShapeError(f"{what} has {len(strings)} entries, but the values have {length} there")
    return strings


def token_labels(tokens: Labels | None, length: int) -> list[str]:
    """Return "token (position)" per position, as circuitsvis does; the position if None."""
    if tokens is None:
        return [str(i) for i in range(length)]
    return [escape(f"{visible(t)} ({i})") for i, t in enumerate(checked(tokens, length, "tokens"))]


def axis_labels(labels: Labels | None, length: int, what: str) -> list[str]:
    """Return escaped labels that differ from one another; indices if None.

    A category axis merges equal labels, so repeated ones get their index: "a (0)", "a (3)".
    """
    if labels is None:
        return [str(i) for i in range(length)]
    strings = [visible(x) for x in checked(labels, length, what)]
    if len(set(strings)) < len(strings):
        strings = [f"{x} ({i})" for i, x in enumerate(strings)]
    return [escape(x) for x in strings]


def listing(words: Iterable[object]) -> str:
    """Return "a, b and c"."""
    items = [str(w) for w in words]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
