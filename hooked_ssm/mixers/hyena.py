"""Hyena: a long implicit convolution between two gates (Poli et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from hooked_ssm.checks import Count, Natural
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import Carried, Mixer, MixerOptions, Segment
from hooked_ssm.mixers.convolution import ShortConvolution, conv_carry_spec
from hooked_ssm.mixers.implicit_filter import SineFilter
from hooked_ssm.mixers.recurrence import through_pattern
from hooked_ssm.ops.causal import mix_channels
from hooked_ssm.ops.long_conv import long_conv, toeplitz
from hooked_ssm.ops.output import core_dtype
from hooked_ssm.rules import Rule


@dataclass(frozen=True, kw_only=True)
class HyenaOptions(MixerOptions):
    """Settings of Hyena.

    Attributes:
        d_conv: Width of the short convolution over x1, x2 and v.
        filter_order: Units of each layer of the network that makes the filter.
        emb_dim: Features of a tap's index; odd, at least 3.
        num_inner_mlps: Sine layers after the first one.
        w: Initial frequency of the sine layers.
        modulate: Whether the filter decays exponentially.
        normalized: Whether each tap is divided by its L1 norm over the channels.
        skip: Whether the long convolution adds its own input, weighted (zoology's `bias`, which
            the paper's configuration switches off).
    """

    d_conv: Count = 3
    filter_order: Count = 64
    emb_dim: Annotated[
        int, Rule("an odd integer >= 3", lambda value: value >= 3 and value % 2 == 1)
    ] = 3
    num_inner_mlps: Natural = 2
    w: int | float = 1.0
    modulate: bool = True
    normalized: bool = False
    skip: bool = False


class Hyena(Mixer):
    """y[t] = x2[t] * (sum_s filter[t-s] x1[s] v[s] + skip x1[t] v[t]); output = y W_O + b.

    x1, x2 and v come out of one projection and one short convolution, in this order. The filter is
    as long as n_ctx.
    """

    Options = HyenaOptions
    absent_roles = {
        **dict.fromkeys(
            ("state", "carry"),
            "its filter is not a recurrence's, so no state of finite size stands for the past: "
            "all writes are kept (hook_ssm_write)",
        ),
        "decay": "its filter decays within itself (hook_filter); nothing is carried to decay",
        "gate": "its gates are the key (hook_x1, before the long convolution) and the query "
        "(hook_x2, after it)",
    }
    options: HyenaOptions

    def __init__(self, d_model: int, n_ctx: int, options: HyenaOptions):
        super().__init__(d_model, n_ctx, options)
        self.max_length = n_ctx
        self.in_proj = Linear(d_model, 3 * d_model)
        self.conv = ShortConvolution(3 * d_model, options.d_conv)
        self.filter = SineFilter(
            d_model,
            n_ctx,
            options.filter_order,
            options.emb_dim,
            options.num_inner_mlps,
            options.w,
            modulate=options.modulate,
            normalized=options.normalized,
        )
        self.skip = nn.Parameter(torch.empty(d_model)) if options.skip else None
        self.out_proj = Linear(d_model, d_model, writes_residual=True)

    def axis_sizes(self) -> dict[str, int]:
        d_model = self.d_model
        sizes = {"d_model": d_model, "channel": 3 * d_model, "tap": self.n_ctx}
        return {**sizes, "earlier": self.options.d_conv - 1}

    def hook_specs(self) -> tuple[HookSpec, ...]:
        per_channel = "batch pos d_model"
        return (
            spec("hook_in_proj", "batch pos channel"),
            conv_carry_spec("channel"),
            spec("hook_conv", "batch pos channel", "conv"),
            spec("hook_x1", per_channel, "key"),
            spec("hook_x2", per_channel, "query"),
            spec("hook_v", per_channel, "value"),
            spec("hook_ssm_write", per_channel, "write", heavy=False, numbers="model"),
            spec("hook_filter", "d_model tap", numbers="core"),
            spec("hook_long_conv", per_channel),
            spec("hook_pattern", "batch d_model query_pos key_pos", "pattern"),
            spec("hook_y", per_channel, "mixed"),
        )

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the parameters as the authors do: uniform ones, but for the skip, N(0, 1).

        `init="paper"` then redraws all linear layers, the filter's too: zoology's does.
        """
        super().initialise(generator)
        self.conv.initialise(generator)
        self.filter.initialise()
        if self.skip is not None:
            with torch.no_grad():
                self.skip.normal_(generator=generator)

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        window, history = (None if carried is None else carried[n] for n in ("window", "writes"))
        projected = self.hook_in_proj(segment.keep_real(self.in_proj(x)))
        conv, window = self.conv(projected, self.hook_conv_carry, segment.start, window)
        conv = self.hook_conv(conv)
        d = self.d_model  # sliced, not split: hooks may edit the parts in place
        # The convolution's bias and window reach padding, so it is cut off again here.
        x1 = self.hook_x1(segment.keep_real(conv[..., :d]))
        x2, v = self.hook_x2(conv[..., d : 2 * d]), self.hook_v(conv[..., 2 * d :])
        write = self.hook_ssm_write(x1 * v)
        writes = write if history is None else torch.cat([history, write], dim=1)
        taps = self.hook_filter(self.filter(writes.shape[1]))
        mixed = self.hook_long_conv(long_conv(write, taps, skip=self.skip, history=history))
        y = through_pattern(
            self.hook_pattern,
            lambda: self._pattern(x1, x2, taps),
            lambda pattern: mix_channels(pattern, v),
            x2 * mixed,
            untouched=False,  # edits of the write or of the long convolution count as well
        )
        return self.out_proj(self.hook_y(y)), {"window": window, "writes": writes}

    def _pattern(self, x1: Tensor, x2: Tensor, taps: Tensor) -> Tensor:
        """x2[q] filter[q-k] x1[k], and the skip. [batch, d_model, query_pos, key_pos]"""
        core, length = core_dtype(taps), x1.shape[1]
        matrix = toeplitz(taps, length)
        if self.skip is not None:
            matrix = matrix + torch.diag_embed(self.skip.to(core)[:, None].expand(-1, length))
        return torch.einsum("bqm,mqk,bkm->bmqk", x2.to(core), matrix, x1.to(core))
