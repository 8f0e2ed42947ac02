"""From a state dict and a config to a model: everything assigned, or one error that says it all."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hooked_ssm.checks import check_value
from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import CheckpointError
from hooked_ssm.loading.layouts import Layout
from hooked_ssm.loading.tables import find_layout
from hooked_ssm.model import HookedModel


def from_state_dict(
    state_dict: Mapping[str, Tensor], cfg: ModelConfig, layout: str = "hooked_ssm"
) -> HookedModel:
    """Build a model from copies of somebody's weights. It is in eval mode, as Hugging Face's are.

    Args:
        state_dict: Tensors by name.
        cfg: What they are the weights of. Sizes are read off the tensors and must agree.
        layout: Whose names these are: "hooked_ssm", "hf" (Hugging Face), "mamba_ssm"
            (state-spaces' own checkpoints) or "zoology" (also the paper's code).

    Raises:
        CheckpointError: Tensors are missing, left over, of the wrong shape, or contradict each
            other; it lists all of them. Or this is no mapping from names to tensors.
        ConfigError: cfg is no ModelConfig.
    """
    check_value("cfg", cfg, ModelConfig)
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"a state dict maps names to tensors, got a {type(state_dict).__name__}; such as "
            "model.state_dict()"
        )
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"a state dict maps names to tensors, but {name!r} holds a "
                f"{type(value).__name__}; if it holds the weights, pass that"
            )
    return assemble(state_dict, cfg, find_layout(layout, cfg, state_dict))


def assemble(state_dict: Mapping[str, Tensor], cfg: ModelConfig, layout: Layout) -> HookedModel:
    """Build a model, in eval mode, from copies of weights (`from_state_dict` names the errors)."""
    model = HookedModel(cfg, initialise=False)
    unset = model.state_dict(keep_vars=True)
    values = _Reading(state_dict, cfg, layout).read(unset)
    for name, tensor in unset.items():
        # Assigning `.data` keeps the parameter object, and with it marks such as no weight decay.
        # A copy, also of a file's mapped memory (whose pages are the cache's, not ours): the model
        # owns what it holds, aligned as a fresh model's, so that both compute the same bits.
        tensor.data = values[name].detach().clone(memory_format=torch.contiguous_format)
    return model.place().eval()


class _Reading:
    """One attempt to read a state dict, with everything found wrong on the way."""

    def __init__(self, state_dict: Mapping[str, Tensor], cfg: ModelConfig, layout: Layout):
        self.state_dict, self.cfg, self.layout = state_dict, cfg, layout
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        self.contradicting: list[str] = []
        self.used: set[str] = set()

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a tensor for every name wanted, or raise with all findings."""
        found = {}
        for name, like in wanted.items():
            value = self._take(name, like)
            if value is not None:
                found[name] = value
        self._check_copies(found)
        ignored = re.compile("|".join(self.layout.unused_patterns(self.cfg)) or r"(?!)")
        left = [k for k in self.state_dict if k not in self.used and not ignored.fullmatch(k)]
        problems = {
            "missing": self.missing,
            "unexpected": left,
            "misshapen": self.misshapen,
            "contradicting": self.contradicting,
        }
        if any(problems.values()):
            raise CheckpointError(self._message(problems))
        return found

    def _take(self, name: str, like: Tensor) -> Tensor | None:
        place = self.layout.place(name, self.cfg)
        key = place.key_among(self.state_dict)
        if key is None:
            if place.keys[0] not in self.missing:  # several of ours may be packed in it
                self.missing.append(place.keys[0])
            return None
        self.used.add(key)
        theirs = self.state_dict[key]
        try:
            value = place.take(theirs)
        except (RuntimeError, IndexError):  # it cannot even be cut as the layout says
            value = None
        if value is not None and _fits(value, like):
            return value
        goal = "" if key == name else f" for {name}"
        self.misshapen.append(
            f"{key}: {_describe(theirs)}, but the config wants {tuple(like.shape)}{goal}"
        )
        return None

    def _check_copies(self, found: Mapping[str, Tensor]) -> None:
        for place, ours in self.layout.copies(self.cfg):
            key = place.key_among(self.state_dict)
            if key is None or ours not in found:
                continue
            self.used.add(key)
            if not torch.equal(place.take(self.state_dict[key]), found[ours]):
                tied = " (set tie_embeddings=False to load both)" if ours == "embed.weight" else ""
                original = self.layout.place(ours, self.cfg).key_among(self.state_dict)
                self.contradicting.append(f"{key} must equal {original}{tied}")

    def _message(self, problems: Mapping[str, list[str]]) -> str:
        lines = [f"these weights, read in the layout {self.layout.name!r}, do not fit the config:"]
        lines += [
            f"  {kind} ({len(found)}): {'; '.join(found)}"
            for kind, found in problems.items()
            if found
        ]
        sizes = self.layout.sizes(self.state_dict, self.cfg)
        differing = [
            f"{name}={size} (the config: {getattr(self.cfg, name)})"
            for name, size in sizes.items()
            if size != getattr(self.cfg, name)
        ]
        if differing:
            lines.append(f"  the tensors say {', '.join(differing)}")
        lines.append("Nothing was loaded. Change the config to what the weights are, or the layout")
        return "\n".join(lines)


def _fits(value: Tensor, like: Tensor) -> bool:
    same_kind = value.is_floating_point() == like.is_floating_point()
    same_kind &= value.is_complex() == like.is_complex()
    return value.shape == like.shape and same_kind and not value.is_meta


def _describe(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f"{tensor.dtype} of shape "
    where = " on the meta device, without values" if tensor.is_meta else ""
    return f"{kind}{tuple(tensor.shape)}{where}"
