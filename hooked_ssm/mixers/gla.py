"""Gated linear attention: every key channel of the state has its own decay (Yang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.checks import Count, Natural, NonNegative, Positive
from hooked_ssm.errors import ConfigError
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import Carried, Mixer, MixerOptions, Segment
from hooked_ssm.mixers.convolution import conv_carry_spec
from hooked_ssm.mixers.gated_norm import GatedNorm
from hooked_ssm.mixers.qkv_convolution import QKVConvolution
from hooked_ssm.mixers.recurrence import Recurrence, run, through_pattern
from hooked_ssm.ops.causal import mix_heads
from hooked_ssm.ops.gla import gla, gla_pattern
from hooked_ssm.ops.linear_scan import linear_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype


@dataclass(frozen=True, kw_only=True)
class GLAOptions(MixerOptions):
    """Settings of gated linear attention.

    Attributes:
        n_heads: Query heads.
        n_kv_heads: Key, value and decay heads, shared by equal groups of query heads; None =
            n_heads.
        expand_k, expand_v: Key and value width of all query heads together, in units of d_model.
        d_conv: Width of short convolutions on q, k and v, followed by SiLU; 0 for neither.
        use_gate: Multiply the normalised output by SiLU of a gate.
        decay_rank: Rank of the decay's projection.
        gate_logit_normalizer: Divides the log decay: larger remembers longer.
        norm_eps: Added inside the output norm's root.
    """

    n_heads: Count = 1
    n_kv_heads: Count | None = None
    expand_k: Positive = 0.5
    expand_v: Positive = 1.0
    d_conv: Natural = 0
    use_gate: bool = True
    decay_rank: Count = 16
    gate_logit_normalizer: Positive = 16.0
    norm_eps: NonNegative = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise ConfigError(
                f"gla: n_heads={self.n_heads} is no multiple of n_kv_heads={self.n_kv_heads}; "
                "change either"
            )


@dataclass(frozen=True, kw_only=True)
class GatedLinearAttention(Recurrence):
    """S[t] = diag(exp(log_decay)) S[t-1] + k v^T; y = S^T q / sqrt(d_key). State [b, h, f, d]."""

    timed: ClassVar[tuple[str, ...]] = ("v", "q", "k", "log_decay")
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor

    def fast_scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        return gla(
            self.q, self.k, self.v, self.log_decay, initial_state=initial, return_states=wanted
        )

    def scan_writes(self, decay: Tensor, write: Tensor, initial: Tensor | None) -> Tensor:
        return linear_scan(decay[..., None], write, initial)

    def implied_decay(self) -> Tensor:
        return self.log_decay.exp().clone()  # exp keeps its result: hooks may edit the copy

    def implied_write(self) -> Tensor:
        core = self.log_decay.dtype
        return torch.einsum("bphf,bphd->bphfd", self.k.to(core), self.v.to(core))

    def read(self, states: Tensor) -> Tensor:
        q = self.q.to(states.dtype) * self.q.shape[-1] ** -0.5
        return torch.einsum("bphf,bphfd->bphd", q, states).to(self.v.dtype)

    def pattern(self) -> Tensor:
        return gla_pattern(self.q, self.k, self.log_decay)

    def mix(self, pattern: Tensor) -> Tensor:
        return mix_heads(pattern, self.v)


class GLA(Mixer):
    """output = (norm(z) * SiLU(gate)) W_O, z by gated linear attention.

    The log decay is logsigmoid of a low-rank projection over `gate_logit_normalizer`; it, the decay
    and the state are float32 under any model dtype. Keys, values and decays of shared heads are
    repeated, so that every query head has its own state. All linear layers are drawn by the model's
    initialisation, as zoology does.
    """

    Options = GLAOptions
    absent_roles = {
        "gate": "this one was built without an output gate (use_gate=False)",
        "conv": "this one was built without short convolutions (d_conv=0)",
    }
    options: GLAOptions

    def __init__(self, d_model: int, n_ctx: int, options: GLAOptions):
        super().__init__(d_model, n_ctx, options)
        heads = self.n_heads = options.n_heads
        self.n_kv_heads = options.n_kv_heads or heads
        sizes = [int(d_model * expand) for expand in (options.expand_k, options.expand_v)]
        if any(size < 1 or size % heads for size in sizes):
            raise ConfigError(
                f"gla: n_heads={heads} does not divide key width {sizes[0]} and value width "
                f"{sizes[1]} (expand_k, expand_v times d_model={d_model}); change either"
            )
        self.d_key, self.d_head = (size // heads for size in sizes)
        self.widths = (
            heads * self.d_key,
            self.n_kv_heads * self.d_key,
            self.n_kv_heads * self.d_head,
        )
        self.q_proj, self.k_proj, self.v_proj = (
            Linear(d_model, width, bias=False) for width in self.widths
        )
        self.conv = QKVConvolution(self.widths, options.d_conv) if options.d_conv else None
        self.decay_down = Linear(d_model, options.decay_rank, bias=False)
        self.decay_up = Linear(options.decay_rank, self.widths[1])
        self.gate_proj = Linear(d_model, sizes[1], bias=False) if options.use_gate else None
        self.norm = GatedNorm(self.d_head, options.norm_eps)
        self.out_proj = Linear(sizes[1], d_model, bias=False, writes_residual=True)

    def axis_sizes(self) -> dict[str, int]:
        return {
            "head": self.n_heads,
            "kv_head": self.n_kv_heads,
            "d_key": self.d_key,
            "d_head": self.d_head,
            "channel": sum(self.widths),
            "earlier": max(self.options.d_conv - 1, 0),
        }

    def hook_specs(self) -> tuple[HookSpec, ...]:
        key, value = "batch pos kv_head d_key", "batch pos kv_head d_head"
        mixed, state = "batch pos head d_head", "head d_key d_head"
        conv = (
            conv_carry_spec("channel"),
            spec("hook_conv", "batch pos channel", "conv"),
            spec("hook_conv_q", "batch pos head d_key"),
            spec("hook_conv_k", key),
            spec("hook_conv_v", value),
        )
        return (
            *(conv if self.options.d_conv else ()),
            spec("hook_q", "batch pos head d_key", "query"),
            spec("hook_k", key, "key"),
            spec("hook_v", value, "value"),
            spec("hook_ssm_decay", "batch pos head d_key", "decay", heavy=False),
            spec("hook_ssm_write", f"batch pos {state}", "write"),
            spec("hook_ssm_carry", f"batch {state}", "carry", per_position=True),
            spec("hook_ssm_state", f"batch pos {state}", "state"),
            spec("hook_pattern", "batch head query_pos key_pos", "pattern"),
            spec("hook_z", mixed, "mixed"),
            *((spec("hook_gate", mixed, "gate"),) if self.options.use_gate else ()),
            spec("hook_normed", mixed),
        )

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        if self.conv is not None:
            self.conv.initialise(generator)

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        handed_on: Carried = {}
        if self.conv is not None:
            window = None if carried is None else carried["window"]
            q, k, v, handed_on["window"] = self._convolve(q, k, v, segment, window)
        q = self.hook_q(q.unflatten(-1, (self.n_heads, -1)))
        k = self.hook_k(segment.keep_real(k.unflatten(-1, (self.n_kv_heads, -1))))
        v = self.hook_v(v.unflatten(-1, (self.n_kv_heads, -1)))
        log_decay = self._log_decay(x, segment)
        k, v, log_decay = (self._per_query_head(t) for t in (k, v, log_decay))
        recurrence = GatedLinearAttention(q=q, k=k, v=v, log_decay=log_decay)
        out = run(self, recurrence, segment.start, None if carried is None else carried["state"])
        handed_on["state"] = out.final
        z = through_pattern(
            self.hook_pattern, recurrence.pattern, recurrence.mix, out.y, out.untouched
        )
        z = self.hook_z(z)
        gate = None
        if self.gate_proj is not None:
            gate = self.hook_gate(self.gate_proj(x).unflatten(-1, (self.n_heads, -1)))
        return self.out_proj(self.hook_normed(self.norm(z, gate)).flatten(2)), handed_on

    def _per_query_head(self, shared: Tensor) -> Tensor:
        """Repeat for every query head what it shares. [batch, pos, kv_head, ...]"""
        times = self.n_heads // self.n_kv_heads
        return shared if times == 1 else shared.repeat_interleave(times, dim=2)

    def _convolve(
        self, q: Tensor, k: Tensor, v: Tensor, segment: Segment, window: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """SiLU of q, k and v convolved, and their common window after the last token."""
        assert self.conv is not None, "asked for by forward"
        inputs = segment.keep_real(torch.cat([q, k, v], dim=-1))
        y, window = self.conv(inputs, self.hook_conv_carry, segment.start, window)
        q, k, v = self.conv.slices(self.hook_conv(y))
        # All hooks before any SiLU, which keeps its input: the slices share one memory.
        q = self.hook_conv_q(q.unflatten(-1, (self.n_heads, -1)))
        k = self.hook_conv_k(k.unflatten(-1, (self.n_kv_heads, -1)))
        v = self.hook_conv_v(v.unflatten(-1, (self.n_kv_heads, -1)))
        q, k, v = (F.silu(part).flatten(2) for part in (q, k, v))
        return q, k, v, window

    def _log_decay(self, x: Tensor, segment: Segment) -> Tensor:
        """<= 0; zero at padding, which leaves the state alone. [batch, pos, kv_head, d_key]"""
        low = F.linear(self.decay_down(x), self.decay_up.weight)
        core = core_dtype(low)
        logit = low.to(core) + self.decay_up.bias.to(core)
        log_decay = F.logsigmoid(logit) / self.options.gate_logit_normalizer
        return segment.keep_real(log_decay.unflatten(-1, (self.n_kv_heads, -1)))
