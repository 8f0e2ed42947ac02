"""Rotary position embedding, in the half-split layout of Llama and GPT-NeoX."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, dim: int, base: float) -> Tensor:
    """Rotate pairs (i, i + dim/2) of each head's first `dim` dimensions by position-wise angles.

    angle[t, i] = positions[t] * base^(-2i/dim)

    Args:
        x: Queries or keys. [batch, pos, head, d_head]
        positions: Index of each token in its document. [batch|1, pos]
        dim: Even number of dimensions that are rotated.
        base: Base of the wavelengths.

    Source: Su et al. 2021 (RoFormer), section 3.4; angles in float32.
    """
    core = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, dim, 2, device=x.device, dtype=core) / dim
    angle = positions.to(core)[..., None] * base**-exponent
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    first, second = x[..., : dim // 2].to(core), x[..., dim // 2 : dim].to(core)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., dim:]], dim=-1)
