"""What an annotation allows of a value, in code and in words.

Numbers are finite, True is no number and a string is no list. Tensors have the kind and the axes
that their annotation names.
"""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union

import numpy as np
import torch
from torch import Tensor

from hooked_ssm.errors import near


class Rule(NamedTuple):
    """What a value must be; also stands in `Annotated` to narrow a type.

    Attributes:
        allowed: In words, for messages.
        fits: Whether a value is that.
        choices: The words allowed, if it is one of some words.
        axes: A tensor's axis words, if it is a tensor or a mapping to tensors.
        remedy: What to do about a value that does not fit; "" where the words say it.
    """

    allowed: str
    fits: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()
    axes: tuple[str, ...] | None = None
    remedy: Callable[[Any], str] = lambda value: ""


def is_integer(value: object) -> bool:
    """Whether a value is a whole number: Python's, numpy's or a tensor without axes."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and _kind(value) == "integers"
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite real number."""
    if type(value) is float:  # as most are, and grammars have many
        return math.isfinite(value)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def shown(value: Any) -> str:
    """Return a value as messages show it: a tensor by dtype and shape, all else shortened."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def shown_indices(indices: Tensor) -> str:
    """Return a tensor of indices as messages show it: its shape, and from where to where."""
    if not indices.numel():
        return shown(indices)
    low, high = (end.item() for end in indices.aminmax())
    return f"{shown(indices)}, from {low} to {high}"


ANYTHING = Rule("anything", lambda value: True)


_PLAIN: dict[Any, Rule] = {
    int: Rule("an integer", is_integer),
    float: Rule("a finite number", is_number),
    bool: Rule("True or False", lambda value: isinstance(value, bool | np.bool_)),
    str: Rule("a string", lambda value: isinstance(value, str)),
    type(None): Rule("None", lambda value: value is None),
    torch.Generator: Rule(
        "a torch.Generator",
        lambda value: isinstance(value, torch.Generator),
        remedy=lambda value: "Pass torch.Generator().manual_seed(0)",
    ),
}


def rule_of(annotation: Any) -> Rule:
    """Return what an annotation asks of a value; what it cannot judge, it lets pass."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _narrowed(rule_of(args[0]), [rule for rule in args[1:] if isinstance(rule, Rule)])
    if origin in (Union, UnionType):
        return _any_of([rule_of(arg) for arg in args])
    if origin is Literal:
        words = ", ".join(map(repr, args))
        return Rule(words, lambda value: isinstance(value, str) and value in args, choices=args)
    if hasattr(annotation, "dim_str"):
        return _tensor(annotation)
    if isinstance(annotation, type) and annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*map(rule_of, args))
    if origin is tuple and Ellipsis not in args:
        return _tuple([rule_of(arg) for arg in args])
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        return _sequence(rule_of(args[0]))
    kind = origin or annotation
    if kind is Callable:
        return Rule("a function", callable)
    if isinstance(kind, type) and kind not in (Any, object):
        return Rule(f"a {kind.__name__}", lambda value: isinstance(value, kind))
    return ANYTHING


def _narrowed(rule: Rule, own: list[Rule]) -> Rule:
    if not own:
        return rule
    return rule._replace(
        allowed=own[-1].allowed,
        choices=own[-1].choices or rule.choices,
        fits=lambda value: rule.fits(value) and all(more.fits(value) for more in own),
        remedy=lambda value: own[-1].remedy(value) or rule.remedy(value),
    )


def _any_of(rules: list[Rule]) -> Rule:
    return Rule(
        allowed=" or ".join(dict.fromkeys(rule.allowed for rule in rules)),
        fits=lambda value: any(rule.fits(value) for rule in rules),
        choices=_choices(rules),
        axes=next((rule.axes for rule in rules if rule.axes), None),
        remedy=lambda value: next(filter(None, (rule.remedy(value) for rule in rules)), ""),
    )


def _choices(rules: list[Rule]) -> tuple[Any, ...]:
    """The words allowed, if nothing but words (and None) is."""
    others = [rule for rule in rules if not rule.choices and rule.allowed != "None"]
    return () if others else tuple(word for rule in rules for word in rule.choices)


def _sequence(entry: Rule) -> Rule:
    def fits(value: Any) -> bool:
        # a set's order is another one in every process
        no_list = str | bytes | Mapping | set | frozenset
        listed = isinstance(value, Collection) and not isinstance(value, no_list)
        if isinstance(value, Tensor | np.ndarray) and value.ndim != 1:
            return False
        return listed and all(map(entry.fits, value))

    def remedy(value: Any) -> str:
        if entry.fits(value):
            return f"Put it in a list: [{shown(value)}]"
        words = (
            [one for one in value if isinstance(one, str)]
            if isinstance(value, list | tuple)
            else []
        )
        close = [near(one, entry.choices, 1) for one in words if not entry.fits(one)]
        return f"Did you mean {close[0][0]!r}?" if close and close[0] else ""

    plural = entry.allowed.removeprefix("a finite ").removeprefix("an ").removeprefix("a ")
    if entry.choices:
        words = f"words of {entry.allowed}"
    elif plural.startswith("list of "):
        words = plural.replace("list of", "lists of", 1)
    else:
        words = f"{plural}s"
    return Rule(f"a list of {words}", fits, remedy=remedy)


def _tuple(entries: list[Rule]) -> Rule:
    """So many entries, each of its own kind."""

    def fits(value: Any) -> bool:
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return (
            listed
            and len(value) == len(entries)
            and all(entry.fits(one) for entry, one in zip(entries, value, strict=True))
        )

    return Rule(f"({', '.join(entry.allowed for entry in entries)})", fits)


def _mapping(key: Rule, entry: Rule) -> Rule:
    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            key.fits(name) and entry.fits(one) for name, one in value.items()
        )

    def remedy(value: Any) -> str:
        if not isinstance(value, Mapping):
            return ""
        wrong = next((name for name, one in value.items() if not entry.fits(one)), None)
        return "" if wrong is None else f"Look at {wrong!r}: {entry.remedy(value[wrong])}"

    words = f"a mapping from {key.allowed} to {entry.allowed}"
    return Rule(words, fits, axes=entry.axes, remedy=remedy)


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "booleans"
    if tensor.is_complex():
        return "complex numbers"
    return "floating point numbers" if tensor.is_floating_point() else "integers"


_DTYPES = {"bool": "booleans", "int64": "integers", "float32": "floating point numbers"}


def _tensor(annotation: Any) -> Rule:
    """A tensor of a kind with some axes, as jaxtyping writes them."""
    axes = tuple(annotation.dim_str.split())
    named = annotation.dtypes if isinstance(annotation.dtypes, Collection) else ()
    kinds = {kind for dtype, kind in _DTYPES.items() if dtype in named}
    rest = any(axis.startswith("*") or axis == "..." for axis in axes)

    def fits(value: Any) -> bool:
        if not isinstance(value, Tensor) or (kinds and _kind(value) not in kinds):
            return False
        return value.ndim >= len(axes) - 1 if rest else value.ndim == len(axes)

    def remedy(value: Any) -> str:
        if not isinstance(value, Tensor):
            inside = getattr(value, "tokens", None)
            return "Pass batch.tokens" if isinstance(inside, Tensor) else "Pass a tensor"
        if not rest and value.ndim == len(axes) - 1 and axes[:1] == ("batch",):
            return "One document needs its batch axis: tokens[None]"
        return "Token ids and positions are whole: .long()" if kinds == {"integers"} else ""

    words = " or ".join(sorted(kinds)) or "a tensor"
    return Rule(f"{words} [{', '.join(axes)}]", fits, axes=axes or ("...",), remedy=remedy)
