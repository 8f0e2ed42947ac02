"""Ablations: functions to hook anywhere, that take away what an activation says.

    model.run_with_hooks(tokens, fwd_hooks=[(model.hook_name(1, "carry", 7), ablation.zero())])

Each factory returns a hook for any site of any architecture: where the positions and the heads are
is read off the hook point's declared axes, never guessed. Positions count within the tokens of a
call: while decoding in steps, from the first token of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from hooked_ssm.analysis.exchange import head_axis
from hooked_ssm.checks import Indices, NonNegative, Words, checked
from hooked_ssm.errors import ShapeError
from hooked_ssm.hook_names import HookSpec

HookFunction = Callable[[Tensor, HookPoint], Tensor]
Positions = Indices | Int[Tensor, " batch"] | None
Heads = Indices | None


@checked
def zero(*, positions: Positions = None, heads: Heads = None) -> HookFunction:
    """Return a hook that sets an activation to zero.

    Args:
        positions: Which positions: indices (negative ones count from the end), or one per document
            as a tensor [batch]; all if None.
        heads: Which heads; all if None.

    Raises (when the hook runs):
        ShapeError: The activation has no position or head axis, or lacks one of those asked for.
    """
    return _replacing(lambda x, hook: torch.zeros_like(x), positions, heads)


@checked
def mean(
    reference: Tensor | None = None,
    *,
    over: Words = ("batch",),
    positions: Positions = None,
    heads: Heads = None,
) -> HookFunction:
    """Return a hook that sets an activation to its mean.

    Args:
        reference: Activations of other documents at the same site, such as a cache's entry; the
            activation itself if None.
        over: The axes to average over: ("batch",) keeps what a position says of itself,
            ("batch", "pos") does not.
        positions, heads: As in `zero`.
    """

    def averaged(x: Tensor, hook: HookPoint) -> Tensor:
        given, axes = x if reference is None else reference.to(x), _axes(hook, over)
        found = given.mean(axes, keepdim=True) if given.ndim == x.ndim else given
        if found.ndim != x.ndim or any(
            n not in (1, m) for n, m in zip(found.shape, x.shape, strict=True)
        ):
            raise ShapeError(
                f"mean ablation at {hook.name}: the reference has shape {list(given.shape)}, the "
                f"activation {list(x.shape)}; they may differ only along {list(over)}"
            )
        return found.expand_as(x)

    return _replacing(averaged, positions, heads)


@checked
def resample(
    generator: torch.Generator,
    reference: Tensor | None = None,
    *,
    positions: Positions = None,
    heads: Heads = None,
) -> HookFunction:
    """Return a hook that gives every document the activation of another one, drawn at random.

    Args:
        generator: Draws the documents, anew each time the hook runs.
        reference: Activations of the documents to draw from; if None, those that run, and then
            none keeps its own. [documents, ...]
        positions, heads: As in `zero`.

    Raises (when the hook runs):
        ShapeError: There is only the document itself, or the reference does not fit.
    """

    def other(x: Tensor, hook: HookPoint) -> Tensor:
        _need_batch(hook)
        batch = len(x)
        if reference is not None:
            if reference.ndim != x.ndim or reference.shape[1:] != x.shape[1:] or not len(reference):
                raise ShapeError(
                    f"resample ablation at {hook.name}: the reference has shape "
                    f"{list(reference.shape)}; allowed: at least one document of shape "
                    f"{list(x.shape[1:])}, as those that run"
                )
            drawn = torch.randint(
                len(reference), (batch,), generator=generator, device=generator.device
            )
            return reference.to(x)[drawn.to(x.device)]
        if batch < 2:
            raise ShapeError(
                f"resample ablation at {hook.name}: one document has no other to draw from; run "
                "at least two, or pass reference="
            )
        order = torch.randperm(
            batch, generator=generator, device=generator.device
        )  # around a circle: none keeps its own
        source = torch.empty_like(order).scatter_(0, order, order.roll(1))
        return x[source.to(x.device)]

    return _replacing(other, positions, heads)


@checked
def noise(
    scale: NonNegative,
    generator: torch.Generator,
    *,
    positions: Positions = None,
    heads: Heads = None,
) -> HookFunction:
    """Return a hook that adds Gaussian noise: `scale` standard deviations of the activation.

    The standard deviation is that of all its numbers, so that one scale fits every site.
    """

    def noisy(x: Tensor, hook: HookPoint) -> Tensor:
        drawn = torch.randn(x.shape, generator=generator, device=generator.device, dtype=x.dtype)
        return x + scale * x.std(correction=0) * drawn.to(x.device)

    return _replacing(noisy, positions, heads)


def _replacing(
    make: Callable[[Tensor, HookPoint], Tensor], positions: Positions, heads: Heads
) -> HookFunction:
    """A hook that puts in what `make` returns, at some positions and heads."""

    def hook_function(activation: Tensor, hook: HookPoint) -> Tensor:
        here = chosen(activation, hook, positions, heads)
        made = make(activation, hook)
        return made if here is None else torch.where(here, made, activation)

    return hook_function


def chosen(x: Tensor, hook: HookPoint, positions: Positions, heads: Heads) -> Tensor | None:
    """Return where positions and heads are, to broadcast against the activation; None: all."""
    spec = _spec(hook)
    here: Tensor | None = None
    if positions is not None:
        axis = spec.position_axis
        if axis is None:
            raise ShapeError(
                f"{hook.name} has axes {list(spec.axes)}: no positions; leave positions=None (a "
                "per-position hook point has its position in its name)"
            )
        at = torch.as_tensor(positions, device=x.device)
        _inside(at, x.shape[axis], f"positions at {hook.name}", low=-x.shape[axis])
        marks = torch.arange(x.shape[axis], device=x.device)
        at = at % x.shape[axis]
        if isinstance(positions, Tensor):
            if at.shape != x.shape[:1]:
                raise ShapeError(
                    f"positions at {hook.name}: a tensor holds one per document, [{len(x)}], got "
                    f"{list(at.shape)}; pass a list to name positions of all documents"
                )
            here = (marks == at[:, None]).view(_shape(x, {0: len(x), axis: -1}))
        else:
            here = torch.isin(marks, at).view(_shape(x, {axis: -1}))
    if heads is not None:
        axis = head_axis(spec)
        if axis is None:
            raise ShapeError(f"{hook.name} has axes {list(spec.axes)}: no heads; leave heads=None")
        which = torch.as_tensor(heads, device=x.device)
        _inside(which, x.shape[axis], f"heads at {hook.name}", low=0)
        marks = torch.arange(x.shape[axis], device=x.device)
        mine = torch.isin(marks, which).view(_shape(x, {axis: -1}))
        here = mine if here is None else here & mine
    return here


def _shape(x: Tensor, sizes: dict[int, int]) -> list[int]:
    return [sizes.get(axis, 1) for axis in range(x.ndim)]


def _inside(index: Tensor, size: int, what: str, low: int) -> None:
    if index.numel() and not bool(((index >= low) & (index < size)).all()):
        raise ShapeError(f"{what}: got {index.tolist()}; allowed {low}..{size - 1}")


def _axes(hook: HookPoint, words: Sequence[str]) -> list[int]:
    spec, found = _spec(hook), []
    for word in words:
        axis = spec.position_axis if word == "pos" else None
        axis = spec.axes.index(word) if axis is None and word in spec.axes else axis
        if axis is None:
            raise ShapeError(f"mean over {word!r} at {hook.name}: its axes are {list(spec.axes)}")
        found.append(axis)
    return found


def _need_batch(hook: HookPoint) -> None:
    if not _spec(hook).has_batch:
        raise ShapeError(f"{hook.name} is one for all documents: there is none to draw from")


def _spec(hook: HookPoint) -> HookSpec:
    return hook.spec  # type: ignore[return-value]
