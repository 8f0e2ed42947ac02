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
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from hooked_ssm.errors import ConfigError, HookedSSMError, ShapeError, unknown
from hooked_ssm.rules import ANYTHING, Rule, rule_of, shown

P = ParamSpec("P")
R = TypeVar("R")


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
