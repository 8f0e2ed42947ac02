"""Feature maps that let a sum of products stand in for the exponential of attention."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def taylor_features(x: Float[Tensor, "*axes d_key"]) -> Float[Tensor, "*axes feature"]:
    """Second-order Taylor expansion of the exponential as a feature map.

    phi(x) = [1, x / d^(1/4), outer(x, x) / (sqrt(2) sqrt(d))], with d the width of x, so that
    phi(q) . phi(k) = 1 + s + s^2/2 with s = q . k / sqrt(d). The outer product is complete and
    row-major: 1 + d + d^2 features.

    Source: Arora et al. 2024 (Based); HazyResearch/zoology, TaylorExp.
    """
    d = x.shape[-1]
    outer = (x[..., :, None] * x[..., None, :]).flatten(-2)
    return torch.cat([torch.ones_like(x[..., :1]), x / d**0.25, outer / math.sqrt(2 * d)], dim=-1)
