"""H3: a shift SSM on the keys and a diagonal SSM on the outer products (Fu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hooked_ssm.checks import Count
from hooked_ssm.errors import ConfigError, HookUnavailableError, ShapeError
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.hook_points import edited
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import Carried, Mixer, Segment, StepSizeOptions
from hooked_ssm.mixers.convolution import conv_carry_spec
from hooked_ssm.mixers.h3_ssms import DiagonalModes, Modes, ShiftSSM
from hooked_ssm.mixers.recurrence import Recurrence, run, through_pattern
from hooked_ssm.ops.causal import causal_product, mix_heads
from hooked_ssm.ops.diagonal_ssm import diagonal_kernel, diagonal_ssm
from hooked_ssm.ops.diagonal_ssm.kernels import as_complex, as_reals, powers
from hooked_ssm.ops.long_conv import long_conv, toeplitz
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.rules import Rule

FEW_TAPS = 128
"""Up to this length multiplying by the filter's matrix is cheaper than transforming.

Forward and backward on one core, 128 channels in 32 heads: 1.5 against 12 ms at [32, 37], 9 against
11 ms at [32, 128], 41 against 8 ms at [4, 256]."""


@dataclass(frozen=True, kw_only=True)
class H3Options(StepSizeOptions):
    """Settings of H3; those of `StepSizeOptions`, and:

    Attributes:
        d_state: Slots of the shift SSM, and real dimensions of the diagonal SSM, which has
            d_state // 2 complex modes; None = n_ctx (the paper's choice).
        head_dim: Keys and values per head; each head's state holds their outer product.
    """

    d_state: Annotated[int, Rule("an integer >= 2", lambda value: value >= 2)] | None = None
    head_dim: Count = 2


@dataclass(frozen=True, kw_only=True)
class DiagonalSSM(Recurrence):
    """h[t] = dA h[t-1] + dB k[t] v[t]^T; y[t] = q[t] . (2 Re C h[t] + D k[t] v[t]^T).

    State [batch, head, d_key, d_head, mode], complex; kept as it is at padding, where nothing is
    written. `filter` is the one that the modes imply, None where there is a past, which only the
    state holds; `real` is False at padding, None if there is none. `last`: nobody asks for the
    final state, which the convolution gives at a price, so it is left out (empty).
    """

    timed: ClassVar[tuple[str, ...]] = ("v", "q", "k", "real")
    q: Tensor
    k: Tensor
    v: Tensor
    modes: Modes
    D: Tensor
    filter: Tensor | None = None
    real: Tensor | None = None
    last: bool = False

    @property
    def outer(self) -> Tensor:
        """k v^T, what goes into both the state and the skip. [batch, pos, head, d_key, d_head]"""
        return torch.einsum("bphi,bphj->bphij", self.k, self.v.to(self.k.dtype))

    def fast_scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        if self.real is not None and wanted is not False:
            states = self.scan_writes(self.implied_decay(), self.implied_write(), initial)
            return ScanOutput(self.read(states), states, states[:, -1])
        outer = self.outer
        if initial is None and wanted is False and self.filter is not None:
            y = self._answer(convolve(outer, self.filter), outer)
            final = outer.new_empty(0) if self.last else self._final_state(outer, None)
            return ScanOutput(y, None, final)
        scanned = diagonal_ssm(outer, *self.modes, initial_state=initial, return_states=wanted)
        if self.real is not None:
            scanned = scanned._replace(final_state=self._final_state(outer, initial))
        return scanned._replace(y=self._answer(scanned.y, outer))

    def scan_writes(self, decay: Tensor, write: Tensor, initial: Tensor | None) -> Tensor:
        decay = decay[:, :, :, None, None]
        state, states = initial, []
        for a, b in zip(decay.unbind(1), write.unbind(1), strict=True):
            state = b if state is None else a * state + b
            states.append(state)
        return torch.stack(states, dim=1)

    def implied_decay(self) -> Tensor:
        decay = self.modes.dA.repeat(*self.v.shape[:2], 1, 1)
        return decay if self.real is None else decay.where(self.real[..., None, None], 1)

    def implied_write(self) -> Tensor:
        return self.outer[..., None] * self.modes.dB[:, None, None]

    def read(self, states: Tensor) -> Tensor:
        mixed = 2 * torch.einsum("bphijn,hn->bphij", states, self.modes.C).real
        return self._answer(mixed, self.outer)

    def change(self, filter: Tensor) -> Tensor:
        """What a change of the filter adds to the outputs. [batch, pos, head, d_head]"""
        return self._read_out(convolve(self.outer, filter))

    def pattern(self) -> Tensor:
        assert self.filter is not None, "made wherever the pattern is asked for"
        length = self.q.shape[1]
        skip = torch.diag_embed(self.D[:, None].expand(-1, length))
        scores = torch.einsum("bqhi,bkhi->bhqk", self.q, self.k)
        return scores * (toeplitz(self.filter, length) + skip)

    def mix(self, pattern: Tensor) -> Tensor:
        return mix_heads(pattern, self.v)

    def _answer(self, mixed: Tensor, outer: Tensor) -> Tensor:
        return self._read_out(mixed + self.D[:, None, None] * outer)

    def _read_out(self, mixed: Tensor) -> Tensor:
        return torch.einsum("bphi,bphij->bphj", self.q, mixed).to(self.v.dtype)

    def _final_state(self, outer: Tensor, initial: Tensor | None) -> Tensor:
        """dA^L initial + sum_s dA^(L-1-s) dB k[s] v[s]^T, without any state between.

        L is the length up to a document's last real token.
        """
        length, steps = outer.shape[1], None
        if self.real is not None:
            outer, steps = aligned_to_the_end(outer, self.real)
        decays = powers(self.modes.dA, length + 1)
        left = as_reals(decays[:, :length].flip(1) * self.modes.dB[:, None])
        by_head = outer.permute(2, 0, 3, 4, 1)  # [head, batch, d_key, d_head, pos]
        final = as_complex(by_head.flatten(1, 3) @ left)
        final = final.unflatten(1, by_head.shape[1:4]).transpose(0, 1)
        if initial is None or steps is None:
            return final
        return final + decays[:, steps].transpose(0, 1)[:, :, None, None] * initial


def aligned_to_the_end(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding that ends a document to its start, as zeros. [batch, pos, ...]

    Returns:
        The moved x, and each document's length up to its last real token. [batch]
    """
    positions = torch.arange(real.shape[1], device=real.device)
    steps = (real * (positions + 1)).amax(1)
    source = positions - (real.shape[1] - steps)[:, None]
    moved = x[torch.arange(len(x), device=x.device)[:, None], source.clamp(min=0)]
    return moved.masked_fill((source < 0).view(*source.shape, *[1] * (x.ndim - 2)), 0), steps


def convolve(outer: Tensor, filter: Tensor) -> Tensor:
    """Convolve every entry of a head's outer products with the head's filter.

    Args:
        outer: [batch, pos, head, d_key, d_head]
        filter: [head, tap]
    """
    length = outer.shape[1]
    if length <= FEW_TAPS:
        by_head = outer.permute(2, 1, 0, 3, 4)  # [head, pos, batch, d_key, d_head]
        mixed = causal_product(toeplitz(filter, length), by_head.flatten(2))
        return mixed.view(by_head.shape).permute(2, 1, 0, 3, 4)
    channels = filter.repeat_interleave(outer.shape[3] * outer.shape[4], dim=0)
    return long_conv(outer.flatten(2), channels).view_as(outer)


class H3(Mixer):
    """y[t] = q[t] . (SSM(k' v^T)[t] + D k'[t] v[t]^T), k' = shift SSM of k; output = y W_O + b.

    Heads of keys and values of width head_dim; the diagonal SSM acts alike on a head's d_key x
    d_head products. Its filter ends at n_ctx taps: on a longer sequence (which the model refuses)
    the mixer is a convolution, not a recurrence, and what concerns states raises.

    The value index is the slow one among the output layer's input channels: d * n_heads + head.
    """

    Options = H3Options
    absent_roles = {
        "gate": "it has no gate; what is read from the state is multiplied by the query"
    }
    options: H3Options

    def __init__(self, d_model: int, n_ctx: int, options: H3Options):
        super().__init__(d_model, n_ctx, options)
        self.max_length = n_ctx
        d_state = self.d_state = options.d_state or n_ctx
        self.n_heads, left = divmod(d_model, options.head_dim)
        if left or d_state < 2:
            raise ConfigError(
                f"h3: head_dim={options.head_dim} must divide d_model={d_model}, and d_state (now "
                f"{d_state}; n_ctx unless given) be at least 2; change one of them"
            )
        self.q_proj, self.k_proj, self.v_proj = (Linear(d_model, d_model) for _ in range(3))
        self.shift = ShiftSSM(d_model, d_state, n_ctx)
        self.ssm = DiagonalModes(self.n_heads, d_state // 2)
        self.out_proj = Linear(d_model, d_model, writes_residual=True)

    def axis_sizes(self) -> dict[str, int]:
        d = self.options.head_dim
        heads = {"head": self.n_heads, "d_key": d, "d_head": d, "mode": self.d_state // 2}
        return {**heads, "d_model": self.d_model, "earlier": self.shift.taps - 1, "tap": self.n_ctx}

    def hook_specs(self) -> tuple[HookSpec, ...]:
        key, value = "batch pos head d_key", "batch pos head d_head"
        state = "head d_key d_head mode"
        return (
            spec("hook_q", key, "query"),
            spec("hook_k", key),
            spec("hook_v", value, "value"),
            conv_carry_spec("d_model"),
            spec("hook_shift", key, "key", "conv"),
            spec("hook_filter", "head tap", numbers="core"),
            spec("hook_ssm_decay", "batch pos head mode", "decay", numbers="complex"),
            spec("hook_ssm_write", f"batch pos {state}", "write", numbers="complex"),
            spec("hook_ssm_carry", f"batch {state}", "carry", per_position=True, numbers="complex"),
            spec("hook_ssm_state", f"batch pos {state}", "state", numbers="complex"),
            spec("hook_pattern", "batch head query_pos key_pos", "pattern"),
            spec("hook_y", value, "mixed"),
        )

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the parameters as the authors do; `init="paper"` redraws the linear layers only."""
        super().initialise(generator)
        self.shift.initialise(generator)
        self.ssm.initialise(self.options.dt_min, self.options.dt_max, generator)

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        cut = self._refuse_states_beyond_n_ctx(segment, carried)
        heads = (self.n_heads, -1)
        q = self.hook_q(self.q_proj(x).unflatten(-1, heads))
        k = self.hook_k(segment.keep_real(self.k_proj(x)).unflatten(-1, heads))
        v = self.hook_v(self.v_proj(x).unflatten(-1, heads))
        window, initial = (None if carried is None else carried[n] for n in ("window", "state"))
        shifted, window = self.shift(
            k.flatten(2), self.hook_conv_carry, segment.start, window, segment.last
        )
        k = self.hook_shift(segment.keep_real(shifted).unflatten(-1, heads))
        core, modes = core_dtype(v), self.ssm.discrete()
        filter, hooked = self._filter(modes, segment.start + segment.length, initial is not None)
        recurrence = DiagonalSSM(
            q=q.to(core),
            k=k.to(core),
            v=v,
            modes=modes,
            D=self.ssm.D.to(core),
            filter=filter,
            real=segment.real,
            last=segment.last and not self.hook_ssm_carry.listened_at(),
        )
        out = run(self, recurrence, segment.start, initial)
        y = out.y
        if filter is not None and hooked is not filter:
            recurrence = replace(recurrence, filter=hooked)
            y = y + recurrence.change(hooked - filter)
        y = through_pattern(self.hook_pattern, recurrence.pattern, recurrence.mix, y, out.untouched)
        output = self.out_proj(self.hook_y(y).transpose(2, 3).flatten(2))
        if segment.last:
            return output, {}
        return output, {"window": window} if cut else {"window": window, "state": out.final}

    def _filter(
        self, modes: Modes, length: int, has_past: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The filter, if anybody needs it, before and after its hook. [head, tap]"""
        if has_past and not (self.hook_filter.listened or self.hook_pattern.listened):
            return None, None
        filter = diagonal_kernel(*modes, min(length, self.n_ctx))
        if not self.hook_filter.listened:
            return filter, filter
        hooked, touched = edited(self.hook_filter, filter.clone())
        if has_past and not torch.equal(hooked, filter):
            raise HookUnavailableError(
                f"{self.hook_filter.name}: an edited filter cannot reach tokens of earlier calls, "
                "of which only the state is left; run the whole sequence in one call"
            )
        return filter, hooked if touched else filter

    def _refuse_states_beyond_n_ctx(self, segment: Segment, carried: Carried | None) -> bool:
        """Whether the filter is cut short; raises if somebody wants a state then."""
        stop = segment.start + segment.length
        if stop <= self.n_ctx:
            return False
        why = f"h3's filter ends at n_ctx={self.n_ctx} taps, and position {stop - 1} lies beyond"
        if carried is not None:
            raise ShapeError(
                f"{why}: no state stands for the past there; run the whole sequence in one call, "
                "or build with a larger n_ctx"
            )
        points = (self.hook_ssm_decay, self.hook_ssm_write, self.hook_ssm_state)
        listened = [str(point.name) for point in points if point.listened]
        at = self.hook_ssm_carry.listened_at(segment.start, stop)
        listened += [f"{self.hook_ssm_carry.name}.{t}" for t in at]
        if listened:
            raise HookUnavailableError(
                f"{listened[0]} cannot fire: {why}, so this is no recurrence; shorten the "
                "sequence, or build with a larger n_ctx"
            )
        return True
