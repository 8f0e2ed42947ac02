"""Linear attention, plain and normalised, its token-mixing matrices, and the Taylor feature map."""

from hooked_ssm.ops.linear_attention.features import taylor_features
from hooked_ssm.ops.linear_attention.normalised import (
    NormalisedOutput,
    normalised_linear_attention,
    normalised_linear_attention_pattern,
)
from hooked_ssm.ops.linear_attention.unnormalised import (
    BACKENDS,
    linear_attention,
    linear_attention_pattern,
)

__all__ = [
    "BACKENDS",
    "NormalisedOutput",
    "linear_attention",
    "linear_attention_pattern",
    "normalised_linear_attention",
    "normalised_linear_attention_pattern",
    "taylor_features",
]
