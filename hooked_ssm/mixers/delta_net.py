"""DeltaNet: linear attention that overwrites what a key held (Schlag 2021, Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hooked_ssm.checks import Positive
from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers.base import Segment
from hooked_ssm.mixers.delta_rule_mixer import NO_CONV, NO_GATE, DeltaRuleMixer, DeltaRuleOptions


@dataclass(frozen=True, kw_only=True)
class DeltaNetOptions(DeltaRuleOptions):
    """Settings of DeltaNet; those of `DeltaRuleOptions`, and:

    Attributes:
        expand_k, expand_v: Key and value width of all heads together, in units of d_model.
    """

    expand_k: Positive = 1.0


class DeltaNet(DeltaRuleMixer):
    """S[t] = S[t-1] + beta k (v - S[t-1]^T k)^T; see `DeltaRuleMixer`.

    Its linear layers are drawn by the model's initialisation, as zoology does.
    """

    Options = DeltaNetOptions
    absent_roles = {
        "decay": "it forgets only by overwriting: its decay is the matrix I - beta k k^T",
        "gate": NO_GATE,
        "conv": NO_CONV,
    }
    decays = False
    options: DeltaNetOptions

    def head_sizes(self) -> tuple[int, int]:
        heads = self.options.n_heads
        sizes = [int(self.d_model * e) for e in (self.options.expand_k, self.options.expand_v)]
        if any(size < 1 or size % heads for size in sizes):
            raise ConfigError(
                f"delta_net: n_heads={heads} does not divide key width {sizes[0]} and value width "
                f"{sizes[1]} (expand_k, expand_v times d_model={self.d_model}); change either"
            )
        return sizes[0] // heads, sizes[1] // heads

    def log_decay(self, x: Tensor, segment: Segment) -> Tensor | None:
        return None
