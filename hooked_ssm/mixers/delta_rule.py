"""The delta rule behind its hook points, plain and gated; what both delta nets share.

    S' = decay[t] S[t-1];   delta[t] = v[t] - S'^T k[t];   S[t] = S' + beta[t] k[t] delta[t]^T

As a recurrence of writes: S[t] = (I - beta k k^T) S' + write[t], write = beta k v^T. An edited
write or decay re-runs it, and keys and betas go on erasing. An edited delta is taken as given: what
it changes is added to the state and decays like any write, but is neither erased nor answered by
the later deltas (to have them respond, edit the value instead).

TransformerLens 4.3 gives gated delta nets an alias `hook_ssm_write` of beta; here it is, as in
every mixer, the term that is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hooked_ssm.errors import HookUnavailableError
from hooked_ssm.hook_points import cut_points, edited
from hooked_ssm.mixers.base import Mixer
from hooked_ssm.mixers.recurrence import (
    Outcome,
    Recurrence,
    join,
    replace_last,
    run,
    through_decay_and_write,
)
from hooked_ssm.ops.causal import mix_heads
from hooked_ssm.ops.delta_rule import (
    delta_rule,
    delta_rule_from_writes,
    delta_rule_given_error,
    delta_rule_pattern,
    prediction_error,
)
from hooked_ssm.ops.linear_scan import linear_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted, wanted_positions


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Recurrence):
    """See the module; y[t] = S[t]^T q[t] / sqrt(d_key). State [batch, head, d_key, d_head].

    Attributes:
        q, k: Of unit length. [batch, pos, head, d_key]
        v: Values. [batch, pos, head, d_head]
        beta: Write strength. [batch, pos, head]
        log_decay: None for the plain rule. [batch, pos, head]
    """

    timed: ClassVar[tuple[str, ...]] = ("v", "q", "k", "beta", "log_decay")
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None = None

    @property
    def is_edited(self) -> bool:
        """Whether decay or write were edited."""
        return self.given_decay is not None or self.given_write is not None

    def fast_scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        return delta_rule(
            self.q,
            self.k,
            self.v,
            self.beta,
            log_decay=self.log_decay,
            initial_state=initial,
            return_states=wanted,
        )

    def scan_writes(self, decay: Tensor, write: Tensor, initial: Tensor | None) -> Tensor:
        if self.given_decay is None:
            return delta_rule_from_writes(
                self.k, self.beta, write, log_decay=self.log_decay, initial_state=initial
            )
        return self._step_by_step(decay, write, initial)

    def _step_by_step(self, decay: Tensor, write: Tensor, state: Tensor | None) -> Tensor:
        """All states for any decay: an edited one may be negative, so that it has no logarithm."""
        state = torch.zeros_like(write[:, 0]) if state is None else state
        states = []
        steps = (decay[..., None, None], self.k, self.beta, write)
        for decay_t, key, beta, write_t in zip(*(x.unbind(1) for x in steps), strict=True):
            kept = decay_t * state
            erased = beta[..., None] * torch.einsum("bhf,bhfd->bhd", key, kept)
            state = kept + write_t - key[..., None] * erased[..., None, :]
            states.append(state)
        return torch.stack(states, dim=1)

    def implied_decay(self) -> Tensor:
        if self.log_decay is None:
            return torch.ones_like(self.beta)
        return self.log_decay.exp().clone()  # exp keeps its result: hooks may edit the copy

    def implied_write(self) -> Tensor:
        return self._write_of(self.v)

    def _write_of(self, value: Tensor) -> Tensor:
        strong = self.beta[..., None] * value.to(self.beta.dtype)
        return torch.einsum("bphf,bphd->bphfd", self.k, strong)

    def read(self, states: Tensor) -> Tensor:
        q = self.q.to(states.dtype) * self.q.shape[-1] ** -0.5
        return torch.einsum("bphf,bphfd->bphd", q, states).to(self.v.dtype)

    def pattern(self) -> Tensor:
        return delta_rule_pattern(self.q, self.k, self.beta, self.log_decay)

    def mix(self, pattern: Tensor) -> Tensor:
        return mix_heads(pattern, self.v)

    # What the hook on the prediction errors needs.

    def scan_with_deltas(self, initial: Tensor | None, wanted: bool) -> tuple[ScanOutput, Tensor]:
        """Run it, and return the prediction errors too. [batch, pos, head, d_head]"""
        if not self.is_edited:
            delta = prediction_error(
                self.k, self.v, self.beta, log_decay=self.log_decay, initial_state=initial
            )
            return self.scan_deltas(delta, initial, wanted), delta
        out = self.scan(initial, True)
        assert out.states is not None, "asked for"
        first = torch.zeros_like(out.states[:, 0]) if initial is None else initial
        before = torch.cat([first[:, None], out.states[:, :-1]], dim=1)
        recalled = self.decay()[..., None] * torch.einsum("bphf,bphfd->bphd", self.k, before)
        return (out if wanted else out._replace(states=None)), self.v.to(recalled.dtype) - recalled

    def scan_deltas(
        self, delta: Tensor, initial: Tensor | None, wanted: StatesWanted
    ) -> ScanOutput:
        """Run S[t] = decay[t] S[t-1] + beta k delta^T: the errors given, nothing erased."""
        if self.given_decay is None:
            out = delta_rule_given_error(
                self.q,
                self.k,
                delta,
                self.beta,
                log_decay=self.log_decay,
                initial_state=initial,
                return_states=wanted,
            )
            return out._replace(y=out.y.to(self.v.dtype))
        states = linear_scan(self.given_decay[..., None, None], self._write_of(delta), initial)
        kept = states[:, wanted_positions(wanted, states.shape[1])] if wanted else None
        return ScanOutput(self.read(states), kept, states[:, -1])


def run_delta_rule(
    mixer: Mixer, recurrence: DeltaRule, start: int, initial: Tensor | None
) -> Outcome:
    """Run the delta rule through a mixer's hooks; as `recurrence.run`, with hook_delta.

    Raises:
        HookUnavailableError: A delta was edited at or before a position whose carry is hooked.
    """
    if not mixer.hook_delta.listened:
        return run(mixer, recurrence, start, initial)
    implied = recurrence
    recurrence = through_decay_and_write(mixer, recurrence)
    wanted = mixer.hook_ssm_state.listened
    scanned = _scan_in_segments(mixer, recurrence, start, initial, wanted)
    y, states, final = scanned.y, scanned.states, scanned.final
    delta, touched = edited(mixer.hook_delta, scanned.delta.clone())
    if touched:
        change = delta - scanned.delta
        _refuse_missed_carries(mixer, change, start)
        added = recurrence.scan_deltas(change, None, wanted)
        y, final = y + added.y, final + added.final_state
        states = None if states is None else states + added.states
    if states is not None:
        states, read_anew = edited(mixer.hook_ssm_state, states)
        y = recurrence.read(states) if read_anew else y
    cut = bool(mixer.hook_ssm_carry.listened_at(start, start + y.shape[1]))
    changed = recurrence is not implied or touched or wanted or cut or initial is not None
    return Outcome(y, final, not changed)


class _Scanned(NamedTuple):
    """What a scan through the carries' hooks gives; as `ScanOutput`, with the deltas."""

    y: Tensor
    delta: Tensor
    states: Tensor | None
    final: Tensor


def _scan_in_segments(
    mixer: Mixer, recurrence: DeltaRule, start: int, state: Tensor | None, wanted: bool
) -> _Scanned:
    """Scan, cut after every position whose carry somebody listens to, and keep the deltas."""
    parts: list[_Scanned] = []
    for first, stop, position in cut_points(mixer.hook_ssm_carry, start, recurrence.v.shape[1]):
        part = recurrence.part(first, stop)
        (y, states, state), delta = part.scan_with_deltas(state, wanted)
        if position is not None:
            state = mixer.hook_ssm_carry.visit(position, state)
            last = part.part(stop - first - 1, stop - first)
            y = replace_last(y, last.read(state[:, None]))
            states = None if states is None else replace_last(states, state[:, None])
        parts.append(_Scanned(y, delta, states, state))
    return _Scanned(
        y=join([part.y for part in parts]),
        delta=join([part.delta for part in parts]),
        states=join([part.states for part in parts if part.states is not None]) if wanted else None,
        final=parts[-1].final,
    )


def _refuse_missed_carries(mixer: Mixer, change: Tensor, start: int) -> None:
    """Raise if a carry was handed to its hook before the edit of a delta that it should hold.

    The deltas respond to edited carries, so they come after them; no order serves both.
    """
    hooked = mixer.hook_ssm_carry.listened_at(start, start + change.shape[1])
    if hooked and bool(change[:, : hooked[-1] - start + 1].any()):
        raise HookUnavailableError(
            f"{mixer.hook_delta.name} was edited at or before position {hooked[-1]}, where "
            f"{mixer.hook_ssm_carry.name}.{hooked[-1]} is hooked: the carry would miss the edit. "
            "Edit hook_x or hook_ssm_write instead of the delta, or read hook_ssm_state instead "
            "of the carry"
        )
