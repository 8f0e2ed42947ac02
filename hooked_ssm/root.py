"""Hooks by name: lookup that never stays silent, temporary hooks, and caching.

What transformer-lens' HookedRootModule does, with these differences: aliases resolve, unknown
names and filters that match nothing raise, per-position hook points are made when asked for,
heavy activations are cached only when named, slices cut the declared position axis, and nothing
else lies in the memory of cached values.
"""

from __future__ import annotations

import functools
import re
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice, SliceInput

from hooked_ssm.cache import HookedCache
from hooked_ssm.checks import check_value
from hooked_ssm.config import Device
from hooked_ssm.errors import (
    ConfigError,
    HookNameError,
    HookUnavailableError,
    ShapeError,
    near,
)
from hooked_ssm.hook_names import HookSpec, spellings
from hooked_ssm.hook_points import HookFamily, SpecHookPoint
from hooked_ssm.ops.memory import large_clone
from hooked_ssm.rules import is_integer

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
PosSlice = Slice | SliceInput | slice
NamedHook = tuple[str | Callable[[str], bool], Callable[..., Any]]
_AT_POSITION = re.compile(r"^(.+)\.(-?\d+)$")


class HookRoot(HookedRootModule, ABC):
    """A root module whose hook points carry a `HookSpec`."""

    hook_dict: dict[str, SpecHookPoint]  # type: ignore[assignment]
    families: dict[str, HookFamily]
    blocks: nn.ModuleList

    def setup(self) -> None:
        """Name every module and collect the hook points; call at the end of `__init__`."""
        super().setup()
        self.families = {n: m for n, m in self.named_modules() if isinstance(m, HookFamily)}
        made = tuple(f"{name}." for name in self.families)
        self.hook_dict = {n: h for n, h in self.hook_dict.items() if not n.startswith(made or "\0")}

    def hook_points(self) -> Iterator[SpecHookPoint]:  # type: ignore[override]
        """Every hook point, those made per position included."""
        yield from self.hook_dict.values()
        for family in self.families.values():
            yield from family.children()  # type: ignore[misc]

    def find_hook(self, name: str) -> SpecHookPoint:
        """Return the hook point a name or alias stands for, making a per-position one if needed.

        Raises:
            HookNameError: There is none; names the nearest.
        """
        if not isinstance(name, str):
            raise HookNameError(
                f"a hook's name is a string, got {name!r}; a predicate on names stands alone, not "
                "in a list"
            )
        for plain in spellings(name):
            if plain in self.hook_dict:
                return self.hook_dict[plain]
            at = _AT_POSITION.match(plain)
            if at and at[1] in self.families:
                return self.families[at[1]].at(int(at[2]))
        raise HookNameError(self._no_hook(name))

    def hook_name(self, layer: int, role: str, position: int | None = None) -> str:
        """Return the name of a layer's hook point with a role, or of a block-level one.

        Args:
            layer: Negative counts from the last.
            role: A role ("query", "state", ...) or a block-level word ("resid_pre", "mixer_out").
            position: Wanted by roles with one hook point per position ("carry"). Others hold all
                positions in one activation and need none: one loop over roles serves both.

        Raises:
            HookNameError: No such layer, role, or position.
        """
        name = self.hook_of(layer, role)
        if name not in self.families:
            return name
        if position is None:
            raise HookNameError(
                f"{name} has one hook point per position: pass position=, such as "
                f"hook_name({layer}, {role!r}, position=7)"
            )
        if not is_integer(position) or position < 0:
            raise HookNameError(f"position={position!r} of {name}; allowed: an integer >= 0")
        return f"{name}.{position}"

    def hook_of(self, layer: int, role: str) -> str:
        """Return the name of a layer's hook point, or of the family with one per position.

        Raises:
            HookNameError: No such layer or role.
        """
        n_layers = len(self.blocks)
        if not is_integer(layer) or not -n_layers <= layer < n_layers:
            raise HookNameError(f"layer {layer!r} does not exist: allowed 0..{n_layers - 1}")
        prefix = f"blocks.{layer % n_layers}"
        for direct in (*spellings(f"{prefix}.hook_{role}"), f"{prefix}.mlp.hook_{role}"):
            if direct in self.hook_dict:
                return direct
        mixer = self.blocks[layer].mixer
        if isinstance(getattr(mixer, f"hook_{role}", None), nn.Module):
            return f"{prefix}.mixer.hook_{role}"
        try:
            return f"{prefix}.mixer.{mixer.hook_for(role)}"
        except HookNameError as error:
            around = [
                name.removeprefix(f"{prefix}.hook_")
                for name in self.hook_dict
                if name.startswith(f"{prefix}.hook_")
            ]
            close = near(str(role), [*around, *mixer.roles()])
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise HookNameError(
                f"layer {layer}: {error}; around every mixer: {', '.join(around)}{hint}"
            ) from None

    def hook_specs(self) -> dict[str, HookSpec]:
        """Return the spec of every hook name, in execution order; `.{t}` stands for a position."""
        found = {}
        for name, module in self.named_modules():
            if isinstance(module, HookFamily):
                found[f"{name}.{{t}}"] = module.spec
            elif name in self.hook_dict:
                found[name] = self.hook_dict[name].spec
        return found

    def _no_hook(self, name: str) -> str:
        plain = spellings(name)[0]
        for asked in spellings(name):
            if asked in self.families:
                return (
                    f"{asked!r} is a family of hook points, one per position: ask for one, such as "
                    f"'{asked}.7' (the state handed on after token 7)"
                )
        known = [*self.hook_dict, *(f"{family}.0" for family in self.families)]
        close = near(plain, known)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"no hook {name!r} in {self.title}{hint} All names: list(model.hook_dict)"

    @property
    def title(self) -> str:
        """What messages call this model."""
        return type(self).__name__

    # Adding hooks. The base class looks names up in a dict; here aliases and checks come first.

    def add_hook(  # type: ignore[override]
        self,
        name: str | Callable[[str], bool],
        hook: Callable[..., Any],
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Attach a hook until it is removed, by name, alias, or predicate on names.

        Raises:
            HookNameError: Nothing matches.
        """
        for point in self._hooked(name):
            point.add_hook(hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend)

    def _enable_hook(
        self, name: str | Callable, hook: Callable, dir: Literal["fwd", "bwd"]
    ) -> None:
        for point in self._hooked(name):
            point.add_hook(hook, dir=dir, level=self.context_level)

    def _hooked(self, name: Any) -> list[SpecHookPoint]:
        """The hook points to attach to: what a cache takes as a filter may be no name."""
        if not isinstance(name, str) and not callable(name):
            raise HookNameError(f"a hook needs a name or a predicate on names, got {name!r}")
        return self._matching(name)

    def _matching(self, wanted: NamesFilter) -> list[SpecHookPoint]:
        """The hook points a filter selects; raises where any part of it selects none."""
        if wanted is None:
            return [point for point in self.hook_dict.values() if not point.spec.heavy]
        if isinstance(wanted, str):
            return [self.find_hook(wanted)]
        if callable(wanted):
            found = [point for name, point in self.hook_dict.items() if wanted(name)]
            if not found:
                raise HookNameError(
                    f"the predicate matches none of the {len(self.hook_dict)} hook names of "
                    f"{self.title}, such as {', '.join(list(self.hook_dict)[:3])} "
                    "(per-position names such as hook_ssm_carry.7 must be given as strings)"
                )
            return found
        if not isinstance(wanted, Iterable) or not wanted:
            raise HookNameError(
                f"names_filter is {wanted!r}; allowed: a name, a non-empty list of names, a "
                "predicate on names, or None for everything that is not heavy"
            )
        return [self.find_hook(name) for name in wanted]

    @contextmanager
    def hooks(  # type: ignore[override]
        self,
        fwd_hooks: Sequence[NamedHook] = (),
        bwd_hooks: Sequence[NamedHook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookRoot]:
        """Attach hooks for a `with` block; removes exactly those at its end, also after errors.

        Raises:
            HookNameError: A name matches nothing.
            ConfigError: An entry is no pair of a name and a function.
        """
        for entry in (*fwd_hooks, *bwd_hooks):
            if not (isinstance(entry, tuple | list) and len(entry) == 2 and callable(entry[1])):
                raise ConfigError(
                    f"hooks are pairs (name or predicate, function), got {entry!r}; such as "
                    "fwd_hooks=[('hook_embed', lambda value, hook: 0 * value)]"
                )
        with super().hooks(list(fwd_hooks), list(bwd_hooks), reset_hooks_end, clear_contexts):
            yield self

    # Caching.

    def run_with_cache(  # type: ignore[override]
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: PosSlice = None,
        return_cache_object: bool = True,
        **model_kwargs: Any,
    ) -> tuple[Any, HookedCache | dict[str, Tensor]]:
        """Run the model and cache activations.

        Args:
            names_filter: A name, a list of names, a predicate on names, or None: everything but
                what is heavy (states, writes, patterns of recurrences; name those to have them).
            device: Where to keep the copies.
            remove_batch_dim: Drop the batch axis (batch of one only).
            incl_bwd: Call backward on the output (a scalar) and cache gradients as name + "_grad".
            pos_slice: Positions to keep: slice, tuple (start, stop), list, int (which keeps the
                axis, with one position) or None; cut along each declared position axis.
            return_cache_object: A `HookedCache`, or the plain dict.

        Returns:
            The model's output and the cache.

        Raises:
            HookNameError: The filter matches nothing, or names something unknown.
            HookUnavailableError: What the filter names has not fired, or incl_bwd where no
                gradient is recorded.
            ShapeError: remove_batch_dim with more than one document, or pos_slice selects nothing.
        """
        cache, fwd, bwd = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(fwd, bwd, reset_hooks_end, clear_contexts):
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                if not (isinstance(output, Tensor) and output.numel() == 1):
                    raise ShapeError(
                        "incl_bwd needs a scalar output to call backward on: return_type='loss'"
                    )
                if not output.requires_grad:
                    raise HookUnavailableError(
                        "incl_bwd: no gradient is recorded here; run outside torch.no_grad() and "
                        "torch.inference_mode(), with parameters that require gradients"
                    )
                output.backward()
        if names_filter is not None and not callable(names_filter):
            missing = [str(p.name) for p in self._matching(names_filter) if p.name not in cache]
            if missing:
                raise HookUnavailableError(
                    f"{missing[0]} has not fired in this run; leave it out of names_filter, or run "
                    "the layers and positions that compute it"
                )
        if not return_cache_object:
            return output, cache
        return output, HookedCache(cache, self, has_batch_dim=not remove_batch_dim)

    def get_caching_hooks(  # type: ignore[override]
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> tuple[dict[str, Tensor], list[NamedHook], list[NamedHook]]:
        """Return a dict and the hooks that fill it; arguments as in `run_with_cache`."""
        cache = {} if cache is None else cache
        chosen = _read_slice(pos_slice)
        if device is not None:
            check_value("device", device, Device)

        def save(tensor: Tensor, hook: HookPoint, suffix: str) -> None:
            spec: HookSpec = hook.spec  # type: ignore[assignment]
            value = tensor.detach()
            if spec.position_axis is not None:
                value = _cut(value, chosen, spec.position_axis)
            if remove_batch_dim and spec.has_batch:
                if len(value) != 1:
                    raise ShapeError(f"remove_batch_dim needs a batch of 1, got {len(value)}")
                value = value[0]
            # a slice would keep all of its tensor alive
            keep = hook.keepable and value.numel() == tensor.numel() and value.is_contiguous()
            cache[f"{hook.name}{suffix}"] = _moved(value, device) if keep else _copy(value, device)

        names = [str(point.name) for point in self._matching(names_filter)]
        save_value, save_gradient = (functools.partial(save, suffix=s) for s in ("", "_grad"))
        save_value.only_reads = True  # type: ignore[attr-defined]
        fwd = [(name, save_value) for name in names]
        bwd = [(name, save_gradient) for name in names]
        return cache, fwd, bwd if incl_bwd else []  # type: ignore[return-value]

    def add_caching_hooks(  # type: ignore[override]
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Attach caching hooks until they are removed; returns the dict that runs will fill."""
        cache, fwd, bwd = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache
        )
        for name, hook in fwd:
            self.add_hook(name, hook, "fwd")
        for name, hook in bwd:
            self.add_hook(name, hook, "bwd")
        return cache


def _read_slice(pos_slice: PosSlice) -> Slice:
    allowed = "an integer, a list of them, a slice, a tuple (start, stop), or None"
    try:
        chosen = Slice.unwrap(pos_slice)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ShapeError(f"pos_slice={pos_slice!r}; allowed: {allowed}") from error
    if chosen.mode == "array" and chosen.slice.size and chosen.slice.dtype.kind not in "iub":
        raise ShapeError(f"pos_slice={pos_slice!r}; allowed: {allowed}")
    return chosen


def _cut(value: Tensor, chosen: Slice, axis: int) -> Tensor:
    """The positions chosen of an activation, of which there must be some."""
    try:
        part = chosen.apply(value, dim=axis)
    except (IndexError, TypeError) as error:
        raise ShapeError(
            f"pos_slice={chosen.slice!r} does not fit positions 0..{value.shape[axis] - 1}: {error}"
        ) from error
    if part.ndim != value.ndim or 0 in part.shape:
        raise ShapeError(
            f"pos_slice={chosen.slice!r} selects nothing of the positions "
            f"0..{value.shape[axis] - 1}; choose some of these"
        )
    return part


def _moved(value: Tensor, device: torch.device | str | None) -> Tensor:
    return value if device is None else value.to(device)


def _copy(value: Tensor, device: torch.device | str | None) -> Tensor:
    """A copy that no later edit in place can reach."""
    moved = _moved(value, device)
    return large_clone(moved) if moved.data_ptr() == value.data_ptr() else moved
