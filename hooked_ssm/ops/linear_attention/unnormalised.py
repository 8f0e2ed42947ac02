"""Linear attention: attention without the softmax, so that its past is one matrix per head."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.decayed_pattern import decayed_pattern
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.linear_attention.cpu import linear_attention_cpu
from hooked_ssm.ops.linear_attention.reference import linear_attention_reference
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.shapes import Pattern

BACKENDS = Backends(
    "linear_attention",
    linear_attention_reference,
    linear_attention_cpu,
    "hooked_ssm.ops.linear_attention.triton:linear_attention_triton",
)


def linear_attention(
    q: Float[Tensor, "batch pos head feature"],
    k: Float[Tensor, "batch pos head feature"],
    v: Float[Tensor, "batch pos head d_head"],
    *,
    initial_state: Float[Tensor, "batch head feature d_head"] | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Sum the values, weighted by the products of their keys with the query; no normaliser.

    S[t] = S[t-1] + k[t] v[t]^T;   y[t] = S[t]^T q[t]

    Args:
        q, k: After the feature map. Nothing is scaled here: scale q where a model does.
        initial_state: S[-1]; zeros if None.
        return_states: False, True for every position, or the positions wanted.
    Returns:
        states[:, t] is S *after* token t, [batch, wanted, head, feature, d_head]; float32, or
        float64 if q, k or v is.
    Raises:
        ShapeError: Sizes, devices or dtypes do not fit, or a position lies outside the sequence.
        KernelUnavailableError: impl="triton" where it cannot run.
    Source: Katharopoulos et al. 2020, without its normaliser.
    """
    bind_axes(
        "linear_attention",
        {
            "q": (q, "batch pos head feature"),
            "k": (k, "batch pos head feature"),
            "v": (v, "batch pos head d_head"),
            "initial_state": (initial_state, "batch head feature d_head"),
        },
    )
    return BACKENDS.pick(impl, q.device)(q, k, v, initial_state, return_states)


def linear_attention_pattern(
    q: Float[Tensor, "batch pos head feature"], k: Float[Tensor, "batch pos head feature"]
) -> Pattern:
    """Return the token-mixing matrix: pattern[t, s] = q[t] . k[s] for s <= t, else 0.

    `einsum("bhqk,bkhd->bqhd", pattern, v)` is the output from a zero initial state.

    Raises:
        ShapeError: q and k do not fit.
    """
    axes = "batch pos head feature"
    bind_axes("linear_attention_pattern", {"q": (q, axes), "k": (k, axes)})
    dtype = core_dtype(q, k)
    return decayed_pattern(q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2), None)
