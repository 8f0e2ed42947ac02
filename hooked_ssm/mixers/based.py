"""Based: linear attention with a second-order Taylor feature map (Arora et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hooked_ssm.checks import Count, NonNegative
from hooked_ssm.errors import ConfigError
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import Carried, Mixer, MixerOptions, Segment
from hooked_ssm.mixers.recurrence import Recurrence, run, through_pattern
from hooked_ssm.ops.causal import mix_heads
from hooked_ssm.ops.linear_attention import (
    linear_attention,
    linear_attention_pattern,
    taylor_features,
)
from hooked_ssm.ops.output import ScanOutput, StatesWanted


@dataclass(frozen=True, kw_only=True)
class BasedOptions(MixerOptions):
    """Settings of Based.

    Attributes:
        n_heads: Heads; each has d_model / n_heads value dimensions.
        feature_dim: Width of queries and keys before the feature map (1 + f + f^2 after it).
        eps: Added to the normaliser (zoology: 1e-12).
    """

    n_heads: Count = 1
    feature_dim: Count = 8
    eps: NonNegative = 1e-12


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Recurrence):
    """S[t] = S[t-1] + k[t] v[t]^T; y[t] = S[t]^T q[t]. State [batch, head, feature, value]."""

    timed: ClassVar[tuple[str, ...]] = ("v", "q", "k")
    q: Tensor
    k: Tensor
    v: Tensor

    def fast_scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        return linear_attention(self.q, self.k, self.v, initial_state=initial, return_states=wanted)

    def implied_decay(self) -> Tensor:
        return self.q.new_ones(1, self.q.shape[1], 1, 1, 1)

    def implied_write(self) -> Tensor:
        return torch.einsum("bphf,bphd->bphfd", self.k, self.v)

    def read(self, states: Tensor) -> Tensor:
        y = torch.einsum("bphf,bphfd->bphd", self.q.to(states.dtype), states)
        return y.to(self.v.dtype)

    def pattern(self) -> Tensor:
        return linear_attention_pattern(self.q, self.k)

    def mix(self, pattern: Tensor) -> Tensor:
        return mix_heads(pattern, self.v)


class Based(Mixer):
    """z[t] = sum_s phi(q[t]).phi(k[s]) v[s] / (sum_s phi(q[t]).phi(k[s]) + eps); output = z W_O.

    The state has one more value column, which sums the keys: the normaliser's sum.
    """

    Options = BasedOptions
    absent_roles = {
        "decay": "linear attention forgets nothing",
        "conv": "its layer has no convolution (the paper's stack has BaseConv below it)",
        "gate": "it has no gate",
    }
    options: BasedOptions

    def __init__(self, d_model: int, n_ctx: int, options: BasedOptions):
        super().__init__(d_model, n_ctx, options)
        self.n_heads = options.n_heads
        if d_model % self.n_heads:
            raise ConfigError(
                f"based: n_heads={self.n_heads} does not divide d_model={d_model}; change either"
            )
        width = self.n_heads * options.feature_dim
        self.q_proj = Linear(d_model, width, bias=False)
        self.k_proj = Linear(d_model, width, bias=False)
        self.v_proj = Linear(d_model, d_model, bias=False)
        self.out_proj = Linear(d_model, d_model, bias=False, writes_residual=True)

    def axis_sizes(self) -> dict[str, int]:
        f, d = self.options.feature_dim, self.d_model // self.n_heads
        sizes = {"head": self.n_heads, "d_key": f, "feature": 1 + f + f * f, "d_head": d}
        return {**sizes, "d_head_and_one": d + 1}

    def hook_specs(self) -> tuple[HookSpec, ...]:
        return (
            spec("hook_q", "batch pos head d_key"),
            spec("hook_k", "batch pos head d_key"),
            spec("hook_v", "batch pos head d_head", "value"),
            spec("hook_q_features", "batch pos head feature", "query"),
            spec("hook_k_features", "batch pos head feature", "key"),
            spec("hook_ssm_write", "batch pos head feature d_head_and_one", "write"),
            spec("hook_ssm_carry", "batch head feature d_head_and_one", "carry", per_position=True),
            spec("hook_ssm_state", "batch pos head feature d_head_and_one", "state"),
            spec("hook_normalizer", "batch pos head"),
            spec("hook_pattern", "batch head query_pos key_pos", "pattern"),
            spec("hook_z", "batch pos head d_head", "mixed"),
        )

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        heads = (self.n_heads, -1)
        q = self.hook_q(self.q_proj(x).unflatten(-1, heads))
        k = self.hook_k(self.k_proj(x).unflatten(-1, heads))
        v = self.hook_v(self.v_proj(x).unflatten(-1, heads))
        q = self.hook_q_features(taylor_features(q))
        k = self.hook_k_features(segment.keep_real(taylor_features(k)))
        core = torch.float64 if v.dtype == torch.float64 else torch.float32
        extended = torch.cat([v.to(core), v.new_ones(*v.shape[:-1], 1, dtype=core)], dim=-1)
        recurrence = LinearAttention(q=q.to(core), k=k.to(core), v=extended)
        initial = None if carried is None else carried["state"]
        out = run(self, recurrence, segment.start, initial)
        divisor = self.hook_normalizer(out.y[..., -1]) + self.options.eps
        z = (out.y[..., :-1] / divisor[..., None]).to(v.dtype)
        z = through_pattern(
            self.hook_pattern,
            lambda: recurrence.pattern() / divisor.transpose(1, 2)[..., None],
            lambda pattern: mix_heads(pattern, v),
            z,
            out.untouched,
        )
        return self.out_proj(self.hook_z(z).flatten(2)), {"state": out.final}
