"""A model's weights under TransformerLens' names, for its tools."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import HookNameError, ShapeError
from hooked_ssm.layers import Linear, Norm, TiedUnembed
from hooked_ssm.rules import shown_indices


class LensWeights(nn.Module):
    """Embedding and unembedding matrices, and what they say of the residual stream."""

    cfg: ModelConfig
    embed: nn.Embedding
    unembed: Linear | TiedUnembed
    ln_final: Norm
    blocks: nn.ModuleList

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding."""
        return self.embed.weight

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding."""
        table = self.unembed if isinstance(self.unembed, Linear) else self.embed
        return table.weight.T

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding's bias: there is none, so zeros."""
        return self.W_U.new_zeros(self.cfg.d_vocab)

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """Return the directions whose dot product with the scaled residual gives a token's logit.

        The final norm's weight is folded in, so that `ActivationCache.logit_attrs` of all parts of
        the residual stream adds up to the logit less what the norm's bias contributes.

        Raises:
            ShapeError: A token id outside the vocabulary.
        """
        ids = torch.as_tensor(self.to_single_token(tokens) if isinstance(tokens, str) else tokens)
        if ids.is_floating_point() or not bool(((ids >= 0) & (ids < self.cfg.d_vocab)).all()):
            raise ShapeError(
                f"tokens {shown_indices(ids)}; allowed: token ids 0..{self.cfg.d_vocab - 1}"
            )
        directions = self.W_U.T[ids.to(self.W_U.device)] * self.ln_final.weight
        return directions

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """Return the sum of the output biases of the layers below. [d_model]

        Args:
            layer: The first layer that does not count.
            mlp_input: Whether that layer's mixer counts all the same.
            include_mlp_biases: Whether MLPs count too, besides mixers.

        Raises:
            HookNameError: There is no such layer.
        """
        if not 0 <= layer <= len(self.blocks):
            raise HookNameError(f"layer={layer}; allowed 0..{len(self.blocks)} (all layers)")
        total = self.W_U.new_zeros(self.cfg.d_model)
        for index, block in enumerate(self.blocks):
            mixer_counts = index < layer or (mlp_input and index == layer)
            bias = getattr(getattr(block.mixer, "out_proj", None), "bias", None)
            if mixer_counts and bias is not None:
                total = total + bias
            mlp_counts = include_mlp_biases and index < layer and block.has_mlp
            if mlp_counts and block.mlp.fc_out.bias is not None:
                total = total + block.mlp.fc_out.bias
        return total
