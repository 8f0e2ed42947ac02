"""Mamba: a selective state space model behind a short convolution and a gate (Gu & Dao 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_ssm.checks import Count, Natural, NonNegative
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import BlockDefaults, Carried, Mixer, Segment, StepSizeOptions
from hooked_ssm.mixers.convolution import ShortConvolution, conv_carry_spec
from hooked_ssm.mixers.recurrence import Recurrence, run, through_pattern
from hooked_ssm.ops.causal import mix_channels
from hooked_ssm.ops.output import ScanOutput, StatesWanted
from hooked_ssm.ops.selective_scan import selective_scan, selective_scan_pattern


@dataclass(frozen=True, kw_only=True)
class MambaOptions(StepSizeOptions):
    """Settings of Mamba; those of `StepSizeOptions`, and:

    Attributes:
        d_state: States per channel.
        d_conv: Width of the short convolution; 0 leaves it out (its SiLU stays).
        expand: d_inner = expand * d_model.
        d_inner: Overrides expand (pretrained models).
        dt_rank: Rank of the step size's projection; None = ceil(d_model / 16).
        bias, conv_bias: Whether the projections in and out, and the convolution, have a bias.
        norm_eps: RMS-normalise dt, B and C without weights (FalconMamba); None does not.
        pad_with_bias: Hugging Face's padding: the bias of the projection in still enters the
            convolution there, so with bias=True padding is not quite as if absent. False: it is.
    """

    d_state: Count = 16
    d_conv: Natural = 4
    expand: Count = 2
    d_inner: Count | None = None
    dt_rank: Count | None = None
    bias: bool = False
    conv_bias: bool = True
    norm_eps: NonNegative | None = None
    pad_with_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class SelectiveScan(Recurrence):
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]; y[t] = C[t] . h[t]. State [b, d_inner, n]."""

    timed: ClassVar[tuple[str, ...]] = ("x", "dt", "B", "C")
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    def fast_scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        return selective_scan(
            self.x, self.dt, self.A, self.B, self.C, initial_state=initial, return_states=wanted
        )

    def implied_decay(self) -> Tensor:
        return torch.exp(self.dt[..., None] * self.A)

    def _write_per_value(self) -> Tensor:
        return self.dt[..., None] * self.B.to(self.dt.dtype)[:, :, None]

    def implied_write(self) -> Tensor:
        return self._write_per_value() * self.x.to(self.dt.dtype)[..., None]

    def read(self, states: Tensor) -> Tensor:
        return torch.einsum("bpn,bpen->bpe", self.C.to(states.dtype), states).to(self.x.dtype)

    def pattern(self) -> Tensor:
        return selective_scan_pattern(
            self.decay(), self._write_per_value(), self.C.to(self.dt.dtype)
        )

    def mix(self, pattern: Tensor) -> Tensor:
        return mix_channels(pattern, self.x)


class Mamba(Mixer):
    """output = ((C h + D x) * SiLU(gate)) W_out, x = SiLU(conv(in_proj)), h by the selective scan.

    dt, the decay and the state are float32 under any model dtype.
    """

    Options = MambaOptions
    block_defaults = BlockDefaults(norm="rms", mlp=False)
    keeps_own_init = True
    options: MambaOptions

    def __init__(self, d_model: int, n_ctx: int, options: MambaOptions):
        super().__init__(d_model, n_ctx, options)
        d_inner = self.d_inner = options.d_inner or options.expand * d_model
        n, rank = options.d_state, options.dt_rank or math.ceil(d_model / 16)
        self.in_proj = Linear(d_model, 2 * d_inner, bias=options.bias)
        self.conv = (
            ShortConvolution(d_inner, options.d_conv, bias=options.conv_bias)
            if options.d_conv
            else None
        )
        self.x_proj = Linear(d_inner, rank + 2 * n, bias=False)
        self.dt_proj = Linear(rank, d_inner)
        self.A_log = nn.Parameter(torch.empty(d_inner, n))
        self.D = nn.Parameter(torch.empty(d_inner))
        self.out_proj = Linear(d_inner, d_model, bias=options.bias, writes_residual=True)
        for parameter in (self.A_log, self.D, self.dt_proj.bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def axis_sizes(self) -> dict[str, int]:
        d_state, d_conv = self.options.d_state, self.options.d_conv
        return {"d_inner": self.d_inner, "d_state": d_state, "earlier": max(d_conv - 1, 0)}

    def hook_specs(self) -> tuple[HookSpec, ...]:
        conv = (conv_carry_spec("d_inner"), spec("hook_conv", "batch pos d_inner", "conv"))
        per_state = "batch pos d_inner d_state"
        return (
            spec("hook_in_proj", "batch pos d_inner"),
            spec("hook_gate", "batch pos d_inner", "gate"),
            *(conv if self.options.d_conv else ()),
            spec("hook_x", "batch pos d_inner", "value"),
            spec("hook_ssm_dt", "batch pos d_inner"),
            spec("hook_ssm_B", "batch pos d_state", "key"),
            spec("hook_ssm_C", "batch pos d_state", "query"),
            spec("hook_ssm_decay", per_state, "decay"),
            spec("hook_ssm_write", per_state, "write"),
            spec("hook_ssm_carry", "batch d_inner d_state", "carry", per_position=True),
            spec("hook_ssm_state", per_state, "state"),
            spec("hook_pattern", "batch d_inner query_pos key_pos", "pattern"),
            spec("hook_y", "batch pos d_inner", "mixed"),
            spec("hook_y_skip", "batch pos d_inner"),
            spec("hook_gated", "batch pos d_inner"),
        )

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the parameters as the authors do: A = -1..-n, dt log-uniform in [dt_min, dt_max]."""
        super().initialise(generator)
        if self.conv is not None:
            self.conv.initialise(generator)
        with torch.no_grad():
            n = self.options.d_state
            self.A_log.copy_(torch.arange(1, n + 1).float().log().expand_as(self.A_log))
            self.D.fill_(1)
            bound = self.dt_proj.in_features**-0.5
            self.dt_proj.weight.uniform_(-bound, bound, generator=generator)
            self.dt_proj.bias.copy_(
                draw_dt_bias(self.d_inner, self.options.dt_min, self.options.dt_max, generator)
            )

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        projected = self.in_proj(segment.keep_real(x))
        inputs = projected[..., : self.d_inner]
        if not self.options.pad_with_bias:
            inputs = segment.keep_real(inputs)
        inputs = self.hook_in_proj(inputs)
        gate = self.hook_gate(projected[..., self.d_inner :])
        handed_on: Carried = {}
        if self.conv is not None:
            window = None if carried is None else carried["window"]
            conv, handed_on["window"] = self.conv(
                inputs, self.hook_conv_carry, segment.start, window
            )
            inputs = self.hook_conv(conv)
        value = self.hook_x(F.silu(inputs))
        recurrence = self._recurrence(value, segment)
        out = run(self, recurrence, segment.start, None if carried is None else carried["state"])
        handed_on["state"] = out.final
        y = through_pattern(
            self.hook_pattern, recurrence.pattern, recurrence.mix, out.y, out.untouched
        )
        y = self.hook_y_skip(self.hook_y(y) + self.D.to(value.dtype) * value)
        return self.out_proj(self.hook_gated(y * F.silu(gate))), handed_on

    def _recurrence(self, value: Tensor, segment: Segment) -> SelectiveScan:
        rank, n = self.dt_proj.in_features, self.options.d_state
        projected = self.x_proj(value)  # sliced, not split: hooks may edit the parts in place
        low, B, C = projected[..., :rank], projected[..., rank:-n], projected[..., -n:]
        core = torch.float64 if value.dtype == torch.float64 else torch.float32
        eps = self.options.norm_eps
        if eps is not None:
            low, B, C = (
                F.rms_norm(t.to(core), t.shape[-1:], eps=eps).to(t.dtype) for t in (low, B, C)
            )
        dt = F.linear(low, self.dt_proj.weight).to(core) + self.dt_proj.bias.to(core)
        dt = self.hook_ssm_dt(segment.keep_real(F.softplus(dt)))
        return SelectiveScan(
            x=value,
            dt=dt,
            A=-torch.exp(self.A_log.to(core)),
            B=self.hook_ssm_B(B),
            C=self.hook_ssm_C(C),
        )


def draw_dt_bias(
    size: int, dt_min: float, dt_max: float, generator: torch.Generator, floor: float = 1e-4
) -> Tensor:
    """Return biases whose softplus is log-uniform in [dt_min, dt_max], at least `floor`. [size]

    Source: Gu & Dao 2023, section 3.6; mamba_ssm's initialisation.
    """
    low, high = math.log(dt_min), math.log(dt_max)
    dt = torch.empty(size).uniform_(low, high, generator=generator).exp().clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
