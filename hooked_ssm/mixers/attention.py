"""Softmax attention, with learned positions (added by the model), rotary ones or none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.checks import Count, Positive
from hooked_ssm.errors import ConfigError
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import BlockDefaults, Carried, Mixer, MixerOptions, Segment
from hooked_ssm.mixers.rotary import rotate
from hooked_ssm.ops.causal import causal_product, is_spoilt
from hooked_ssm.rules import Rule

EvenCount = Annotated[
    int, Rule("an even integer >= 2", lambda value: value >= 2 and value % 2 == 0)
]


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(MixerOptions):
    """Settings of attention.

    Attributes:
        n_heads: Query heads.
        n_kv_heads: Key and value heads, shared by equal groups of query heads; None = n_heads.
        d_head: Width of a head; None = d_model / n_heads.
        rotary: Rotate queries and keys by their position.
        rotary_dim: How many of a head's first dimensions are rotated; None = all.
        rotary_base: Slowest wavelength of the rotation, in units of 2 pi positions.
        qkv_bias, out_bias: Whether the projections have a bias (zoology: out only).
        scale: What scores are multiplied by; None = 1/sqrt(d_head).
    """

    n_heads: Count = 1
    n_kv_heads: Count | None = None
    d_head: Count | None = None
    rotary: bool = False
    rotary_dim: EvenCount | None = None
    rotary_base: Positive = 10_000.0
    qkv_bias: bool = False
    out_bias: bool = True
    scale: int | float | None = None


class Attention(Mixer):
    """pattern = softmax(scale q k^T, causal); z = pattern v; output = z W_O + b_O."""

    Options = AttentionOptions
    block_defaults = BlockDefaults(positions="learned")
    absent_roles = {
        "state": "attention keeps keys and values, not a state of fixed size",
        "carry": "attention keeps keys and values, not a state of fixed size",
        "write": "attention keeps keys and values, not a state of fixed size",
        "decay": "attention forgets nothing",
        "conv": "it has no convolution",
        "gate": "it has no gate",
    }
    options: AttentionOptions

    def __init__(self, d_model: int, n_ctx: int, options: AttentionOptions):
        super().__init__(d_model, n_ctx, options)
        self.n_heads = options.n_heads
        self.n_kv_heads = options.n_kv_heads or options.n_heads
        if options.d_head is None and d_model % self.n_heads:
            raise ConfigError(
                f"attention: n_heads={self.n_heads} does not divide d_model={d_model}; "
                "set d_head or other sizes"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"attention: n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}"
            )
        self.d_head = options.d_head or d_model // self.n_heads
        self.scale = 1 / math.sqrt(self.d_head) if options.scale is None else options.scale
        self.rotary_dim = options.rotary_dim or self.d_head
        if options.rotary and (self.rotary_dim % 2 or self.rotary_dim > self.d_head):
            raise ConfigError(
                f"attention: rotary_dim={self.rotary_dim} with d_head={self.d_head}; pairs of "
                "dimensions are rotated: set an even rotary_dim <= d_head, or an even d_head"
            )
        bias = options.qkv_bias
        self.q_proj = Linear(d_model, self.n_heads * self.d_head, bias=bias)
        self.k_proj = Linear(d_model, self.n_kv_heads * self.d_head, bias=bias)
        self.v_proj = Linear(d_model, self.n_kv_heads * self.d_head, bias=bias)
        self.out_proj = Linear(
            self.n_heads * self.d_head, d_model, bias=options.out_bias, writes_residual=True
        )

    def axis_sizes(self) -> dict[str, int]:
        return {
            "head": self.n_heads,
            "kv_head": self.n_kv_heads,
            "d_head": self.d_head,
            "d_model": self.d_model,
        }

    def hook_specs(self) -> tuple[HookSpec, ...]:
        rotary = self.options.rotary
        roles = () if rotary else ("query",), () if rotary else ("key",)
        rotated = (
            spec("hook_rot_q", "batch pos head d_head", "query"),
            spec("hook_rot_k", "batch pos kv_head d_head", "key"),
        )
        return (
            spec("hook_q", "batch pos head d_head", *roles[0]),
            spec("hook_k", "batch pos kv_head d_head", *roles[1]),
            spec("hook_v", "batch pos kv_head d_head", "value"),
            *(rotated if rotary else ()),
            spec("hook_attn_scores", "batch head query_pos key_pos"),
            spec(
                "hook_pattern",
                "batch head query_pos key_pos",
                "pattern",
                heavy=False,
                numbers="model",
            ),
            spec("hook_z", "batch pos head d_head", "mixed"),
            spec("hook_result", "batch pos head d_model"),
        )

    @property
    def W_Q(self) -> Tensor:
        """Query weights in TransformerLens' layout. [head, d_model, d_head]"""
        return self._per_head(self.q_proj.weight)

    @property
    def W_K(self) -> Tensor:
        """Key weights in TransformerLens' layout. [kv_head, d_model, d_head]"""
        return self._per_head(self.k_proj.weight)

    @property
    def W_V(self) -> Tensor:
        """Value weights in TransformerLens' layout. [kv_head, d_model, d_head]"""
        return self._per_head(self.v_proj.weight)

    @property
    def W_O(self) -> Tensor:
        """Output weights in TransformerLens' layout. [head, d_head, d_model]"""
        return self.out_proj.weight.T.reshape(self.n_heads, self.d_head, self.d_model)

    def _per_head(self, weight: Tensor) -> Tensor:
        return weight.view(-1, self.d_head, self.d_model).transpose(1, 2)

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        q, k, v = (
            hook(proj(x).unflatten(-1, (-1, self.d_head)))
            for hook, proj in (
                (self.hook_q, self.q_proj),
                (self.hook_k, self.k_proj),
                (self.hook_v, self.v_proj),
            )
        )
        if self.options.rotary:
            dim, base = self.rotary_dim, self.options.rotary_base
            q = self.hook_rot_q(rotate(q, segment.positions, dim, base))
            k = self.hook_rot_k(rotate(k, segment.positions, dim, base))
        k, v, real, carried = self._with_past(k, v, segment, carried)
        z = self.hook_z(self._attend(q, k, v, real))
        if self.hook_result.listened:
            result = torch.einsum("bphd,hdm->bphm", z, self.W_O)
            y = self.hook_result(result).sum(2)
            return y if self.out_proj.bias is None else y + self.out_proj.bias, carried
        return self.out_proj(z.flatten(2)), carried

    def _with_past(
        self, k: Tensor, v: Tensor, segment: Segment, carried: Carried | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Carried]:
        """Prepend the keys and values carried from earlier calls; say which are real."""
        real = segment.real
        if carried is not None:
            past_real = carried.get("real")
            if real is not None or past_real is not None:
                old = k.new_ones(carried["k"].shape[:2], dtype=torch.bool)
                new = k.new_ones(k.shape[:2], dtype=torch.bool)
                real = torch.cat(
                    [old if past_real is None else past_real, new if real is None else real], dim=1
                )
            k, v = torch.cat([carried["k"], k], dim=1), torch.cat([carried["v"], v], dim=1)
        handed_on = {"k": k, "v": v} if real is None else {"k": k, "v": v, "real": real}
        return k, v, real, handed_on

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Values mixed by the softmax of the scores. [batch, pos, head, d_head]"""
        per_kv = self.n_heads // self.n_kv_heads
        if per_kv > 1:
            k, v = k.repeat_interleave(per_kv, dim=2), v.repeat_interleave(per_kv, dim=2)
        queries, keys = q.shape[1], k.shape[1]
        seen = q.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        if real is not None:
            # A padded query sees itself, so that its row (which nobody reads) stays finite.
            itself = seen & ~seen.tril(keys - queries - 1)
            seen = (seen & real[:, None, None, :]) | itself
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if not (self.hook_attn_scores.listened or self.hook_pattern.listened):
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
            if not is_spoilt(z, -2):
                return z.transpose(1, 2)
        scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~seen, -torch.inf)
        scores = self.hook_attn_scores(scores)
        core = torch.float64 if scores.dtype == torch.float64 else torch.float32
        pattern = self.hook_pattern(torch.softmax(scores, dim=-1, dtype=core).to(scores.dtype))
        return causal_product(pattern, v, seen).transpose(1, 2)
