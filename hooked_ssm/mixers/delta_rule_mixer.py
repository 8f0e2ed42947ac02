"""The layer around the delta rule that DeltaNet and Gated DeltaNet share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.checks import Count, Natural, NonNegative, Positive
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import Carried, Mixer, MixerOptions, Segment
from hooked_ssm.mixers.convolution import conv_carry_spec
from hooked_ssm.mixers.delta_rule import DeltaRule, run_delta_rule
from hooked_ssm.mixers.gated_norm import GatedNorm
from hooked_ssm.mixers.qkv_convolution import QKVConvolution
from hooked_ssm.mixers.recurrence import through_pattern
from hooked_ssm.ops.delta_rule import l2_normalise
from hooked_ssm.ops.output import core_dtype

NO_GATE = "this one was built without an output gate (use_gate=False)"
NO_CONV = "this one was built without short convolutions (d_conv=0)"


@dataclass(frozen=True, kw_only=True)
class DeltaRuleOptions(MixerOptions):
    """Settings that both delta nets have.

    Attributes:
        n_heads: Heads.
        expand_v: Value width of a head, in key widths.
        d_conv: Width of the short convolutions on q, k and v; 0 leaves them out (their SiLU stays).
        use_gate: Multiply the normalised output by SiLU of a gate.
        allow_neg_eigval: Let beta reach 2 instead of 1, so that a write can flip what was stored.
        norm_eps: Added inside the output norm's root.
    """

    n_heads: Count = 1
    expand_v: Positive = 1.0
    d_conv: Natural = 4
    use_gate: bool = False
    allow_neg_eigval: bool = False
    norm_eps: NonNegative = 1e-5


class DeltaRuleMixer(Mixer):
    """output = (norm(z) * SiLU(gate)) W_O, z by the delta rule on unit keys and queries.

    q, k, v = SiLU(conv(projection)), in one convolution over all their channels. Unit keys and
    queries, beta, the decay and the state are float32 under any model dtype.
    """

    options: DeltaRuleOptions
    decays: bool
    """Whether the state decays beside being overwritten."""

    def __init__(self, d_model: int, n_ctx: int, options: DeltaRuleOptions):
        super().__init__(d_model, n_ctx, options)
        heads = self.n_heads = options.n_heads
        self.d_key, self.d_head = self.head_sizes()
        keys, values = heads * self.d_key, heads * self.d_head
        self.q_proj = Linear(d_model, keys, bias=False)
        self.k_proj = Linear(d_model, keys, bias=False)
        self.v_proj = Linear(d_model, values, bias=False)
        self.conv = QKVConvolution((keys, keys, values), options.d_conv) if options.d_conv else None
        self.beta_proj = Linear(d_model, heads, bias=False)
        self.gate_proj = Linear(d_model, values, bias=False) if options.use_gate else None
        self.norm = GatedNorm(self.d_head, options.norm_eps)
        self.out_proj = Linear(values, d_model, bias=False, writes_residual=True)

    @abstractmethod
    def head_sizes(self) -> tuple[int, int]:
        """Key width and value width of a head."""

    @abstractmethod
    def log_decay(self, x: Tensor, segment: Segment) -> Tensor | None:
        """Logarithm of what the state is multiplied by; None if by nothing. [batch, pos, head]"""

    def axis_sizes(self) -> dict[str, int]:
        return {
            "head": self.n_heads,
            "d_key": self.d_key,
            "d_head": self.d_head,
            "channel": self.n_heads * (2 * self.d_key + self.d_head),
            "earlier": max(self.options.d_conv - 1, 0),
        }

    def hook_specs(self) -> tuple[HookSpec, ...]:
        key, value = "batch pos head d_key", "batch pos head d_head"
        state = "head d_key d_head"
        conv = (
            conv_carry_spec("channel"),
            spec("hook_conv", "batch pos channel", "conv"),
            spec("hook_conv_q", key),
            spec("hook_conv_k", key),
            spec("hook_conv_v", value),
        )
        decay = spec("hook_ssm_decay", "batch pos head", "decay", heavy=False)
        return (
            spec("hook_q", key, reach="later" if self.options.d_conv else None),
            spec("hook_k", key),
            spec("hook_v", value),
            *(conv if self.options.d_conv else ()),
            spec("hook_q_normed", key, "query", numbers="core"),
            spec("hook_k_normed", key, "key", numbers="core"),
            spec("hook_x", value, "value"),
            spec("hook_beta", "batch pos head", numbers="core"),
            *((decay,) if self.decays else ()),
            spec("hook_ssm_write", f"batch pos {state}", "write"),
            spec("hook_ssm_carry", f"batch {state}", "carry", per_position=True),
            spec("hook_delta", value, numbers="core"),
            spec("hook_ssm_state", f"batch pos {state}", "state"),
            spec("hook_pattern", "batch head query_pos key_pos", "pattern"),
            spec("hook_z", value, "mixed"),
            *((spec("hook_gate", value, "gate"),) if self.options.use_gate else ()),
            spec("hook_normed", value),
        )

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        if self.conv is not None:
            self.conv.initialise(generator)

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        q = self.hook_q(self._heads(self.q_proj(x)))
        k = self.hook_k(self._heads(self.k_proj(x)))
        v = self.hook_v(self._heads(self.v_proj(x)))
        handed_on: Carried = {}
        if self.conv is not None:
            window = None if carried is None else carried["window"]
            q, k, v, handed_on["window"] = self._convolve(q, k, v, segment, window)
        recurrence = DeltaRule(
            q=self.hook_q_normed(l2_normalise(F.silu(q))),
            k=self.hook_k_normed(l2_normalise(F.silu(k))),
            v=self.hook_x(F.silu(v)),
            beta=self.hook_beta(self._beta(x, segment)),
            log_decay=self.log_decay(x, segment),
        )
        initial = None if carried is None else carried["state"]
        out = run_delta_rule(self, recurrence, segment.start, initial)
        handed_on["state"] = out.final
        z = through_pattern(
            self.hook_pattern, recurrence.pattern, recurrence.mix, out.y, out.untouched
        )
        z = self.hook_z(z)
        gate = None
        if self.gate_proj is not None:
            gate = self.hook_gate(self._heads(self.gate_proj(x)))
        return self.out_proj(self.hook_normed(self.norm(z, gate)).flatten(2)), handed_on

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.n_heads, -1))

    def _convolve(
        self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, window: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v convolved, and their common window after the last token."""
        assert self.conv is not None, "asked for by forward"
        inputs = segment.keep_real(torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1))
        y, window = self.conv(inputs, self.hook_conv_carry, segment.start, window)
        q, k, v = (self._heads(part) for part in self.conv.slices(self.hook_conv(y)))
        return self.hook_conv_q(q), self.hook_conv_k(k), self.hook_conv_v(v), window

    def _beta(self, x: Tensor, segment: Segment) -> Tensor:
        """Write strength; zero at padding, which then neither writes nor erases."""
        low = self.beta_proj(x)
        largest = 2.0 if self.options.allow_neg_eigval else 1.0
        return segment.keep_real(largest * torch.sigmoid(low.to(core_dtype(low))))
