"""Runs one mixer on its own, and compares it with layer fixtures, activations included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hooked_ssm.mixers import Carried, Mixer, MixerOptions, Segment
from tests.parity import Fixture

KeyMap = Mapping[str, str]
"""Our parameter -> theirs, where the names differ."""


def load(mixer: Mixer, theirs: Mapping[str, Tensor], keys: KeyMap) -> Mixer:
    """Load a reference module's parameters, reshaped where only the shape differs."""
    ours = mixer.state_dict()
    mixer.load_state_dict({n: theirs[keys.get(n, n)].reshape(p.shape) for n, p in ours.items()})
    return mixer


def build(kind: type[Mixer], d_model: int, options: MixerOptions, seed: int = 0) -> Mixer:
    """A mixer with parameters of which every one matters."""
    mixer = kind(d_model, 64, options).double()
    generator = torch.Generator().manual_seed(seed)
    mixer.initialise(generator)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).double()
    return mixer


def segment(length: int, start: int = 0, real: Tensor | None = None) -> Segment:
    """Where the tokens of a call stand."""
    return Segment(start, length, torch.arange(start, start + length)[None], real)


def call(
    mixer: Mixer, x: Tensor, hooks: Mapping[str, Callable] | None = None, **kwargs
) -> tuple[Tensor, Carried]:
    """Run a mixer on inputs with hooks on its points ("hook_ssm_carry.3" for a position)."""
    points = []
    for name, hook in (hooks or {}).items():
        family, _, position = name.partition(".")
        point = getattr(mixer, family)
        points.append(point.at(int(position)) if position else point)
        points[-1].name = name
        points[-1].add_hook(hook)
    try:
        return mixer(x, kwargs.pop("segment", segment(x.shape[1])), **kwargs)
    finally:
        for point in points:
            point.remove_hooks()


def look(mixer: Mixer, x: Tensor, *names: str, **kwargs) -> dict[str, Tensor]:
    """Run a mixer and return activations by name, its output as "out"."""
    seen = {}

    def keep(value: Tensor, hook) -> None:
        seen[hook.name] = value.detach().clone()

    keep.only_reads = True  # as caches say of themselves
    hooks = {**{name: keep for name in names}, **kwargs.pop("hooks", {})}
    seen["out"], seen["carried"] = call(mixer, x, hooks, **kwargs)
    return seen


def assert_edits_in_place_keep_gradients(mixer: Mixer, x: Tensor) -> None:
    """At every hook point an edit in place gives the gradients of one that returns a copy."""
    names = [n if not s.per_position else f"{n}.4" for n, s in mixer.specs.items()]
    for name in names:
        gradients = []
        for edit in (lambda value, hook: 1.1 * value, lambda value, hook: value.mul_(1.1)):
            inputs = x.clone().requires_grad_()
            y, _ = call(mixer, inputs, {name: edit})
            gradients.append(torch.autograd.grad(y.square().sum(), inputs)[0])
        torch.testing.assert_close(*gradients, msg=lambda m, name=name: f"{name}: {m}")


@dataclass(frozen=True)
class LayerCase:
    """A fixture and how to build our mixer from it."""

    fixture: Fixture
    make: Callable[[dict], Mixer]
    keys: KeyMap

    def mixer(self, dtype: torch.dtype) -> Mixer:
        config = self.fixture.config
        theirs = self.fixture.group("state.", dtype)
        return load(self.make(config).to(dtype), theirs, self.keys)

    def check_outputs(self, dtype: torch.dtype) -> None:
        """Compare the output, and the state at the end at float64."""
        mixer = self.mixer(dtype)
        y, carried = mixer(x := self.fixture.tensors["in.x"].to(dtype), segment(x.shape[1]))
        if dtype == torch.float64:
            self.fixture.check("out64.y", y)
            self.fixture.check("out64.last_state", carried["state"])
        else:
            self.fixture.check("out.y", y)

    def check_activations(self, names: Mapping[str, str]) -> None:
        """Compare every `mid.` tensor with the activation of a hook name, flattened if need be."""
        mixer = self.mixer(torch.float64)
        wanted = {k: v for k, v in names.items() if f"mid.{k}" in self.fixture.tensors}
        assert wanted.keys() == self.fixture.group("mid.").keys()
        seen = look(mixer, self.fixture.tensors["in.x"].double(), *wanted.values())
        for key, name in wanted.items():
            want = self.fixture.tensors[f"mid.{key}"]
            got = seen[name]
            if key in ("k", "v") and got.shape[2] != want.shape[2]:  # shared by query heads
                got = got.repeat_interleave(want.shape[2] // got.shape[2], dim=2)
            if key in ("g", "gk"):  # theirs is the logarithm
                want = want.exp()
            torch.testing.assert_close(
                got.reshape(want.shape).float(),
                want,
                atol=1e-5 * max(want.abs().max().item(), 1e-30),
                rtol=0,
                msg=lambda m, key=key: f"{self.fixture.name} mid.{key}: {m}",
            )
