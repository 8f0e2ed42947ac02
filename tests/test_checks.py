"""What annotations ask of values: fitting ones pass, others are refused by name, with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_ssm.checks import (
    AttentionMask,
    Count,
    Indices,
    NonNegative,
    Positive,
    Seed,
    Words,
    check_fields,
    checked,
    checked_as,
)
from hooked_ssm.errors import ConfigError, ShapeError, TaskError
from hooked_ssm.rules import rule_of

IDS = torch.zeros(2, 3, dtype=torch.long)
NAN, INF = float("nan"), float("inf")

FITTING: list[tuple[Any, list[Any]]] = [
    (int, [0, -3, np.int64(2), torch.tensor(2)]),
    (float, [0, 1.5, np.float32(0.5), np.int64(2)]),
    (bool, [True, np.True_]),
    (Count, [1, 10**9]),
    (Seed, [0]),
    (Positive, [1, 1e-9]),
    (NonNegative, [0, 0.0]),
    (Literal["a", "b"], ["a"]),
    (int | None, [None, 3]),
    (Words, [["a"], ("a", "b"), {"a": 1}.keys()]),
    (Indices, [[0], range(2), np.arange(2), torch.arange(2)]),
    (Sequence[str], [[]]),
    (Sequence[int] | Literal["all"], ["all", [1]]),
    (Mapping[str, int], [{}, {"a": 1}]),
    (Callable[[int], int], [abs]),
    (torch.Generator, [torch.Generator()]),
    (Int[Tensor, "batch pos"], [IDS, IDS.int()]),
    (Int[Tensor, "batch *choices"], [IDS, IDS[0], IDS[None]]),
    (Float[Tensor, " batch"], [torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)]),
    (AttentionMask, [IDS == 0, torch.ones(2, 3), IDS]),
    (tuple[str, float], [("a", 1), ["a", 0.5]]),
    (tuple[int, ...], [(), (1, 2)]),
    (Any, [object()]),
]

OTHERS: list[tuple[Any, list[Any]]] = [
    (int, [True, 1.0, "1", None, NAN, np.True_, torch.tensor(1.0), torch.tensor([1])]),
    (float, [True, "0.1", NAN, INF, None, 1j]),
    (bool, [1, "yes", None]),
    (Count, [0, -1, True, 1.0, "1"]),
    (Seed, [-1]),
    (Positive, [0, NAN]),
    (NonNegative, [-1e-9]),
    (Literal["a", "b"], ["c", 1, None, ["a"]]),
    (int | None, ["3", 3.5]),
    (Words, ["a", [], [1], None, b"a"]),
    (Indices, [0, [], [0.5], [True], "01", torch.zeros(2), torch.zeros(2, 2).long()]),
    (Sequence[int] | Literal["all"], ["al", ["a"]]),
    (Mapping[str, int], [[], {"a": "b"}, {1: 1}]),
    (Callable[[int], int], ["abs", None]),
    (tuple[str, float], [("a",), (1, "a"), "ab", 3]),
    (tuple[int, ...], [("a",), 1]),
    (torch.Generator, [0, None]),
    (Int[Tensor, "batch pos"], [IDS[0], IDS.float(), IDS == 0, [[0]], IDS[None]]),
    (Bool[Tensor, "batch pos"], [IDS]),
    (AttentionMask, [torch.full((2, 3), -1e9), torch.ones(3), [[True]]]),
]


@pytest.mark.parametrize(("annotation", "value"), [(a, v) for a, vs in FITTING for v in vs])
def test_what_fits(annotation, value):
    assert rule_of(annotation).fits(value)


@pytest.mark.parametrize(("annotation", "value"), [(a, v) for a, vs in OTHERS for v in vs])
def test_what_does_not(annotation, value):
    assert not rule_of(annotation).fits(value)


@checked
def analyse(
    tokens: Int[Tensor, "batch pos"],
    read_at: Int[Tensor, " batch"] | None = None,
    *,
    layers: Indices | None = None,
    how: Literal["mean", "sum"] = "mean",
    attention_mask: AttentionMask | None = None,
    generator: torch.Generator | None = None,
    at: Mapping[str, Int[Tensor, " batch"]] | None = None,
    anything=None,
) -> int:
    """Return what it is told to."""
    return 7


class Sampler:
    """Something with a method and errors of its own."""

    @checked_as(TaskError)
    def draw(self, n: Count) -> int:
        return n


def test_methods_and_other_errors():
    assert Sampler().draw(2) == 2
    with pytest.raises(TaskError, match="Sampler.draw: n=0; allowed: an integer >= 1"):
        Sampler().draw(0)


def test_the_function_stays_what_it_is():
    assert analyse(IDS, IDS[:, 0], layers=[1], attention_mask=IDS == 0) == 7
    assert analyse.__doc__ == "Return what it is told to." and analyse.__name__ == "analyse"
    with pytest.raises(TypeError, match=r"analyse\(\) missing"):
        analyse()
    with pytest.raises(TypeError, match="layer"):
        analyse(IDS, layer=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": IDS[0]}, ShapeError, r"tokens=int64 \[3\].*\[batch, pos\].*tokens\[None\]"),
        ({"tokens": IDS.float()}, ShapeError, r"analyse: tokens=float32 .*\.long\(\)"),
        ({"tokens": [[1]]}, ShapeError, "Pass a tensor"),
        (
            {"at": {"key": IDS[0]}},
            ShapeError,
            r"at\['key'\] is .*batch is 3; but it is 2 in",
        ),
        ({"tokens": IDS[:0]}, ShapeError, "tokens is empty"),
        ({"read_at": IDS[0]}, ShapeError, "batch is 3; but it is 2 in tokens"),
        ({"attention_mask": torch.ones(2, 4)}, ShapeError, "pos is 4; but it is 3 in tokens"),
        ({"attention_mask": torch.full((2, 3), -1e9)}, ShapeError, "not an additive mask"),
        ({"layers": 1}, ConfigError, r"layers=1; allowed: .*Put it in a list: \[1\]"),
        ({"layers": []}, ConfigError, r"layers=\[\]; allowed: a non-empty list of integers"),
        ({"how": "meen"}, ConfigError, "unknown how 'meen'; did you mean 'mean'"),
        ({"generator": 3}, ConfigError, "generator=3.*manual_seed"),
    ],
)
def test_messages_say_what_got_allowed_and_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        analyse(**{"tokens": IDS, **arguments})


def test_fields_are_checked_and_numbers_of_numpy_made_plain():
    @dataclass(frozen=True)
    class Sizes:
        count: int = 3
        share: float = 0.5

        def __post_init__(self) -> None:
            check_fields(self, TaskError, prefix="sizes: ")

    assert type(Sizes(np.int64(4)).count) is int
    with pytest.raises(TaskError, match="sizes: count='3'; allowed: an integer"):
        Sizes("3")
    with pytest.raises(TaskError, match="share=nan"):
        Sizes(share=NAN)
