"""Mamba-2: a state space model with one decay per head and position (Dao & Gu 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_ssm.checks import Count, Natural, NonNegative
from hooked_ssm.errors import ConfigError
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import BlockDefaults, Carried, Mixer, Segment, StepSizeOptions
from hooked_ssm.mixers.convolution import ShortConvolution, conv_carry_spec
from hooked_ssm.mixers.gated_norm import GatedNorm
from hooked_ssm.mixers.mamba import draw_dt_bias
from hooked_ssm.mixers.recurrence import Recurrence, run, through_pattern
from hooked_ssm.ops.causal import mix_heads
from hooked_ssm.ops.linear_scan import linear_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.ops.ssd import ssd, ssd_pattern
from hooked_ssm.rules import Rule

Limits = Annotated[
    Sequence[float],
    Rule(
        "two numbers, 0 <= lowest <= highest",
        lambda value: len(value) == 2 and 0 <= value[0] <= value[1],
    ),
]


@dataclass(frozen=True, kw_only=True)
class Mamba2Options(StepSizeOptions):
    """Settings of Mamba-2; those of `StepSizeOptions`, and:

    Attributes:
        n_heads: Heads; each has d_inner / n_heads channels (the authors take 64 channels a head).
        d_state: States per channel.
        n_groups: Groups of consecutive heads that share B and C.
        d_conv: Width of the short convolution; 0 leaves it out (its SiLU stays).
        expand: d_inner = expand * d_model.
        d_inner: Overrides expand (pretrained models).
        norm: RMSNorm before the output projection: per "group", over "all" channels
            (Mamba2Simple), or "none".
        norm_before_gate: Normalise first and gate then, instead of the other way round.
        norm_eps: Added inside the norm's root.
        D_per_channel: One skip weight D per channel instead of one per head.
        bias, conv_bias: Whether the projections in and out, and the convolution, have a bias.
        dt_limit: Lowest and highest step size; None for no limits.
        learn_initial_state: Start from a trained state instead of zero (Mamba2Simple).
    """

    n_heads: Count = 1
    d_state: Count = 128
    n_groups: Count = 1
    d_conv: Natural = 4
    expand: Count = 2
    d_inner: Count | None = None
    norm: Literal["group", "all", "none"] = "group"
    norm_before_gate: bool = False
    norm_eps: NonNegative = 1e-5
    D_per_channel: bool = False
    bias: bool = False
    conv_bias: bool = True
    dt_limit: Limits | None = None
    learn_initial_state: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads % self.n_groups:
            raise ConfigError(
                f"mamba2: n_groups={self.n_groups} does not divide n_heads={self.n_heads}; "
                "change either"
            )


@dataclass(frozen=True, kw_only=True)
class StateSpaceDual(Recurrence):
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T; y[t] = h[t] C[t]. State [b, h, d, n]."""

    timed: ClassVar[tuple[str, ...]] = ("x", "dt", "B", "C")
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    def fast_scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        return ssd(
            self.x, self.dt, self.A, self.B, self.C, initial_state=initial, return_states=wanted
        )

    def scan_writes(self, decay: Tensor, write: Tensor, initial: Tensor | None) -> Tensor:
        return linear_scan(decay[..., None, None], write, initial)

    def implied_decay(self) -> Tensor:
        return torch.exp(self.dt * self.A).clone()  # exp keeps its result: hooks may edit the copy

    def implied_write(self) -> Tensor:
        B = per_head(self.B.to(self.dt.dtype), self.x.shape[2])
        x = self.dt[..., None] * self.x.to(self.dt.dtype)
        return torch.einsum("bphd,bphn->bphdn", x, B)

    def read(self, states: Tensor) -> Tensor:
        C = per_head(self.C.to(states.dtype), self.x.shape[2])
        return torch.einsum("bphdn,bphn->bphd", states, C).to(self.x.dtype)

    def pattern(self) -> Tensor:
        return ssd_pattern(self.dt, self.A, self.B, self.C)

    def mix(self, pattern: Tensor) -> Tensor:
        return mix_heads(pattern, self.x)


def per_head(grouped: Tensor, heads: int) -> Tensor:
    """Give every head what its group has. [batch, pos, group, ...] -> [batch, pos, head, ...]"""
    return grouped.repeat_interleave(heads // grouped.shape[2], dim=2)


class Mamba2(Mixer):
    """output = norm((C h + D x) * SiLU(gate)) W_out, h by the state space dual.

    One projection gives gate, x, B, C and dt; one short convolution runs over x, B and C. dt, the
    decay and the state are float32 under any model dtype.
    """

    Options = Mamba2Options
    block_defaults = BlockDefaults(norm="rms", mlp=False)
    absent_roles = {"conv": "this one was built without a short convolution (d_conv=0)"}
    keeps_own_init = True
    options: Mamba2Options

    def __init__(self, d_model: int, n_ctx: int, options: Mamba2Options):
        super().__init__(d_model, n_ctx, options)
        d_inner = self.d_inner = options.d_inner or options.expand * d_model
        heads = self.n_heads = options.n_heads
        if d_inner % heads:
            raise ConfigError(
                f"mamba2: n_heads={heads} does not divide d_inner={d_inner}; change either"
            )
        self.d_head = d_inner // heads
        self.channels = d_inner + 2 * options.n_groups * options.d_state
        self.in_proj = Linear(d_model, d_inner + self.channels + heads, bias=options.bias)
        self.conv = (
            ShortConvolution(self.channels, options.d_conv, bias=options.conv_bias)
            if options.d_conv
            else None
        )
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads, self.d_head if options.D_per_channel else 1))
        unregularised = [self.dt_bias, self.A_log, self.D]
        self.initial_state = None
        if options.learn_initial_state:
            self.initial_state = nn.Parameter(torch.empty(heads, self.d_head, options.d_state))
            unregularised.append(self.initial_state)
        for parameter in unregularised:
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.norm = None
        if options.norm != "none":
            groups = options.n_groups if options.norm == "group" else 1
            self.norm = GatedNorm(d_inner, options.norm_eps, groups)
        self.out_proj = Linear(d_inner, d_model, bias=options.bias, writes_residual=True)

    def axis_sizes(self) -> dict[str, int]:
        options = self.options
        return {
            "d_inner": self.d_inner,
            "channel": self.channels,
            "earlier": max(options.d_conv - 1, 0),
            "head": self.n_heads,
            "d_head": self.d_head,
            "group": options.n_groups,
            "d_state": options.d_state,
        }

    def hook_specs(self) -> tuple[HookSpec, ...]:
        options = self.options
        conv = (conv_carry_spec("channel"), spec("hook_conv", "batch pos channel", "conv"))
        gated_alone = options.norm == "none" or not options.norm_before_gate
        return (
            spec("hook_in_proj", "batch pos channel"),
            spec("hook_gate", "batch pos d_inner", "gate"),
            *(conv if options.d_conv else ()),
            spec("hook_x", "batch pos head d_head", "value"),
            spec("hook_ssm_B", "batch pos group d_state", "key"),
            spec("hook_ssm_C", "batch pos group d_state", "query"),
            spec("hook_ssm_dt", "batch pos head"),
            spec("hook_ssm_decay", "batch pos head", "decay", heavy=False),
            spec("hook_ssm_write", "batch pos head d_head d_state", "write"),
            spec("hook_ssm_carry", "batch head d_head d_state", "carry", per_position=True),
            spec("hook_ssm_state", "batch pos head d_head d_state", "state"),
            spec("hook_pattern", "batch head query_pos key_pos", "pattern"),
            spec("hook_y", "batch pos head d_head", "mixed"),
            spec("hook_y_skip", "batch pos head d_head"),
            *((spec("hook_gated", "batch pos d_inner"),) if gated_alone else ()),
            *((spec("hook_normed", "batch pos d_inner"),) if options.norm != "none" else ()),
        )

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the parameters as the authors do: A in [-16, -1], dt log-uniform, D = 1."""
        super().initialise(generator)
        if self.conv is not None:
            self.conv.initialise(generator)
        with torch.no_grad():
            self.A_log.uniform_(1, 16, generator=generator).log_()
            self.D.fill_(1)
            self.dt_bias.copy_(
                draw_dt_bias(self.n_heads, self.options.dt_min, self.options.dt_max, generator)
            )
            if self.initial_state is not None:
                self.initial_state.zero_()

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        projected = self.in_proj(x)  # sliced, not split: hooks may edit the parts in place
        stop = self.d_inner + self.channels
        inputs = self.hook_in_proj(segment.keep_real(projected[..., self.d_inner : stop]))
        gate = self.hook_gate(projected[..., : self.d_inner])
        handed_on: Carried = {}
        if self.conv is not None:
            window = None if carried is None else carried["window"]
            conv, handed_on["window"] = self.conv(
                inputs, self.hook_conv_carry, segment.start, window
            )
            inputs = self.hook_conv(conv)
        recurrence = self._recurrence(F.silu(inputs), projected[..., stop:], segment)
        initial = self._initial(len(x)) if carried is None else carried["state"]
        out = run(self, recurrence, segment.start, initial)
        handed_on["state"] = out.final
        y = through_pattern(
            self.hook_pattern, recurrence.pattern, recurrence.mix, out.y, out.untouched
        )
        y = self.hook_y_skip(self.hook_y(y) + self.D.to(y.dtype) * recurrence.x)
        return self.out_proj(self._gate_and_norm(y.flatten(2), gate)), handed_on

    def _recurrence(self, activated: Tensor, dt: Tensor, segment: Segment) -> StateSpaceDual:
        """Slice x, B and C; finish dt: no step at padding, so that nothing decays or is written."""
        keys = self.options.n_groups * self.options.d_state
        x, B = activated[..., : self.d_inner], activated[..., self.d_inner : -keys]
        C = activated[..., -keys:]
        core = core_dtype(activated)
        dt = F.softplus(dt.to(core) + self.dt_bias.to(core))
        if self.options.dt_limit is not None:
            dt = dt.clamp(*self.options.dt_limit)
        return StateSpaceDual(
            x=self.hook_x(x.unflatten(-1, (self.n_heads, -1))),
            B=self.hook_ssm_B(B.unflatten(-1, (self.options.n_groups, -1))),
            C=self.hook_ssm_C(C.unflatten(-1, (self.options.n_groups, -1))),
            dt=self.hook_ssm_dt(segment.keep_real(dt)),
            A=-torch.exp(self.A_log.to(core)),
        )

    def _initial(self, batch: int) -> Tensor | None:
        if self.initial_state is None:
            return None
        state = self.initial_state.to(core_dtype(self.initial_state))
        return state.expand(batch, *state.shape)

    def _gate_and_norm(self, y: Tensor, gate: Tensor) -> Tensor:
        if self.norm is not None and self.options.norm_before_gate:
            return self.hook_normed(self.norm(y, gate))
        gated = self.hook_gated(y * F.silu(gate))
        return gated if self.norm is None else self.hook_normed(self.norm(gated))

    def pattern_offset(self, activation: Callable[[str], Tensor]) -> Tensor | float:
        """What is read of the trained initial state: it depends on no value."""
        if self.initial_state is None:
            return 0.0
        left = activation("hook_ssm_decay").cumprod(1)
        C = per_head(activation("hook_ssm_C").to(left.dtype), self.n_heads)
        read = torch.einsum("bphn,hdn->bphd", C, self.initial_state.to(left.dtype))
        return left[..., None] * read
