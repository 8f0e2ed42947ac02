"""Linear attention whose weights sum to one: v gets a column of ones, y is divided by its sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_ssm.ops.dispatch import Impl
from hooked_ssm.ops.linear_attention.unnormalised import linear_attention, linear_attention_pattern
from hooked_ssm.ops.output import StatesWanted, core_dtype
from hooked_ssm.shapes import Pattern


class NormalisedOutput(NamedTuple):
    """Outputs of normalised linear attention.

    Attributes:
        y: In the dtype of v. [batch, pos, head, d_head]
        normalizer: Sum of the unnormalised weights, without eps. [batch, pos, head]
        states: As in ScanOutput; the last value column sums the keys. [batch, wanted, head,
            feature, d_head+1]
        final_state: [batch, head, feature, d_head+1]
    """

    y: Tensor
    normalizer: Tensor
    states: Tensor | None
    final_state: Tensor


def normalised_linear_attention(
    q: Float[Tensor, "batch pos head feature"],
    k: Float[Tensor, "batch pos head feature"],
    v: Float[Tensor, "batch pos head d_head"],
    *,
    eps: float = 1e-12,
    initial_state: Float[Tensor, "batch head feature d_head_and_one"] | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> NormalisedOutput:
    """Run linear attention and divide by the sum of its weights.

    S[t] = S[t-1] + k[t] (v[t], 1)^T;   (num, z)[t] = S[t]^T q[t];   y[t] = num[t] / (z[t] + eps)

    Args:
        q, k: After the feature map, unscaled; the weights q . k should be positive.
        eps: 1e-12 in Based (zoology), 1e-6 in fla's Based, 1e-10 in fla's linear attention.
    Raises:
        ShapeError: As `linear_attention`, whose state has one more value column here.
    """
    dtype = core_dtype(q, k, v)
    extended = torch.cat([v.to(dtype), torch.ones_like(v[..., :1], dtype=dtype)], dim=-1)
    out = linear_attention(
        q, k, extended, initial_state=initial_state, return_states=return_states, impl=impl
    )
    numerator, normalizer = out.y[..., :-1], out.y[..., -1]
    y = numerator / (normalizer + eps)[..., None]
    return NormalisedOutput(y.to(v.dtype), normalizer, out.states, out.final_state)


def normalised_linear_attention_pattern(
    q: Float[Tensor, "batch pos head feature"],
    k: Float[Tensor, "batch pos head feature"],
    *,
    eps: float = 1e-12,
) -> Pattern:
    """Return the weights by which `normalised_linear_attention` mixes values; rows sum to 1."""
    pattern = linear_attention_pattern(q, k)
    return pattern / (pattern.sum(-1, keepdim=True) + eps)
