"""The delta rule, plain and gated: a linear memory that writes what it got wrong.

    S'   = exp(g[t]) S[t-1]                      g = 0 for the plain delta rule (DeltaNet)
    e[t] = v[t] - S'^T k[t]                      prediction error
    S[t] = S' + beta[t] k[t] e[t]^T              = (I - beta k k^T) S' + beta k v^T
    y[t] = scale S[t]^T q[t]

Domain: keys of at most unit norm (`l2_normalise`) and beta in [0, 2]; then every step is a
contraction. Outside it the state can grow without bound, and a result that is not finite raises.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.delta_rule import cpu, reference
from hooked_ssm.ops.delta_rule.finite import require_finite
from hooked_ssm.ops.delta_rule.pattern import delta_rule_pattern
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype

__all__ = [
    "delta_rule",
    "delta_rule_from_writes",
    "delta_rule_given_error",
    "delta_rule_pattern",
    "l2_normalise",
    "prediction_error",
]

Vectors = Float[Tensor, "*axes width"]
PerKey = Float[Tensor, "batch pos head d_key"]
PerValue = Float[Tensor, "batch pos head d_head"]
PerHead = Float[Tensor, "batch pos head"]
State = Float[Tensor, "batch head d_key d_head"]
States = Float[Tensor, "batch pos head d_key d_head"]

_KEY, _VALUE, _HEAD = "batch pos head d_key", "batch pos head d_head", "batch pos head"
_STATE = "batch head d_key d_head"

_KERNELS = "hooked_ssm.ops.delta_rule.triton"
_delta_rule = Backends("delta_rule", reference.delta_rule, cpu.delta_rule, f"{_KERNELS}:delta_rule")
_prediction_error = Backends(
    "prediction_error",
    reference.prediction_error,
    cpu.prediction_error,
    f"{_KERNELS}:prediction_error",
)
_given_error = Backends(
    "delta_rule_given_error",
    reference.delta_rule_given_error,
    cpu.delta_rule_given_error,
    f"{_KERNELS}:delta_rule_given_error",
)
_from_writes = Backends(
    "delta_rule_from_writes",
    reference.delta_rule_from_writes,
    cpu.delta_rule_from_writes,
    f"{_KERNELS}:delta_rule_from_writes",
)


def l2_normalise(x: Vectors, eps: float = 1e-6) -> Vectors:
    """Divide by the norm over the last axis: x / sqrt(sum x^2 + eps).

    A zero vector stays zero. Computed and returned in float32 (float64 for float64), since keys
    rounded to bfloat16 are no longer of unit norm.
    Source: fla's l2norm, as its DeltaNet and GatedDeltaNet layers use it on queries and keys.
    """
    x = x.to(core_dtype(x))
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def delta_rule(
    q: PerKey,
    k: PerKey,
    v: PerValue,
    beta: PerHead | PerValue,
    *,
    log_decay: PerHead | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Run the (gated) delta rule and return outputs, states and the final state.

    S' = exp(g) S[t-1];   S[t] = S' + beta k (v - S'^T k)^T;   y[t] = scale S[t]^T q

    Args:
        q, k: Queries; keys of at most unit norm, used as given. [batch, pos, head, d_key]
        v: Values. [batch, pos, head, d_head]
        beta: Write strength in [0, 2]. [batch, pos, head], or one per value channel
            [batch, pos, head, d_head] at d_head times the work and memory
        log_decay: g <= 0; None for the plain delta rule. [batch, pos, head]
        scale: Factor on q; d_key ** -0.5 if None.
        initial_state: S[-1]; zeros if None. [batch, head, d_key, d_head]
        return_states: False, True for every position, or the positions wanted.
    Returns:
        y in the dtype of v. states[:, i] is S *after* the token, float32 (float64 if any input is).
    Raises:
        ShapeError: Shapes that do not fit.
        DivergedError: The result is not finite (keys too long, or NaN among the inputs).
        KernelUnavailableError: impl="triton" where it cannot run.
    Source: Yang et al. 2024 (DeltaNet), Yang, Kautz & Hatamizadeh 2024 (Gated DeltaNet).
    """
    bind_axes(
        "delta_rule",
        {
            "k": (k, _KEY),
            "q": (q, _KEY),
            "v": (v, _VALUE),
            "beta": (beta, _beta_axes(beta)),
            "log_decay": (log_decay, _HEAD),
            "initial_state": (initial_state, _STATE),
        },
    )
    dtype = v.dtype
    q, k, v, beta, log_decay, state = _core(q, k, v, beta, log_decay, initial_state)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    run = _delta_rule.pick(impl, k.device)
    beta, state = _with_value_axis(beta), _or_zeros(state, k, v.shape[-1])
    out = run(q, k, v, beta, log_decay, scale, state, return_states)
    require_finite("delta_rule", out.final_state, k, beta)
    return out._replace(y=out.y.to(dtype))


def prediction_error(
    k: PerKey,
    v: PerValue,
    beta: PerHead | PerValue,
    *,
    log_decay: PerHead | None = None,
    initial_state: State | None = None,
    impl: Impl = "auto",
) -> PerValue:
    """Return e[t] = v[t] - S'^T k[t], what the memory got wrong at each token.

    Arguments and errors as for `delta_rule`, which is `delta_rule_given_error` of this. To write
    something else at t and let later errors respond, add the change to v instead.

    Returns:
        float32 (float64 if any input is). [batch, pos, head, d_head]
    """
    bind_axes(
        "prediction_error",
        {
            "k": (k, _KEY),
            "v": (v, _VALUE),
            "beta": (beta, _beta_axes(beta)),
            "log_decay": (log_decay, _HEAD),
            "initial_state": (initial_state, _STATE),
        },
    )
    k, v, beta, log_decay, state = _core(k, v, beta, log_decay, initial_state)
    run = _prediction_error.pick(impl, k.device)
    beta, state = _with_value_axis(beta), _or_zeros(state, k, v.shape[-1])
    error = run(k, v, beta, log_decay, state)
    require_finite("prediction_error", error, k, beta)
    return error


def delta_rule_given_error(
    q: PerKey,
    k: PerKey,
    error: PerValue,
    beta: PerHead | PerValue,
    *,
    log_decay: PerHead | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Run the delta rule with its prediction errors given: nothing is erased but through them.

    S[t] = exp(g) S[t-1] + beta k error^T;   y[t] = scale S[t]^T q

    This is decayed linear attention, for any keys. Arguments, result and errors otherwise as for
    `delta_rule`; y comes in the dtype of `error`. [batch, pos, head, d_head]
    """
    bind_axes(
        "delta_rule_given_error",
        {
            "k": (k, _KEY),
            "q": (q, _KEY),
            "error": (error, _VALUE),
            "beta": (beta, _beta_axes(beta)),
            "log_decay": (log_decay, _HEAD),
            "initial_state": (initial_state, _STATE),
        },
    )
    dtype = error.dtype
    q, k, error, beta, log_decay, state = _core(q, k, error, beta, log_decay, initial_state)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    run = _given_error.pick(impl, k.device)
    beta, state = _with_value_axis(beta), _or_zeros(state, k, error.shape[-1])
    out = run(q, k, error, beta, log_decay, scale, state, return_states)
    return out._replace(y=out.y.to(dtype))


def delta_rule_from_writes(
    k: PerKey,
    beta: PerHead | PerValue,
    write: States,
    *,
    log_decay: PerHead | None = None,
    initial_state: State | None = None,
    impl: Impl = "auto",
) -> States:
    """Return every state, given what is added at each token; keys and betas still erase.

    S[t] = (I - beta k k^T) exp(g) S[t-1] + write[t]

    With write = beta k v^T these are the states of `delta_rule`. Read them as scale S[t]^T q[t].

    Args:
        write: [batch, pos, head, d_key, d_head]; the rest as for `delta_rule`.
    Returns:
        The state after each token, float32 (float64 if any input is).
    Raises:
        ShapeError: Shapes that do not fit.
        DivergedError: The result is not finite (keys too long, or NaN among the inputs).
    """
    bind_axes(
        "delta_rule_from_writes",
        {
            "k": (k, _KEY),
            "write": (write, f"{_KEY} d_head"),
            "beta": (beta, _beta_axes(beta)),
            "log_decay": (log_decay, _HEAD),
            "initial_state": (initial_state, _STATE),
        },
    )
    k, beta, log_decay, write, state = _core(k, beta, log_decay, write, initial_state)
    run = _from_writes.pick(impl, k.device)
    beta, state = _with_value_axis(beta), _or_zeros(state, k, write.shape[-1])
    states = run(k, beta, log_decay, write, state)
    require_finite("delta_rule_from_writes", states, k, beta)
    return states


def _core(*tensors: Tensor | None) -> list[Any]:
    """All tensors in the dtype the recurrence runs in."""
    core: torch.dtype = core_dtype(*(x for x in tensors if x is not None))
    return [None if x is None else x.to(core) for x in tensors]


def _beta_axes(beta: Tensor) -> str:
    return _VALUE if beta.ndim == 4 else _HEAD


def _with_value_axis(beta: Tensor) -> Tensor:
    """[batch, pos, head, 1 or d_head]"""
    return beta if beta.ndim == 4 else beta.unsqueeze(-1)


def _or_zeros(state: Tensor | None, k: Tensor, d_head: int) -> Tensor:
    if state is not None:
        return state
    batch, _, head, d_key = k.shape
    return k.new_zeros(batch, head, d_key, d_head)
