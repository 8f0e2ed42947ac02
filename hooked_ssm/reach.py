"""Which hooks a run reaches: those that could never fire are refused before it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from hooked_ssm.errors import HookUnavailableError, ShapeError
from hooked_ssm.hook_points import HookFamily, SpecHookPoint
from hooked_ssm.rules import is_integer

Families = Mapping[str, HookFamily]
_NOTHING: Mapping[str, int] = MappingProxyType({})


def listened(
    families: Families, start: int = 0, stop: int | None = None
) -> Iterator[SpecHookPoint]:
    """Yield the per-position hook points in [start, stop) that somebody listens to."""
    for family in families.values():
        yield from map(family.at, family.listened_at(start, stop))


def refuse_out_of_reach(
    families: Families, start: int, stop: int | None, fired: Mapping[str, int] = _NOTHING
) -> None:
    """Refuse hooks on positions that are not run.

    Args:
        families: The model's hook points per position.
        start: The first position still to run.
        stop: One past the last position; None if that is open.
        fired: Hook points before `start` that have fired; see `Past`.

    Raises:
        HookUnavailableError: Somebody listens to a position before `start` or from `stop` on.
    """
    for point in () if stop is None else listened(families, stop):
        raise HookUnavailableError(
            f"{point.name} cannot fire: "
            + (f"the positions run are 0..{stop - 1}" if stop else "nothing is run")
        )
    for point in listened(families, 0, start) if start else ():
        if fired.get(str(point.name)) != point.attached:
            raise HookUnavailableError(
                f"{point.name} cannot fire: positions 0..{start - 1} have been run, and a hook "
                "was attached since; attach it before the step that runs its token, and start "
                "anew with past=None"
            )


def check_layers(n_layers: int, start: int | None, stop: int | None) -> None:
    """Check start_at_layer and stop_at_layer.

    Raises:
        ShapeError: There is no such layer.
    """
    for name, layer in (("start_at_layer", start), ("stop_at_layer", stop)):
        if layer is None:
            continue
        if not is_integer(layer) or not -n_layers <= layer <= n_layers:
            raise ShapeError(
                f"{name}={layer}; allowed: 0..{n_layers}, or -{n_layers}..-1 from the end"
            )


def refuse_left_out(
    points: Iterable[SpecHookPoint], n_layers: int, start: int | None, stop: int | None
) -> None:
    """Refuse hooks on what layers before `start` or from `stop` on would compute.

    Raises:
        HookUnavailableError: One of the points lies there.
    """
    run = {f"blocks.{layer}" for layer in range(n_layers)[start:stop]}
    run |= {"hook_embed", "hook_pos_embed"} if start is None else set()
    run |= {"ln_final"} if stop is None else set()
    for point in points:
        words = str(point.name).split(".")
        if ".".join(words[:2] if words[0] == "blocks" else words[:1]) not in run:
            raise HookUnavailableError(
                f"{point.name} cannot fire: start_at_layer={start}, stop_at_layer={stop} leave "
                "it out; remove the hook, or run that layer too"
            )
