"""Filters of any length made by a small network from features of the tap's index."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_ssm.layers import Linear

SLOWEST_DECAY, FASTEST_DECAY = math.log(100) / 1.5, math.log(100) / 0.3
"""Channels' decays over the whole filter: to 1 % at 1.5 times, and at 0.3 times, its length."""


class ImplicitFilter(nn.Module):
    """BaseConv's filter: one hidden layer.

    filter[:, s] = W2 relu(W1 z[s] + b1) + b2

    The features z (see `filter_features`) are stored, not trained.
    """

    def __init__(self, channels: int, length: int, order: int, features: int = 3):
        super().__init__()
        self.fc_in = Linear(features, order)
        self.fc_out = Linear(order, channels)
        self.register_buffer("z", filter_features(length, features))

    def forward(self, length: int) -> Float[Tensor, "channel tap"]:
        """Return the first `length` taps, or all if there are fewer."""
        return self.fc_out(F.relu(self.fc_in(self.z[:length]))).T


class SineFilter(nn.Module):
    """Hyena's filter: sine layers with one shared frequency per unit, under a decaying window.

    x[0] = z[s];   x[i+1] = sin(freq (W[i] x[i] + b[i]))
    filter[c, s] = (W_out x[last])[c] exp(-t[s] |deltas[c]|)

    The features z are trained; t = s / (length - 1) and the decays `deltas` are only stored. It is
    computed in float32 (float64 in a model of that dtype).

    Args:
        channels: Filters.
        length: Taps.
        order: Units of each sine layer.
        features: Features of a tap's index: the index, and a cosine and a sine per frequency; odd,
            at least 3.
        inner_layers: Sine layers after the first one.
        frequency: Initial `freq`.
        modulate: Whether the window is applied.
        normalized: Whether each tap is divided by its L1 norm over the channels.

    Source: Poli et al. 2023, "Hyena Hierarchy", section 3.3; zoology, Filter.
    """

    def __init__(
        self,
        channels: int,
        length: int,
        order: int,
        features: int = 3,
        inner_layers: int = 2,
        frequency: float | int = 1.0,
        *,
        modulate: bool = True,
        normalized: bool = False,
    ):
        super().__init__()
        self.length, self.frequency, self.normalized = length, float(frequency), normalized
        widths = [features, *[order] * (1 + inner_layers)]
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList(Linear(d_in, d_out) for d_in, d_out in pairs)
        self.fc_out = Linear(order, channels, bias=False)
        self.freq = nn.Parameter(torch.empty(order))
        self.z = nn.Parameter(torch.empty(length, features))
        self.modulate = modulate
        if modulate:
            self.register_buffer("t", torch.linspace(0, 1, length))
            self.register_buffer("deltas", -torch.linspace(SLOWEST_DECAY, FASTEST_DECAY, channels))
        for parameter in self.parameters():
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def initialise(self) -> None:
        """Set features and frequencies; the linear layers are drawn with all others."""
        with torch.no_grad():
            self.z.copy_(filter_features(*self.z.shape))
            self.freq.fill_(self.frequency)

    def forward(self, length: int) -> Float[Tensor, "channel tap"]:
        """Return the first `length` taps, or all if there are fewer."""
        core = torch.float64 if self.freq.dtype == torch.float64 else torch.float32
        x, freq = self.z[:length].to(core), self.freq.to(core)
        for layer in self.layers:
            weight, bias = (p.to(core) for p in layer.parameters())
            x = torch.sin(freq * F.linear(x, weight, bias))
        x = F.linear(x, self.fc_out.weight.to(core))
        if self.modulate:
            x = x * torch.exp(-self.t[:length, None].to(core) * self.deltas.abs().to(core))
        if self.normalized:
            x = x / x.abs().sum(-1, keepdim=True)
        return x.T


def filter_features(length: int, features: int) -> Float[Tensor, "tap feature"]:
    """Return z[s] = (s / (L-1), Re and Im of exp(-i f 2 pi s / L) for every frequency f).

    There are (features - 1) / 2 frequencies, evenly from 1e-4: with three features the only one is
    1e-4, so that the last two features are nearly 1 and 0.

    Source: zoology, PositionalEmbedding.
    """
    bands = (features - 1) // 2
    steps = torch.linspace(0, 1, length)[:, None]
    angle = 2 * math.pi * torch.arange(length)[:, None] / length
    wave = torch.linspace(1e-4, bands - 1, bands)[None] * angle
    return torch.cat([steps, wave.cos(), -wave.sin()], dim=-1)
