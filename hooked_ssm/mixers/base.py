"""The contract every sequence mixer keeps. CONTRIBUTING.md shows how to write one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hooked_ssm.checks import Positive, check_fields
from hooked_ssm.errors import ConfigError, HookNameError, unknown
from hooked_ssm.hook_names import HookSpec
from hooked_ssm.hook_points import HookFamily, SpecHookPoint
from hooked_ssm.layers import Linear

Carried = dict[str, Tensor]
"""What a mixer needs of the past to go on: states, windows, keys and values, by name."""


@dataclass(frozen=True, kw_only=True)
class MixerOptions:
    """Settings of one mixer; each mixer has a subclass with its own.

    Annotations say what is allowed (`hooked_ssm.checks`): a value that does not fit is refused.
    """

    def __post_init__(self) -> None:
        check_fields(self, prefix=f"{type(self).__name__}: ")

    @classmethod
    def read(cls, mixer: str, settings: Mapping[str, Any]) -> MixerOptions:
        """Build the options from a mapping.

        Raises:
            ConfigError: A setting is not one of this mixer's, or has a value that does not fit.
        """
        allowed = [field.name for field in fields(cls)]
        for name in settings:
            if name not in allowed:
                raise ConfigError(unknown(f"setting of mixer {mixer!r}:", name, allowed))
        return cls(**settings)


@dataclass(frozen=True, kw_only=True)
class StepSizeOptions(MixerOptions):
    """Settings of mixers with a step size.

    Attributes:
        dt_min, dt_max: Range of the step size at initialisation.
    """

    dt_min: Positive = 1e-3
    dt_max: Positive = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dt_min > self.dt_max:
            raise ConfigError(
                f"{type(self).__name__}: dt_min={self.dt_min} is above dt_max={self.dt_max}; "
                "exchange them"
            )


@dataclass(frozen=True)
class BlockDefaults:
    """What surrounds a mixer unless the config says otherwise (PAPER.md, Models)."""

    norm: str = "layer"
    mlp: bool = True
    positions: str = "none"


@dataclass(frozen=True)
class Segment:
    """Where the tokens of one call stand in their documents.

    Attributes:
        start: Index of the first token, counted from the start of the sequence.
        length: How many tokens.
        positions: Index of each token in its own document, padding not counted. [batch|1, pos]
        real: False at padding; None if every token is real. [batch, pos]
        last: Whether nothing will go on from here, so that a mixer may carry nothing on.
    """

    start: int
    length: int
    positions: Tensor
    real: Tensor | None = None
    last: bool = False

    def keep_real(self, x: Tensor) -> Tensor:
        """Set x to zero at padding. [batch, pos, ...]"""
        if self.real is None:
            return x
        return x.masked_fill(~self.real.view(*self.real.shape, *[1] * (x.ndim - 2)), 0)


class Mixer(nn.Module, ABC):
    """Mixes tokens along the sequence: what attention, convolutions and recurrences share.

    A subclass is final. It names its hook points in `hook_specs` (they become attributes), its
    settings in `Options`, and computes `forward`, passing each activation through its hook point
    exactly once per call and computing heavy ones only when listened to.
    """

    Options: ClassVar[type[MixerOptions]] = MixerOptions
    block_defaults: ClassVar[BlockDefaults] = BlockDefaults()
    absent_roles: ClassVar[Mapping[str, str]] = {}
    """Roles this mixer cannot have, with the reason."""
    keeps_own_init: ClassVar[bool] = False
    """Whether a model-wide initialisation must leave this mixer alone."""
    max_length: int | None = None
    """Longest sequence it is defined for; None if any."""

    # For type checkers: hook points that shared code reads, where the mixer's specs name them.
    hook_pattern: SpecHookPoint
    hook_filter: SpecHookPoint
    hook_delta: SpecHookPoint
    hook_ssm_decay: SpecHookPoint
    hook_ssm_write: SpecHookPoint
    hook_ssm_carry: HookFamily
    hook_ssm_state: SpecHookPoint
    hook_conv_carry: HookFamily

    def __init__(self, d_model: int, n_ctx: int, options: MixerOptions):
        super().__init__()
        self.d_model, self.n_ctx, self.options = d_model, n_ctx, options
        self.specs = {spec.name: spec for spec in self.hook_specs()}
        for spec in self.specs.values():
            self.add_module(
                spec.name, HookFamily(spec) if spec.per_position else SpecHookPoint(spec)
            )

    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Return the size of every axis word in `hook_specs` but batch and the positions."""

    @abstractmethod
    def hook_specs(self) -> tuple[HookSpec, ...]:
        """Return the hook points in execution order (they may depend on `self.options`)."""

    @abstractmethod
    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        """Mix the tokens of one segment, going on from what an earlier call handed over.

        Args:
            x: The mixer's input. [batch, pos, d_model]
            segment: Where these tokens stand.
            carried: What the call on the tokens before returned; None at the start.

        Returns:
            What to add to the residual stream [batch, pos, d_model], and what to carry on, which
            may be left out of a `last` segment.
        """

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all parameters from the generator; the default draws those of `Linear` layers."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.reset_parameters(generator)

    def pattern_offset(self, activation: Callable[[str], Tensor]) -> Tensor | float:
        """Return what the mixed values hold beside pattern @ value; zero unless overridden.

        Args:
            activation: Gives the cached activation of a hook name of this mixer.
        """
        return 0.0

    def hook_for(self, role: str) -> str:
        """Return the name of this mixer's hook point with a role.

        Raises:
            HookNameError: The mixer has no such role; says which it has, and why not.
        """
        found = [spec.name for spec in self.specs.values() if role in spec.roles]
        if found:
            return found[0]
        why = self.absent_roles.get(role)
        raise HookNameError(
            f"{type(self).__name__} has no {role}"
            + (f": {why}." if why else ".")
            + f" Its roles: {', '.join(self.roles())}"
        )

    def roles(self) -> list[str]:
        """Return the roles that this mixer's hook points have."""
        return sorted({role for spec in self.specs.values() for role in spec.roles})
