"""Every op in one table: its inputs at awkward sizes, and one step of it, written down once more.

The steps are the definitions of the READMEs on one token, without the library's code; `naive_loop`
runs them token by token, and can edit the state after any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooked_ssm.ops.delta_rule import (
    delta_rule,
    delta_rule_from_writes,
    delta_rule_given_error,
    prediction_error,
)
from hooked_ssm.ops.gla import gla
from hooked_ssm.ops.linear_attention import linear_attention, normalised_linear_attention
from hooked_ssm.ops.linear_scan import linear_scan
from hooked_ssm.ops.long_conv import long_conv
from hooked_ssm.ops.selective_scan import selective_scan
from hooked_ssm.ops.short_conv import short_conv
from hooked_ssm.ops.ssd import decayed_linear_attention, ssd
from tests.ops import (
    test_delta_rule,
    test_diagonal_ssm,
    test_gla,
    test_linear_attention,
    test_long_conv,
    test_selective_scan,
    test_short_conv,
    test_ssd,
)
from tests.ops.checks import Tensors, randn

Step = Callable[[Tensor, Any], tuple[Tensor, Tensor]]
"""(state before the token, its inputs by name) -> (what is read, the state after it)."""


@dataclass(frozen=True)
class Op:
    """One op as the shared tests call it.

    Attributes:
        run: The op.
        make: `make(batch, length, *size)` gives float64 inputs, the initial state among them.
        sizes: Awkward ones; the first is one program of a kernel per document.
        along_pos: Inputs with a position axis.
        step: The op on one token.
        impls: Those that it has.
        start, final, wanted: Argument with the initial state, field with the final one, and the
            option that asks for states; None where there is none.
        wide: Inputs that cannot be of low precision: complex ones.
        variant: Runs on the kernel of another row with hardly a line of its own.
    """

    run: Callable[..., Any]
    make: Callable[..., dict[str, Tensor]]
    sizes: tuple[tuple[int, ...], ...]
    along_pos: tuple[str, ...]
    step: Step
    impls: tuple[str, ...] = ("reference", "cpu", "triton")
    start: str = "initial_state"
    final: str | None = "final_state"
    wanted: str | None = "return_states"
    wide: tuple[str, ...] = ()
    variant: bool = False


class Loop(NamedTuple):
    """What `naive_loop` returns; `states` at every position."""

    y: Tensor
    states: Tensor
    final: Tensor


def naive_loop(
    op: Op, inputs: Tensors, zero: Tensor, edits: Mapping[int, Callable[[Tensor], Tensor]] = {}
) -> Loop:
    """Step through the tokens; an edit replaces the state handed on after its position."""
    state, outputs, states = inputs.get(op.start, zero), [], []
    others = {n: x for n, x in inputs.items() if n not in (*op.along_pos, op.start)}
    for t in range(inputs[op.along_pos[0]].shape[1]):
        token = {n: inputs[n][:, t] for n in op.along_pos if n in inputs}
        y, state = op.step(state, Inputs(token | others))
        outputs.append(y)
        states.append(state)
        state = edits[t](state) if t in edits else state
    grows = states[0].shape != states[-1].shape  # a long convolution's past
    return Loop(torch.stack(outputs, 1), states[-1] if grows else torch.stack(states, 1), state)


class Inputs:
    """The inputs of one token as attributes; None for one that is not given."""

    def __init__(self, given: dict[str, Tensor]):
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> None:
        return None


def by_head(x: Tensor, like: Tensor) -> Tensor:
    """Heads of a group read the same: [batch, group, ...] -> [batch, head, ...]."""
    return x.repeat_interleave(like.shape[1] // x.shape[1], dim=1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def read(S: Tensor, q: Tensor) -> Tensor:
    """S^T q"""
    return torch.einsum("bhfd,bhf->bhd", S, q)


def selective_step(h: Tensor, i: Any) -> tuple[Tensor, Tensor]:
    B, C = (by_head(x if x.ndim == 3 else x[:, None], i.x) for x in (i.B, i.C))
    h = torch.exp(i.dt[..., None] * i.A) * h + (i.dt * i.x)[..., None] * B
    return (h * C).sum(-1), h


def ssd_step(h: Tensor, i: Any) -> tuple[Tensor, Tensor]:
    B, C = by_head(i.B, i.x), by_head(i.C, i.x)
    h = torch.exp(i.dt * i.A)[..., None, None] * h + outer(i.dt[..., None] * i.x, B)
    return torch.einsum("bhdn,bhn->bhd", h, C), h


def linear_step(S: Tensor, i: Any, scaled: bool = False) -> tuple[Tensor, Tensor]:
    """No decay, one per head, or one per key channel."""
    a = 0.0 if i.log_decay is None else i.log_decay
    if isinstance(a, Tensor):
        a = a[..., None, None] if a.ndim == 2 else a[..., None]
        S = torch.exp(a) * S
    S = S + outer(by_head(i.k, i.v), i.v)
    return read(S, by_head(i.q, i.v)) * (i.k.shape[-1] ** -0.5 if scaled else 1), S


def normalised_step(S: Tensor, i: Any) -> tuple[Tensor, Tensor]:
    S = S + outer(i.k, torch.cat([i.v, torch.ones_like(i.v[..., :1])], -1))
    y = read(S, i.q)
    return torch.cat([y[..., :-1] / (y[..., -1:] + 1e-12), y[..., -1:]], -1), S


def delta_step(S: Tensor, i: Any, gives: str = "y") -> tuple[Tensor, Tensor]:
    """The delta rule and its halves: y, the error, or the state itself."""
    S = S if i.log_decay is None else torch.exp(i.log_decay)[..., None, None] * S
    beta = i.beta if i.beta.ndim == 3 else i.beta[..., None]
    if i.write is not None:
        S = S - outer(i.k, beta * read(S, i.k)) + i.write
        return S, S
    error = i.v - read(S, i.k) if i.error is None else i.error
    S = S + outer(i.k, beta * error)
    return (error, S) if gives == "error" else (read(S, i.q) * i.k.shape[-1] ** -0.5, S)


def diagonal_step(x: Tensor, i: Any) -> tuple[Tensor, Tensor]:
    between = (1,) * (i.u.ndim - 2)
    dA, dB, C = (
        test_diagonal_ssm.as_complex(p).reshape(p.shape[0], *between, -1) for p in (i.dA, i.dB, i.C)
    )
    x = dA * torch.view_as_complex(x.contiguous()) + dB * i.u[..., None]
    return 2 * (C * x).sum(-1).real, torch.view_as_real(x)


def short_conv_step(window: Tensor, i: Any) -> tuple[Tensor, Tensor]:
    seen = torch.cat([window, i.x[..., None]], -1)
    return (seen * i.weight).sum(-1) + i.bias, seen[..., 1:]


def long_conv_step(past: Tensor, i: Any) -> tuple[Tensor, Tensor]:
    past = torch.cat([past, i.u[:, None]], 1)
    taps = min(past.shape[1], i.filter.shape[1])
    latest_first = past.flip(1)[:, :taps]
    return (latest_first * i.filter[:, :taps].T).sum(1) + i.skip * i.u, past


def linear_scan_step(h: Tensor, i: Any) -> tuple[Tensor, Tensor]:
    h = i.decay * h + i.write
    return h, h


def make_linear_scan(batch: int, length: int, size: int) -> dict[str, Tensor]:
    shape = (batch, length, size)
    start = randn(batch, size, seed=2)
    return {"decay": randn(*shape, seed=0).sigmoid(), "write": randn(*shape, seed=1)} | {
        "initial_state": start
    }


def make_normalised(batch: int, length: int, heads: int, features: int, width: int) -> dict:
    inputs = test_linear_attention.make(batch, length, heads, features, width)
    start = randn(batch, heads, features, width + 1, seed=3)
    start = torch.cat([start[..., :-1], start[..., -1:].abs()], -1)  # sums of positive keys
    return {**test_linear_attention.positive(inputs), "initial_state": start}


def make_delta(*size: int, drop: tuple[str, ...] = (), **more: str) -> dict[str, Tensor]:
    """more: names of inputs to add, and what they look like."""
    inputs = test_delta_rule.make(*size)
    added = {"value": inputs["v"], "state": outer(inputs["k"], inputs["v"])}
    extra = {name: randn(*added[kind].shape, seed=7) for name, kind in more.items()}
    return {**test_delta_rule.without(inputs, *drop), **extra}


def with_normaliser(**arguments: Any) -> Any:
    """Based's attention, its normaliser as the last column of y: alone y may not depend on q."""
    out = normalised_linear_attention(**arguments)
    y = torch.cat([out.y, out.normalizer.to(out.y.dtype)[..., None]], -1)
    return out._replace(y=y, normalizer=None)


def explicit_scan(
    decay: Tensor, write: Tensor, initial_state: Tensor | None = None, impl: str = ""
):
    return linear_scan(decay, write, initial_state)


MATRICES = ((1, 5, 3), (3, 1, 3), (2, 3, 1))
"""Heads, key and value channels."""
HALF = {"final": None, "wanted": None}
SCAN = ("q", "k", "v", "log_decay")
DELTA = ("q", "k", "v", "beta", "log_decay")
NO_KERNEL = ("reference", "cpu")

OPS: dict[str, Op] = {
    "selective_scan": Op(
        selective_scan,
        test_selective_scan.make,
        ((3, 5), (1, 1), (6, 3, 3), (5, 16, 1)),
        ("x", "dt", "B", "C"),
        selective_step,
    ),
    "ssd": Op(
        ssd,
        test_ssd.make,
        ((1, 1, 3, 5), (4, 2, 1, 3), (3, 3, 5, 1)),
        ("x", "dt", "B", "C"),
        ssd_step,
    ),
    "decayed_linear_attention": Op(
        decayed_linear_attention,
        test_ssd.make_decayed,
        ((1, 1), (4, 2)),
        SCAN,
        linear_step,
        variant=True,
    ),
    "linear_attention": Op(
        linear_attention,
        test_linear_attention.make,
        MATRICES,
        SCAN[:3],
        linear_step,
        variant=True,
    ),
    "normalised_linear_attention": Op(
        with_normaliser, make_normalised, MATRICES, SCAN[:3], normalised_step
    ),
    "gla": Op(gla, test_gla.make, MATRICES, SCAN, partial(linear_step, scaled=True)),
    "delta_rule": Op(
        delta_rule, partial(make_delta, drop=("log_decay",)), MATRICES, DELTA[:4], delta_step
    ),
    "gated_delta_rule": Op(delta_rule, make_delta, MATRICES, DELTA, delta_step),
    "delta_rule-beta_per_value": Op(
        delta_rule,
        lambda *size: test_delta_rule.per_value_channel(make_delta(*size)),
        MATRICES,
        DELTA,
        delta_step,
        variant=True,
    ),
    "prediction_error": Op(
        prediction_error,
        partial(make_delta, drop=("q",)),
        MATRICES,
        DELTA[1:],
        partial(delta_step, gives="error"),
        variant=True,
        **HALF,
    ),
    "delta_rule_given_error": Op(
        delta_rule_given_error,
        partial(make_delta, drop=("v",), error="value"),
        MATRICES,
        ("q", "k", "error", "beta", "log_decay"),
        delta_step,
        variant=True,
    ),
    "delta_rule_from_writes": Op(
        delta_rule_from_writes,
        partial(make_delta, drop=("q", "v"), write="state"),
        MATRICES,
        ("k", "beta", "write", "log_decay"),
        delta_step,
        variant=True,
        **HALF,
    ),
    "diagonal_ssm": Op(
        test_diagonal_ssm.in_reals,
        test_diagonal_ssm.make,
        ((1, 3), (3, 1), (1, 5, 2, 3)),
        ("u",),
        diagonal_step,
        wide=("dA", "dB", "C", "initial_state"),
    ),
    "short_conv": Op(
        short_conv,
        test_short_conv.make,
        ((5, 4), (1, 1), (3, 7)),
        ("x",),
        short_conv_step,
        start="initial_window",
        final="final_window",
        wanted="return_windows",
    ),
    "long_conv": Op(
        long_conv,
        test_long_conv.make,
        ((3, 40, 5), (1, 2, 1), (5, 300, 3)),
        ("u",),
        long_conv_step,
        impls=NO_KERNEL,
        start="history",
        **HALF,
    ),
    "linear_scan": Op(
        explicit_scan,
        make_linear_scan,
        ((1,), (3,)),
        ("decay", "write"),
        linear_scan_step,
        impls=("reference",),
        **HALF,
    ),
}
