"""What mixers with a finite state share: three places to intervene, and the pattern view.

    h[t] = decay[t] * carry[t-1] + write[t];   carry[t] = h[t];   y[t] = read(state[t] = carry[t])

A mixer binds its inputs in a `Recurrence` and hands it to `run`, which computes the outputs by
the fast op when nobody listens, and through whatever is hooked otherwise. Edits add up: an edited
write or decay re-runs the recurrence, a hooked carry cuts the scan at its position, a hooked
state changes the read-out alone, and `through_pattern` adds what an edited pattern changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from hooked_ssm.errors import ConfigError
from hooked_ssm.hook_points import SpecHookPoint, cut_points, edited
from hooked_ssm.mixers.base import Mixer
from hooked_ssm.ops.linear_scan import linear_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted, wanted_positions

R = TypeVar("R", bound="Recurrence")


@dataclass(frozen=True, kw_only=True)
class Recurrence(ABC):
    """A linear recurrence with its inputs bound.

    Attributes:
        given_decay, given_write: Replace what the inputs imply, after an edit. [batch, pos, ...]
    """

    timed: ClassVar[tuple[str, ...]]
    """Names of the fields that have a position axis (axis 1)."""

    given_decay: Tensor | None = None
    given_write: Tensor | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse a field that would hide a method, which fails only when that is called.

        Raises:
            ConfigError: A field has the name of a method.
        """
        super().__init_subclass__(**kwargs)
        for name in vars(cls).get("__annotations__", {}):
            if callable(getattr(Recurrence, name, None)):
                raise ConfigError(
                    f"{cls.__name__}: the field {name!r} hides the method of that name; call it "
                    f"'{name}s' or another name"
                )

    def part(self: R, first: int, stop: int) -> R:
        """Return the recurrence on positions [first, stop)."""
        names = (*self.timed, "given_decay", "given_write")
        cut = {n: v[:, first:stop] for n in names if (v := getattr(self, n)) is not None}
        return replace(self, **cut)

    def scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        """Run it: outputs, the states wanted, and the final state."""
        if self.given_decay is None and self.given_write is None:
            return self.fast_scan(initial, wanted)
        states = self.scan_writes(self.decay(), self.write(), initial)
        kept = None if wanted is False else states[:, wanted_positions(wanted, states.shape[1])]
        return ScanOutput(self.read(states), kept, states[:, -1])

    def decay(self) -> Tensor:
        """What the carried state is multiplied by. [batch, pos, ...]"""
        return self.implied_decay() if self.given_decay is None else self.given_decay

    def write(self) -> Tensor:
        """What is added to the state. [batch, pos, *state]"""
        return self.implied_write() if self.given_write is None else self.given_write

    def scan_writes(self, decay: Tensor, write: Tensor, initial: Tensor | None) -> Tensor:
        """All states from explicit decays and writes. [batch, pos, *state]"""
        return linear_scan(decay, write, initial)

    @abstractmethod
    def fast_scan(self, initial: Tensor | None, wanted: StatesWanted) -> ScanOutput:
        """Run it by the op, when neither decay nor write was edited."""

    @abstractmethod
    def implied_decay(self) -> Tensor:
        """The decay that the inputs imply, shaped to broadcast against the state."""

    @abstractmethod
    def implied_write(self) -> Tensor:
        """The write that the inputs imply. [batch, pos, *state]"""

    @abstractmethod
    def read(self, states: Tensor) -> Tensor:
        """Outputs from the states at all positions. [batch, pos, ...]"""

    @abstractmethod
    def pattern(self) -> Tensor:
        """The exact token-mixing matrix from a zero initial state."""

    @abstractmethod
    def mix(self, pattern: Tensor) -> Tensor:
        """pattern @ value, shaped as the outputs."""


class Outcome(NamedTuple):
    """What running a recurrence through the hook points gives.

    Attributes:
        y: Outputs. [batch, pos, ...]
        final: The state handed on after the last token. [batch, *state]
        untouched: Whether y is what the inputs alone imply: no past, nothing edited.
    """

    y: Tensor
    final: Tensor
    untouched: bool


def run(mixer: Mixer, recurrence: Recurrence, start: int, initial: Tensor | None) -> Outcome:
    """Run a recurrence through a mixer's hooks on decay, write, carry and state.

    Args:
        mixer: Has hook_ssm_write, hook_ssm_carry, hook_ssm_state, and hook_ssm_decay if anything
            decays.
        recurrence: The inputs.
        start: Position of the first token.
        initial: The state before it, zeros if None. [batch, *state]
    """
    implied = recurrence
    recurrence = through_decay_and_write(mixer, recurrence)
    reads_states = mixer.hook_ssm_state.listened
    y, states, final = _scan_in_segments(mixer, recurrence, start, initial, reads_states)
    if states is not None:
        held = share_memory(states, final)
        states, touched = edited(mixer.hook_ssm_state, states, held=held)
        y = recurrence.read(states) if touched else y
    cut = bool(mixer.hook_ssm_carry.listened_at(start, start + y.shape[1]))
    untouched = recurrence is implied and states is None and initial is None and not cut
    return Outcome(y, final, untouched)


def through_pattern(
    hook: SpecHookPoint,
    make: Callable[[], Tensor],
    mix: Callable[[Tensor], Tensor],
    y: Tensor,
    untouched: bool,
) -> Tensor:
    """Compute the outputs through the token-mixing matrix if somebody listens to it.

    Where y holds more than pattern @ value (the past, or what other edits did), the edit of the
    pattern is added to it as the difference it makes.
    """
    if not hook.listened:
        return y
    pattern = make()
    if untouched:
        return mix(hook(pattern))
    return y + mix(hook(pattern.clone())) - mix(pattern)


def through_decay_and_write(mixer: Mixer, recurrence: R) -> R:
    decay_hook = getattr(mixer, "hook_ssm_decay", None)
    if decay_hook is not None and decay_hook.listened:
        decay, touched = edited(decay_hook, recurrence.decay())
        if touched:
            recurrence = replace(recurrence, given_decay=decay)
    if mixer.hook_ssm_write.listened:
        write, touched = edited(mixer.hook_ssm_write, recurrence.write())
        if touched:
            recurrence = replace(recurrence, given_write=write)
    return recurrence


def _scan_in_segments(
    mixer: Mixer, recurrence: Recurrence, start: int, state: Tensor | None, wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Scan, cut after every position whose carry somebody listens to."""
    length = getattr(recurrence, recurrence.timed[0]).shape[1]
    outputs: list[Tensor] = []
    kept: list[Tensor] = []
    for first, stop, position in cut_points(mixer.hook_ssm_carry, start, length):
        part = recurrence if stop - first == length else recurrence.part(first, stop)
        y, states, state = part.scan(state, wanted)
        if position is not None:
            state = mixer.hook_ssm_carry.visit(position, state)
            last = part.part(stop - first - 1, stop - first)
            y = replace_last(y, last.read(state[:, None]))
            states = None if states is None else replace_last(states, state[:, None])
        outputs.append(y)
        if states is not None:
            kept.append(states)
    assert state is not None, "a segment has at least one token"
    return join(outputs), join(kept) if wanted else None, state


def share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def replace_last(x: Tensor, last: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], last.to(x.dtype)], dim=1)
