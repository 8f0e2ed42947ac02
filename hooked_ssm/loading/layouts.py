"""How a layout says where each of our tensors lies in somebody else's state dict.

A layout renames modules: ours on the left, theirs on the right, the longest match wins, and what
is not listed keeps its name. "a|b" tries several spellings in order. Where a tensor is packed,
transposed or padded there, a `Part` says how to take ours out. The layouts themselves: tables.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import CheckpointError

Take = Callable[[Tensor], Tensor]
_OF_BLOCK = re.compile(r"^blocks\.(\d+)\.(.+)$")


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor itself."""
    return tensor


class Part(NamedTuple):
    """Where a module or parameter of ours lies.

    Attributes:
        path: Its path in the other layout; "a|b" for several spellings.
        take: Takes our tensor out of theirs.
    """

    path: str
    take: Take = as_it_is


Paths = Mapping[str, "Part | str"]


@dataclass(frozen=True)
class MixerPaths:
    """How a layout names the parts of one mixer.

    Attributes:
        parts: Our module or parameter -> theirs, relative to the mixer.
        unused: Patterns of their parameters that take no part in the computation.
        copies: Their parameter -> the part of ours that it repeats, where one is stored twice.
    """

    parts: Paths = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)


class Place(NamedTuple):
    """The keys under which a tensor of ours may lie, most likely first, and how to take it out."""

    keys: list[str]
    take: Take

    def key_among(self, keys: Collection[str]) -> str | None:
        """Return the first of its keys that is there."""
        return next((key for key in self.keys if key in keys), None)


@dataclass(frozen=True)
class Layout:
    """A naming of a whole model's tensors.

    Attributes:
        name: What messages call it.
        top: Our modules outside the blocks -> theirs.
        block: Their path of a block, with {layer}.
        inside: Our modules in a block -> theirs, relative to the block.
        mixers: For each mixer the layout has, a function from its options to its paths; None if
            every mixer keeps its own names.
        unused: Patterns of keys that take no part in the computation.
    """

    name: str
    top: Paths = field(default_factory=dict)
    block: str = "blocks.{layer}"
    inside: Paths = field(default_factory=dict)
    mixers: Mapping[str, Callable[[Any], MixerPaths]] | None = None
    unused: tuple[str, ...] = ()

    def place(self, name: str, cfg: ModelConfig) -> Place:
        """Return where a tensor of ours lies.

        Raises:
            CheckpointError: The layout does not have the mixer of this layer.
        """
        of_block = _OF_BLOCK.match(name)
        if of_block is None:
            path, take = _rename(name, self.top)
            return Place(path.split("|"), take)
        layer, rest = int(of_block[1]), of_block[2]
        if not rest.startswith("mixer."):
            path, take = _rename(rest, self.inside)
            return Place([f"{b}.{p}" for b in self._blocks(layer) for p in path.split("|")], take)
        parts = self.mixer_paths(layer, cfg).parts
        path, take = _rename(rest.removeprefix("mixer."), parts)
        return Place(self._in_mixer(layer, path), take)

    def mixer_paths(self, layer: int, cfg: ModelConfig) -> MixerPaths:
        """Return the paths inside a layer's mixer."""
        if self.mixers is None:
            return MixerPaths()
        mixer = cfg.mixer_name(layer)
        if mixer not in self.mixers:
            raise CheckpointError(
                f"layout {self.name!r} has no mixer {mixer!r} (layer {layer} of the config); "
                f"it has: {', '.join(self.mixers)}"
            )
        return self.mixers[mixer](cfg.mixer_options(layer))

    def copies(self, cfg: ModelConfig) -> Iterator[tuple[Place, str]]:
        """Yield what may be stored twice: where the other copy lies, and our name."""
        if cfg.tie_embeddings:
            yield self.place("unembed.weight", cfg), "embed.weight"
        for layer in range(len(cfg.mixers)):
            for theirs, ours in self.mixer_paths(layer, cfg).copies.items():
                name = f"blocks.{layer}.mixer.{ours}"
                yield Place(self._in_mixer(layer, theirs), self.place(name, cfg).take), name

    def unused_patterns(self, cfg: ModelConfig) -> list[str]:
        """Return patterns of the keys that take no part in a model like `cfg`."""
        found = list(self.unused)
        for layer in range(len(cfg.mixers)):
            prefixes = "|".join(map(re.escape, self._in_mixer(layer, "")))
            found += [f"(?:{prefixes}){p}" for p in self.mixer_paths(layer, cfg).unused]
        return found

    def sizes(self, state_dict: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, int]:
        """Return the model's sizes that the tensors show, by the config's names."""
        found = {}
        embed = self.place("embed.weight", cfg).key_among(state_dict)
        if embed is not None and state_dict[embed].ndim == 2:
            table = self.place("embed.weight", cfg).take(state_dict[embed])
            found["d_vocab"], found["d_model"] = table.shape
        positions = self.place("pos_embed.weight", cfg).key_among(state_dict)
        if positions is not None:
            found["n_ctx"] = state_dict[positions].shape[0]
        spelled = (re.escape(block) for block in self.block.split("|"))
        patterns = [re.compile(s.replace(r"\{layer\}", r"(\d+)") + r"\.") for s in spelled]
        layers = [int(m[1]) for key in state_dict for p in patterns if (m := p.match(key))]
        if layers:
            found["n_layers"] = max(layers) + 1
        return found

    def _blocks(self, layer: int) -> list[str]:
        return self.block.format(layer=layer).split("|")

    def _in_mixer(self, layer: int, path: str) -> list[str]:
        mixer, _ = _rename("mixer", self.inside)
        return [
            f"{block}.{spelled}.{inner}"
            for block in self._blocks(layer)
            for spelled in mixer.split("|")
            for inner in path.split("|")
        ]


def _rename(name: str, table: Paths) -> Part:
    """Rename by the longest entry that is the name itself or a module around it."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        found = table.get(".".join(words[:count]))
        if found is not None:
            path, take = Part(found) if isinstance(found, str) else found
            return Part("|".join(".".join([p, *words[count:]]) for p in path.split("|")), take)
    return Part(name)
