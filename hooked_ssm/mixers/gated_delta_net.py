"""Gated DeltaNet: the delta rule on a state that also decays (Yang, Kautz & Hatamizadeh 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_ssm.checks import Count, Positive
from hooked_ssm.errors import ConfigError
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import Segment, StepSizeOptions
from hooked_ssm.mixers.delta_rule_mixer import NO_CONV, NO_GATE, DeltaRuleMixer, DeltaRuleOptions
from hooked_ssm.mixers.mamba import draw_dt_bias
from hooked_ssm.ops.output import core_dtype

LOWEST_A = 1e-4
"""Smallest decay rate drawn: at zero its logarithm would be infinite."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetOptions(StepSizeOptions, DeltaRuleOptions):
    """Settings of Gated DeltaNet; those of `DeltaRuleOptions` and `StepSizeOptions`, and:

    Attributes:
        d_key: Key width of a head; None = d_model / n_heads (zoology; fla takes 256).
    """

    expand_v: Positive = 2.0
    use_gate: bool = True
    d_key: Count | None = None


class GatedDeltaNet(DeltaRuleMixer):
    """S' = exp(g) S[t-1]; S[t] = S' + beta k (v - S'^T k)^T; see `DeltaRuleMixer`.

    g = -exp(A_log) softplus(decay_proj x + dt_bias), one number per head and position. A_log and
    dt_bias are drawn as the authors do, linear layers by the model's initialisation, as in zoology.
    """

    Options = GatedDeltaNetOptions
    absent_roles = {"gate": NO_GATE, "conv": NO_CONV}
    decays = True
    options: GatedDeltaNetOptions

    def __init__(self, d_model: int, n_ctx: int, options: GatedDeltaNetOptions):
        super().__init__(d_model, n_ctx, options)
        self.decay_proj = Linear(d_model, self.n_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def head_sizes(self) -> tuple[int, int]:
        heads, d_key = self.options.n_heads, self.options.d_key
        if d_key is None and self.d_model % heads:
            raise ConfigError(
                f"gated_delta_net: n_heads={heads} does not divide d_model={self.d_model}; "
                "change either, or set d_key"
            )
        d_key = d_key or self.d_model // heads
        d_head = int(d_key * self.options.expand_v)
        if d_head < 1:
            raise ConfigError(
                f"gated_delta_net: expand_v={self.options.expand_v} times d_key={d_key} leaves no "
                "value width; increase either"
            )
        return d_key, d_head

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the decay as the authors do: A in (0, 16], softplus(dt_bias) log-uniform."""
        super().initialise(generator)
        with torch.no_grad():
            self.A_log.uniform_(0, 16, generator=generator).clamp_(min=LOWEST_A).log_()
            self.dt_bias.copy_(
                draw_dt_bias(self.n_heads, self.options.dt_min, self.options.dt_max, generator)
            )

    def log_decay(self, x: Tensor, segment: Segment) -> Tensor | None:
        """g <= 0; zero at padding, which leaves the state alone."""
        low = self.decay_proj(x)
        core = core_dtype(low)
        dt = F.softplus(low.to(core) + self.dt_bias.to(core))
        return segment.keep_real(-torch.exp(self.A_log.to(core)) * dt)
