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

from hooked_ssm.errors import ConfigError, HookedSSMError, ShapeError, unknown

P = ParamSpec("P")
R = TypeVar("R")


class Rule(NamedTuple):
    """What a value must be; also stands in `Annotated` to narrow a type.

    Attributes:
        allowed: In words, for messages.
        fits: Whether a value is that.
        choices: The words allowed, if it is one of some words.
        axes: A tensor's axis words, if it is a tensor.
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
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())


Count = Annotated[int, Rule("an integer >= 1", lambda value: value >= 1)]
Natural = Annotated[int, Rule("an integer >= 0", lambda value: value >= 0)]
Seed = Annotated[int, Rule("an integer >= 0", lambda value: value >= 0)]
Positive = Annotated[int | float, Rule("a finite number > 0", lambda value: value > 0)]
NonNegative = Annotated[int | float, Rule("a finite number >= 0", lambda value: value >= 0)]
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
    plain = inspect.unwrap(function)
    signature = inspect.signature(plain)

    @functools.cache
    def rules() -> dict[str, Rule]:
        scope = plain.__globals__  # type: ignore[attr-defined]
        given = {name: p.annotation for name, p in signature.parameters.items()}
        return {
            name: rule_of(eval_annotation(annotation, scope))
            for name, annotation in given.items()
            if annotation is not inspect.Parameter.empty
        }

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:  # Python's own message names the function and what is missing
            return function(*args, **kwargs)
        _check_arguments(plain.__name__, arguments, rules())
        return function(*args, **kwargs)

    return call


def eval_annotation(annotation: Any, scope: dict[str, Any]) -> Any:
    """Return an annotation that may be written as a string."""
    if not isinstance(annotation, str):
        return annotation
    return typing.get_type_hints(
        type("annotated", (), {"__annotations__": {"it": annotation}}), scope, include_extras=True
    )["it"]


def _check_arguments(
    function: str, arguments: Mapping[str, Any], rules: Mapping[str, Rule]
) -> None:
    sizes: dict[str, tuple[int, str]] = {}
    for name, value in arguments.items():
        rule = rules.get(name)
        if rule is None:
            continue
        if not rule.fits(value):
            kind = ShapeError if isinstance(value, Tensor) or rule.axes else ConfigError
            raise kind(f"{function}: {_refusal(name, value, rule)}")
        if isinstance(value, Tensor) and rule.axes:
            _bind(f"{function}: {name}", value, rule.axes, sizes)


def _bind(
    what: str, tensor: Tensor, axes: tuple[str, ...], sizes: dict[str, tuple[int, str]]
) -> None:
    """Hold a tensor's sizes against those that the arguments before it have."""
    for axis, size in zip(axes, tensor.shape, strict=False):
        if not axis.isidentifier():  # *anything: as many axes as there are
            return
        if size == 0:
            raise ShapeError(f"{what} is empty: {shown(tensor)}, wanted [{', '.join(axes)}]")
        before, who = sizes.setdefault(axis, (size, what.rpartition(" ")[2]))
        if size != before:
            raise ShapeError(
                f"{what} is {shown(tensor)}, [{', '.join(axes)}], so {axis} is {size}; but it is "
                f"{before} in {who}: they must agree"
            )


def check_fields(
    instance: Any, error: type[HookedSSMError] = ConfigError, prefix: str = ""
) -> None:
    """Check the fields of a dataclass, and make numpy's numbers Python's.

    Args:
        error: Raised if a field does not fit its annotation.
        prefix: What stands before a field's name in the message.
    """
    for name, rule in _field_rules(type(instance)).items():  # type: ignore[arg-type]
        value = getattr(instance, name)
        if not rule.fits(value):
            raise error(prefix + _refusal(name, value, rule))
        if isinstance(value, np.generic) or (isinstance(value, Tensor) and not rule.axes):
            object.__setattr__(instance, name, value.item())


@functools.cache
def _field_rules(kind: type) -> dict[str, Rule]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: rule_of(hints[field.name]) for field in fields(kind)}


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
        listed = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
        if isinstance(value, Tensor | np.ndarray) and value.ndim != 1:
            return False
        return listed and all(entry.fits(one) for one in value)

    def remedy(value: Any) -> str:
        return f"Put it in a list: [{shown(value)}]" if entry.fits(value) else ""

    plural = entry.allowed.removeprefix("a finite ").removeprefix("an ").removeprefix("a ")
    words = f"{plural}s" if not entry.choices else f"words of {entry.allowed}"
    return Rule(f"a list of {words}", fits, remedy=remedy)


def _mapping(key: Rule, entry: Rule) -> Rule:
    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            key.fits(name) and entry.fits(one) for name, one in value.items()
        )

    return Rule(f"a mapping from {key.allowed} to {entry.allowed}", fits)


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
            return "Pass a tensor"
        if not rest and value.ndim == len(axes) - 1 and axes[:1] == ("batch",):
            return "One document needs its batch axis: tokens[None]"
        return "Token ids and positions are whole: .long()" if kinds == {"integers"} else ""

    words = " or ".join(sorted(kinds)) or "a tensor"
    return Rule(f"{words} [{', '.join(axes)}]", fits, axes=axes or ("...",), remedy=remedy)
