"""What a value must be, read off its annotation: one check for all arguments and fields.

    @checked                          # a function's arguments, before anything runs
    def analyse(model: HookedModel, tokens: Int[Tensor, "batch pos"], n: Count = 64): ...

    check_fields(self, TaskError)     # a dataclass' fields, in its __post_init__

Numbers are finite, True is no number and a string is no list. Tensors have the kind and the axes
that their annotation names, and one size per axis word over all arguments.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from hooked_ssm.errors import ConfigError, HookedSSMError, ShapeError, near, unknown

P = ParamSpec("P")
R = TypeVar("R")


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


def _is_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())


Count = Annotated[int, Rule("an integer >= 1", lambda value: value >= 1)]
Natural = Annotated[int, Rule("an integer >= 0", lambda value: value >= 0)]
Seed = Natural
Positive = Annotated[int | float, Rule("a finite number > 0", lambda value: value > 0)]
NonNegative = Annotated[int | float, Rule("a finite number >= 0", lambda value: value >= 0)]
Fraction = Annotated[int | float, Rule("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Words = Annotated[Sequence[str], Rule("a non-empty list of words", lambda value: len(value) > 0)]
Indices = Annotated[
    Sequence[int], Rule("a non-empty list of integers", lambda value: len(value) > 0)
]
AttentionMask = Annotated[
    Shaped[Tensor, "batch pos"],
    Rule("True (1) at real tokens and False (0) at padding, not an additive mask", _is_mask),
]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with its arguments checked against their annotations.

    Raises (the function returned):
        ShapeError: A tensor has another kind, other axes or other sizes, or is empty.
        ConfigError: Any other value that the annotation does not allow.
    """
    return checked_as(ConfigError, ShapeError)(function)


def checked_as(
    error: type[HookedSSMError], tensor_error: type[HookedSSMError] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return `checked` with other errors: of any value, and of tensors (the same if None)."""

    def wrapped(function: Callable[P, R]) -> Callable[P, R]:
        plain = inspect.unwrap(function)
        signature = inspect.signature(plain)
        title = plain.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]

        @functools.cache
        def rules() -> dict[str, Rule]:
            return {
                name: rule_of(eval_annotation(given.annotation, plain.__globals__))  # type: ignore[attr-defined]
                for name, given in signature.parameters.items()
                if given.annotation is not inspect.Parameter.empty
            }

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:  # Python's own message names the function and what is missing
                return function(*args, **kwargs)
            _check(arguments, rules(), f"{title}: ", error, tensor_error or error)
            return function(*args, **kwargs)

        return call

    return wrapped


def eval_annotation(annotation: Any, scope: dict[str, Any]) -> Any:
    """Return an annotation that may be written as a string."""
    if not isinstance(annotation, str):
        return annotation
    return typing.get_type_hints(
        type("annotated", (), {"__annotations__": {"it": annotation}}), scope, include_extras=True
    )["it"]


def check_fields(
    instance: Any, error: type[HookedSSMError] = ConfigError, prefix: str = ""
) -> None:
    """Check the fields of a dataclass, and make numpy's numbers Python's.

    Args:
        error: Raised if a field does not fit its annotation.
        prefix: What stands before a field's name in the message.
    """
    rules = _field_rules(type(instance))  # type: ignore[arg-type]
    values = {name: getattr(instance, name) for name in rules}
    _check(values, rules, prefix, error, error, empty=True)
    for name, value in values.items():
        if isinstance(value, np.generic) or (isinstance(value, Tensor) and not rules[name].axes):
            object.__setattr__(instance, name, value.item())


def _check(
    values: Mapping[str, Any],
    rules: Mapping[str, Rule],
    prefix: str,
    error: type[HookedSSMError],
    tensor_error: type[HookedSSMError],
    empty: bool = False,
) -> None:
    """Hold values to their rules, and tensors' sizes to each other."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, value in values.items():
        rule = rules.get(name, ANYTHING)
        about_tensors = isinstance(value, Tensor) or (rule.axes and not isinstance(value, str))
        if not rule.fits(value):
            raise (tensor_error if about_tensors else error)(prefix + _refusal(name, value, rule))
        for label, tensor in _tensors(name, value) if rule.axes else ():
            problem = _bind(label, tensor, rule.axes or (), sizes, empty)
            if problem:
                raise tensor_error(prefix + problem)


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an argument, by what messages call them."""
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", tensor) for key, tensor in value.items()]
    return [(name, value)] if isinstance(value, Tensor) else []


def _bind(
    what: str,
    tensor: Tensor,
    axes: tuple[str, ...],
    sizes: dict[str, tuple[int, str]],
    empty: bool,
) -> str:
    """What is wrong with a tensor's sizes, those of the arguments before it given; "" if right."""
    wanted = f"[{', '.join(axes)}]"
    for axis, size in zip(axes, tensor.shape, strict=False):
        if not axis.isidentifier():  # *anything: as many axes as there are
            break
        if size == 0 and not empty:
            return f"{what} is empty: {shown(tensor)}, wanted {wanted}"
        before, who = sizes.setdefault(axis, (size, what))
        if size != before:
            return (
                f"{what} is {shown(tensor)}, {wanted}, so {axis} is {size}; but it is {before} in "
                f"{who}: they must agree"
            )
    return ""


def check_value(
    name: str, value: Any, annotation: Any, error: type[HookedSSMError] = ConfigError
) -> None:
    """Raise `error` if a value is not what an annotation allows; for arguments checked singly."""
    rule = rule_of(annotation)
    if not rule.fits(value):
        raise error(_refusal(name, value, rule))


@functools.cache
def _field_rules(kind: type) -> dict[str, Rule]:
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError:  # a type that only the function around the class, or a type checker, knows
        hints = {}
    return {field.name: rule_of(hints.get(field.name, Any)) for field in fields(kind)}


def _refusal(name: str, value: Any, rule: Rule) -> str:
    if isinstance(value, str) and rule.choices:
        return unknown(name, value, rule.choices)
    remedy = rule.remedy(value)
    return f"{name}={shown(value)}; allowed: {rule.allowed}" + (f". {remedy}" if remedy else "")


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
