"""One legend of axis words, and an alias per tensor role, for public signatures.

Axes: batch, pos, query_pos, key_pos, head, d_model, d_vocab; d_head (value width of a head), d_key
(key width of a head), feature (width after a feature map), d_inner (width inside a state space
mixer), d_state, group (heads that share B and C), channel (any per-channel width), tap (of a
filter). Every activation has batch first, and pos second where it has one.
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens = Int[Tensor, "batch pos"]
Mask = Bool[Tensor, "batch pos"]
Logits = Float[Tensor, "batch pos d_vocab"]
Residual = Float[Tensor, "batch pos d_model"]
Pattern = Float[Tensor, "batch head query_pos key_pos"]
PerDocument = Int[Tensor, " batch"]

__all__ = ["Logits", "Mask", "Pattern", "PerDocument", "Residual", "Tokens"]
