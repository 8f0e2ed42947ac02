"""From a Hugging Face model in memory."""

from __future__ import annotations

import torch
from torch import nn

from hooked_ssm.errors import CheckpointError
from hooked_ssm.loading.assemble import assemble
from hooked_ssm.loading.foreign_config import READERS, config_from_hf
from hooked_ssm.loading.tables import find_layout
from hooked_ssm.model import HookedModel


def from_hf(hf_model: nn.Module) -> HookedModel:
    """Build a model with copies of a Hugging Face model's weights; that model is left as it is.

    Weights are not processed (nothing is folded or centred): at float32 every layer's residual
    stream and the logits equal the original's to 1e-4 or better. The hooked model has the
    original's dtype and device, and no tokenizer: set `model.tokenizer` to have one.

    Args:
        hf_model: A causal language model of `transformers`, of a type in `READERS`.

    Raises:
        CheckpointError: The model type, or a setting of it, is not supported.
    """
    if not hasattr(hf_model, "config"):
        raise CheckpointError(
            f"from_hf takes a transformers model, got {type(hf_model).__name__}; "
            f"supported: {', '.join(READERS)}"
        )
    cfg = config_from_hf(hf_model.config)
    weights = hf_model.state_dict()
    layout = find_layout("hf", cfg, weights)
    key = layout.place("embed.weight", cfg).key_among(weights)
    embed: torch.Tensor = weights[str(key)]
    cfg = cfg.with_(dtype=embed.dtype, device=embed.device)
    return assemble(weights, cfg, layout)
