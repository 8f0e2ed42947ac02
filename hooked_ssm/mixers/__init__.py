"""The registry of sequence mixers: a new one is a file here and a line in `MIXERS`."""

from __future__ import annotations

from hooked_ssm.errors import ConfigError, unknown
from hooked_ssm.mixers.attention import Attention
from hooked_ssm.mixers.base import BlockDefaults, Carried, Mixer, MixerOptions, Segment
from hooked_ssm.mixers.base_conv import BaseConv
from hooked_ssm.mixers.based import Based
from hooked_ssm.mixers.delta_net import DeltaNet
from hooked_ssm.mixers.gated_delta_net import GatedDeltaNet
from hooked_ssm.mixers.gla import GLA
from hooked_ssm.mixers.h3 import H3
from hooked_ssm.mixers.hyena import Hyena
from hooked_ssm.mixers.mamba import Mamba
from hooked_ssm.mixers.mamba2 import Mamba2

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "base_conv": BaseConv,
    "based": Based,
    "h3": H3,
    "hyena": Hyena,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
    "gla": GLA,
}


def register_mixer(name: str, mixer: type[Mixer]) -> None:
    """Make a mixer of your own available under a name in `ModelConfig`.

    Raises:
        ConfigError: The name is taken by another class.
    """
    taken = MIXERS.get(name)
    # A notebook cell run again defines the class anew: same name, same place, so no clash.
    if taken is not None and (taken.__module__, taken.__qualname__) != (
        mixer.__module__,
        mixer.__qualname__,
    ):
        raise ConfigError(f"mixer name {name!r} is taken by {taken.__qualname__}; choose another")
    MIXERS[name] = mixer


def find_mixer(name: str) -> type[Mixer]:
    """Return the mixer class of a name.

    Raises:
        ConfigError: Unknown name.
    """
    if not isinstance(name, str) or name not in MIXERS:
        raise ConfigError(
            f"{unknown('mixer', name, MIXERS)}. A mixer of your own must be registered first: "
            "hooked_ssm.mixers.register_mixer"
        )
    return MIXERS[name]


__all__ = [
    "MIXERS",
    "BlockDefaults",
    "Carried",
    "Mixer",
    "MixerOptions",
    "Segment",
    "find_mixer",
    "register_mixer",
]
