"""The values that parameters start from."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from hooked_ssm.config import ModelConfig
from hooked_ssm.layers import Linear
from hooked_ssm.mixers import Mixer


def initialise(modules: Iterable[nn.Module], cfg: ModelConfig, generator: torch.Generator) -> None:
    """Draw a model's parameters: embeddings, then mixers by their own rules, then linear layers.

    With `init="paper"` embeddings and linear layers are normal with standard deviation 0.02,
    divided by sqrt(2 layers) where a layer writes to the residual stream; else embeddings have
    1 / sqrt(d_model), and linear layers torch's uniform default. A mixer that `keeps_own_init`
    keeps what it draws for its linear layers.

    Args:
        modules: All of the model's, in their order, which the draws follow.
    """
    modules = list(modules)
    mixers = [m for m in modules if isinstance(m, Mixer)]
    std = 0.02 if cfg.init == "paper" else 1 / math.sqrt(cfg.d_model)
    with torch.no_grad():
        for table in (m for m in modules if isinstance(m, nn.Embedding)):
            table.weight.normal_(0, std, generator=generator)
    for mixer in mixers:
        mixer.initialise(generator)
    own = {id(m) for mixer in mixers if mixer.keeps_own_init for m in mixer.modules()}
    for layer in (m for m in modules if isinstance(m, Linear) and id(m) not in own):
        if cfg.init == "paper":
            depth = math.sqrt(2 * len(mixers)) if layer.writes_residual else 1
            layer.reset_normal(0.02 / depth, generator)
        else:
            layer.reset_parameters(generator)
