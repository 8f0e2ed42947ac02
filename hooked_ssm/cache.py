"""TransformerLens' ActivationCache, with our names and declared axes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice, SliceInput, get_act_name

from hooked_ssm.errors import HookNameError, near
from hooked_ssm.hook_names import spellings
from hooked_ssm.html_table import titled_table

_AROUND_MLP = re.compile(r"^blocks\.(\d+)\.hook_(mlp_out|resid_mid)$")


def _is_key(key: Any) -> bool:
    if isinstance(key, str):
        return True
    return isinstance(key, tuple) and len(key) >= 2 and isinstance(key[0], str)


class HookedCache(ActivationCache):
    """Activations by hook name; `cache["pattern", 0]`, aliases and all methods work.

    Entries are copies: neither a later run nor an edit in place can change them.
    """

    def __getitem__(self, key: Any) -> Tensor:
        """Return an activation by full name, short name, or (short name, layer[, layer type]).

        Raises:
            HookNameError: Not in the cache; names the nearest that are.
        """
        if not _is_key(key):
            raise HookNameError(
                f"cache[{key!r}]: a key is a hook's name, or (short name, layer) such as "
                "('pattern', 0)"
            )
        names = self._spellings(key)
        for name in names:
            if name in self.cache_dict:
                return self.cache_dict[name]
        stand_in = self._of_a_layer_without_mlp(names[0])
        if stand_in is None:
            raise HookNameError(self._missing(key))
        return stand_in

    def __contains__(self, key: Any) -> bool:
        return _is_key(key) and any(name in self.cache_dict for name in self._spellings(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def _repr_html_(self) -> str:
        rows = {
            name: {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "MB": value.numel() * value.element_size() / 1e6,
            }
            for name, value in self.cache_dict.items()
        }
        table = pd.DataFrame.from_dict(rows, orient="index", columns=["shape", "dtype", "MB"])
        detail = f"{len(rows)} activations, {table['MB'].sum():.3g} MB"
        return titled_table("HookedCache", table, detail)

    def _spellings(self, key: Any) -> list[str]:
        if isinstance(key, str):
            return [*spellings(key), *spellings(get_act_name(key)), key]
        name, layer, *rest = key
        if isinstance(layer, int) and layer < 0:
            layer += self.model.cfg.n_layers
        full = get_act_name(name, layer, *rest)
        return [*spellings(full), full]  # TransformerLens' methods store under its own names

    def _of_a_layer_without_mlp(self, name: str) -> Tensor | None:
        """Where other layers have an MLP, one without counts as having one that adds nothing.

        TransformerLens' decompositions ask every layer or none for `mlp_out` and `resid_mid`.
        """
        asked = _AROUND_MLP.match(name)
        if asked is None or self.model is None or self.model.cfg.attn_only:
            return None
        layer = int(asked[1])
        if layer >= self.model.cfg.n_layers or self.model.blocks[layer].has_mlp:
            return None
        after = self.cache_dict.get(f"blocks.{layer}.hook_resid_post")
        return after if after is None or asked[2] == "resid_mid" else torch.zeros_like(after)

    def _missing(self, key: Any) -> str:
        hooks = {} if self.model is None else self.model.hook_dict
        names = self._spellings(key)
        wanted = next((name for name in names if name in hooks), names[0])
        if wanted in hooks:
            heavy = hooks[wanted].spec.heavy
            why = (
                "it is heavy, so it is cached only when named" if heavy else "it was not asked for"
            )
            reason = f": {why} (names_filter)."
        else:
            close = near(wanted, self.cache_dict)
            reason = f"; did you mean {close[0]!r}?" if close else ";"
        return (
            f"no {wanted!r} in this cache{reason} It holds {len(self.cache_dict)} activations: "
            "cache.keys()"
        )

    def apply_slice_to_batch_dim(self, batch_slice: Slice | SliceInput | slice) -> HookedCache:
        """Return a cache with the slice applied to the batch axis of whatever has one.

        Args:
            batch_slice: Documents to keep; an int drops the axis, as in TransformerLens.
        """
        if not self.has_batch_dim:
            raise ValueError(
                "apply_slice_to_batch_dim: the batch axis was already removed from this cache"
            )
        chosen = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)  # type: ignore[arg-type]
        entries = {
            name: chosen.apply(value, dim=0) if self._has_batch(name) else value
            for name, value in self.cache_dict.items()
        }
        return HookedCache(entries, self.model, has_batch_dim=chosen.mode != "int")

    def remove_batch_dim(self, batch_size: int | None = None) -> HookedCache:
        """Drop the batch axis of whatever has one, in place; only for a batch of one.

        Raises:
            ValueError: The batch is larger.
        """
        if self.has_batch_dim:
            for name, value in self.cache_dict.items():
                if self._has_batch(name) and value.shape[0] != 1:
                    raise ValueError(
                        f"remove_batch_dim: {name} has a batch of {value.shape[0]}, wanted 1"
                    )
            for name, value in self.cache_dict.items():
                if self._has_batch(name):
                    self.cache_dict[name] = value[0]
            self.has_batch_dim = False
        return self

    def _has_batch(self, name: str) -> bool:
        return self.model.find_hook(name.removesuffix("_grad")).spec.has_batch

    def _uses_ln_centering(self, layer: int | None) -> bool:
        """Whether the norm that reads a layer's input subtracts the mean."""
        if layer is None or layer == self.model.cfg.n_layers:
            return self.model.cfg.final_norm == "layer"
        return self.model.cfg.block_norm(layer) == "layer"
