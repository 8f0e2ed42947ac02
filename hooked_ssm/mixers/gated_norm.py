"""RMS normalisation of what a mixer has mixed, per group of channels, with or without a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class GatedNorm(nn.Module):
    """y / sqrt(mean of y^2 over its group + eps) * weight (* SiLU(gate)).

    Computed in float32 (float64 for float64), whatever the model's dtype.

    Args:
        channels: Size of the last axis of y, and of the weight.
        eps: Added inside the root.
        groups: Groups of consecutive channels, each normalised by itself.
    """

    def __init__(self, channels: int, eps: float = 1e-5, groups: int = 1):
        super().__init__()
        self.eps, self.groups = eps, groups
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(
        self, y: Float[Tensor, "*axes channel"], gate: Float[Tensor, "*axes channel"] | None = None
    ) -> Float[Tensor, "*axes channel"]:
        """Normalise, then gate if there is a gate."""
        core = torch.float64 if y.dtype == torch.float64 else torch.float32
        grouped = y.to(core).unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        normed = normed * self.weight.to(core)
        if gate is not None:
            normed = normed * F.silu(gate.to(core))
        return normed.to(y.dtype)
