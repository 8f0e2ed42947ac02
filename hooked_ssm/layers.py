"""Layers shared by blocks and mixers: linear maps with explicit initialisation, norms, the MLP."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_ssm.hook_names import Reach, spec
from hooked_ssm.hook_points import SpecHookPoint


class Linear(nn.Linear):
    """`torch.nn.Linear` whose values come from an explicit generator, never the global one.

    Args:
        writes_residual: Whether its output is added to the residual stream (the paper's
            initialisation makes those smaller with depth).
    """

    def __init__(
        self, d_in: int, d_out: int, *, bias: bool = True, writes_residual: bool = False
    ) -> None:
        self.writes_residual = writes_residual
        super().__init__(d_in, d_out, bias=bias)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weight and bias from U(-1/sqrt(d_in), 1/sqrt(d_in)), torch's own default.

        Without a generator nothing is drawn: the constructor of the base class calls this, and
        the model initialises all its layers afterwards, in one place.
        """
        if generator is None:
            return
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound, generator=generator)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound, generator=generator)

    def reset_normal(self, std: float, generator: torch.Generator) -> None:
        """Draw the weight from N(0, std^2) and set the bias to zero (GPT-2, zoology)."""
        with torch.no_grad():
            self.weight.normal_(0, std, generator=generator)
            if self.bias is not None:
                self.bias.zero_()


class TiedUnembed(nn.Module):
    """The embedding, transposed: a module of its own for tools that ask for `model.unembed`."""

    def __init__(self, embed: nn.Embedding):
        super().__init__()
        self._embed = [embed]  # in a list, so that the weight stays a parameter of one module

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a normalised residual stream. [..., d_vocab]"""
        return F.linear(x, self._embed[0].weight)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, with TransformerLens' two hook points.

    layer: (x - mean x) / scale * weight + bias, scale = sqrt(var x + eps)
    rms:   x / scale * weight,                   scale = sqrt(mean x^2 + eps)

    Statistics are taken in float32 (float64 for float64 input), whatever the model's dtype.

    Args:
        reach: How far an edit of its hooks reaches: "later" for the norm before a mixer.
    """

    def __init__(
        self, d_model: int, kind: str, eps: float = 1e-5, *, reach: Reach = "position"
    ) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if kind == "layer" else None
        scale = replace(spec("hook_scale", "batch pos one"), reach=reach)
        normalized = replace(spec("hook_normalized", "batch pos d_model"), reach=reach)
        self.hook_scale, self.hook_normalized = SpecHookPoint(scale), SpecHookPoint(normalized)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x. [..., d_model]"""
        if not self.hook_scale.listened:
            return self.hook_normalized(self._fused(x))
        core = x if x.dtype == torch.float64 else x.float()
        if self.kind == "layer":
            core = core - core.mean(-1, keepdim=True)
        scale = self.hook_scale((core.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        normalised = (core / scale).to(x.dtype) * self.weight
        return self.hook_normalized(normalised if self.bias is None else normalised + self.bias)

    def _fused(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """d_model -> d_mlp -> d_model, plain or gated, with TransformerLens' hook points.

    plain: post = act(pre),              pre = W_in x + b_in
    gated: post = act(pre) * pre_linear, pre = W_gate x + b_gate, pre_linear = W_in x + b_in
    """

    def __init__(
        self, d_model: int, d_mlp: int, act: str = "gelu", *, gated: bool = False, bias: bool = True
    ):
        super().__init__()
        self.act = ACTIVATIONS[act]
        self.gated = gated
        if gated:
            self.fc_gate = Linear(d_model, d_mlp, bias=bias)
        self.fc_in = Linear(d_model, d_mlp, bias=bias)
        self.fc_out = Linear(d_mlp, d_model, bias=bias, writes_residual=True)
        self.hook_pre = SpecHookPoint(spec("hook_pre", "batch pos d_mlp"))
        if gated:
            self.hook_pre_linear = SpecHookPoint(spec("hook_pre_linear", "batch pos d_mlp"))
        self.hook_post = SpecHookPoint(spec("hook_post", "batch pos d_mlp"))

    @property
    def W_in(self) -> Tensor:
        """Input weights in TransformerLens' layout. [d_model, d_mlp]"""
        return self.fc_in.weight.T

    @property
    def W_out(self) -> Tensor:
        """Output weights in TransformerLens' layout: a row per neuron. [d_mlp, d_model]"""
        return self.fc_out.weight.T

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output. [batch, pos, d_model]"""
        if self.gated:
            activated = self.act(self.hook_pre(self.fc_gate(x)))
            post = activated * self.hook_pre_linear(self.fc_in(x))
        else:
            post = self.act(self.hook_pre(self.fc_in(x)))
        return self.fc_out(self.hook_post(post))
