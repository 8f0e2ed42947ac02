"""Hook points that know their spec, and families of them made per position when asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from hooked_ssm.errors import HookNameError, HookUnavailableError, ShapeError
from hooked_ssm.hook_names import HookSpec


class SpecHookPoint(HookPoint):
    """A transformer-lens HookPoint with its `HookSpec`.

    Where a gradient is recorded, hooks get a copy: autograd may have kept the activation itself
    for the backward pass, and an edit in place would then make that pass fail. Hooks marked
    `only_reads`, as caches are, need none.

    Attributes:
        spec: What is known of the activation.
        attached: How many hooks have been attached so far, those removed since included.
        keepable: Whether the value now passing through is the listener's to keep (`hand_over`).
    """

    spec: HookSpec
    keepable = False

    def __init__(self, spec: HookSpec):
        super().__init__()
        self.spec = spec
        self.pos_dim = spec.position_axis
        self.attached = 0

    def add_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Attach a hook; arguments as transformer-lens' `HookPoint.add_hook`."""
        self.attached += 1
        return super().add_hook(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or a copy of it for the hooks that follow."""
        recorded = x.requires_grad and torch.is_grad_enabled()
        return x.clone() if recorded and self.listened and not self.only_read else x

    def __call__(self, x: Tensor) -> Tensor:
        """Pass x on through the hooks.

        Raises:
            ShapeError: A hook returned another shape, which would be broadcast without a word, or
                another dtype or device, which would spread to all that follows.
            HookUnavailableError: A backward hook waits for a gradient, and none is recorded.
        """
        if self._backward_hooks and not torch.is_grad_enabled():
            raise HookUnavailableError(
                f"a backward hook on {self.name} cannot fire: no gradient is recorded here; run "
                "outside torch.no_grad() and torch.inference_mode()"
            )
        result = super().__call__(x)
        if result is not x and not _alike(result, x):
            raise ShapeError(
                f"a hook on {self.name} returned {_described(result)}, but the activation is "
                f"{_described(x)} with axes [{' '.join(self.spec.axes)}]; return a tensor of that "
                "shape, dtype and device, or None"
            )
        return result

    @property
    def listened(self) -> bool:
        """Whether any hook, forward or backward, is attached."""
        return bool(self._forward_hooks or self._backward_hooks or self._forward_pre_hooks)

    @property
    def only_read(self) -> bool:
        """Whether all who listen just read: none edits the value or differentiates by it."""
        hooks = self.fwd_hooks
        return (
            not (self._backward_hooks or self._forward_pre_hooks)
            and len(hooks) == len(self._forward_hooks)
            and all(getattr(hook.user_hook, "only_reads", False) for hook in hooks)
        )

    def hand_over(self, x: Tensor) -> Tensor:
        """Pass on a value that nobody else holds: a listener that only reads may keep it.

        So a cache of all states, the largest thing there is, needs no copy of them.
        """
        self.keepable = self.only_read and len(self.fwd_hooks) == 1 and not x.requires_grad
        try:
            return self(x)
        finally:
            self.keepable = False

    def visit(self, make: Callable[[], Tensor]) -> Tensor | None:
        """Compute and pass on a heavy activation, only if somebody listens; else return None."""
        return self(make()) if self.listened else None


def _alike(result: Any, x: Tensor) -> bool:
    return (
        isinstance(result, Tensor)
        and result.shape == x.shape
        and result.dtype == x.dtype
        and result.device == x.device
    )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = str(value.dtype).removeprefix("torch.")
    return f"{kind} {list(value.shape)} on {value.device}"


def edited(hook: SpecHookPoint, value: Tensor, *, held: bool = True) -> tuple[Tensor, bool]:
    """Pass `value` through `hook`; say whether the result must be used instead of `value`.

    `held=False`: nobody else holds the value, see `SpecHookPoint.hand_over`.

    True for a new tensor, an edit in place (torch counts a tensor's versions; inference tensors
    keep no count, so they count as edited) and wherever a gradient may have to pass the hook: to a
    backward hook, or to a listener that keeps the value to differentiate by it.
    """
    if not hook.listened:
        return value, False
    if hook.only_read:
        return hook(value) if held else hook.hand_over(value), False
    countable = not value.is_inference()
    before = value._version if countable else None
    result = hook(value)
    touched = not countable or result is not value or value._version != before
    return result, touched or result.requires_grad


class HookFamily(nn.Module):
    """One hook point per position, named `<family>.{t}`, made when it is first asked for.

    Positions count from the first token of the sequence, also while decoding step by step.
    """

    def __init__(self, spec: HookSpec):
        super().__init__()
        self.spec = spec
        self.name: str | None = None

    def at(self, position: int) -> SpecHookPoint:
        """Return the hook point of a position, making it if needed.

        Raises:
            HookNameError: The position is negative.
        """
        if position < 0:
            raise HookNameError(
                f"{self.name}.{position}: positions count from 0 at the first token; "
                "a negative one names no token before the length is known"
            )
        key = str(position)
        if key not in self._modules:
            point = SpecHookPoint(self.spec)
            point.name = f"{self.name}.{position}"
            self.add_module(key, point)
        return self._modules[key]  # type: ignore[return-value]

    def listened_at(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the positions in [start, stop) that somebody listens to, in order."""
        return sorted(
            int(key)
            for key, point in self._modules.items()
            if point.listened and int(key) >= start and (stop is None or int(key) < stop)  # type: ignore[union-attr]
        )

    def visit(self, position: int, value: Tensor) -> Tensor:
        """Pass the value of a position through its hook point, safe against edits in place."""
        return self.at(position)(value.clone())

    def forward(self, *_: object) -> Tensor:
        raise TypeError("a HookFamily is not called; its hook points are, one per position")


def cut_points(family: HookFamily, start: int, length: int) -> list[tuple[int, int, int | None]]:
    """Split [0, length) at the positions of `family` somebody listens to.

    Returns:
        (first, one past last, absolute position of the hook at the end or None) per segment.
    """
    segments: list[tuple[int, int, int | None]] = []
    first = 0
    for position in family.listened_at(start, start + length):
        stop = position - start + 1
        segments.append((first, stop, position))
        first = stop
    if first < length:
        segments.append((first, length, None))
    return segments
