"""The way of the values through a whole mixer, as an affine map per channel given its gates.

A mixer's values come out of a short convolution and a nonlinearity, are mixed over time, and then
skipped around, normalised and gated. Given what multiplies them (SiLU(c) = sigmoid(c) c counts as
multiplying by sigmoid(c), a norm as dividing by its scale), every step is affine, so the whole is

    output[q] = sum_k A[q, k] input[k] + offset[q]        per channel, exact.

Source: Zimerman et al. 2024, "Explaining modern gated-linear RNNs via a unified implicit attention
formulation"; here with the offsets that biases add, so that it reconstructs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hooked_ssm.errors import HookUnavailableError
from hooked_ssm.mixers import Mixer
from hooked_ssm.mixers.attention import Attention
from hooked_ssm.mixers.base_conv import BaseConv
from hooked_ssm.mixers.based import Based
from hooked_ssm.mixers.delta_rule_mixer import DeltaRuleMixer
from hooked_ssm.mixers.gla import GLA
from hooked_ssm.mixers.h3 import H3
from hooked_ssm.mixers.hyena import Hyena
from hooked_ssm.mixers.mamba import Mamba
from hooked_ssm.mixers.mamba2 import Mamba2
from hooked_ssm.ops.long_conv import toeplitz

Activation = Callable[[str], Tensor]
"""Gives the cached activation of a hook name of the mixer; "input" is the mixer's input."""


@dataclass(frozen=True)
class ValuePath:
    """What surrounds the token mixing of the values. All per channel: [batch, pos, channel].

    Attributes:
        inputs: What enters the convolution (or the nonlinearity, or the mixing).
        taps: The convolution's, first on the current token; None without. [channel, tap]
        bias: The convolution's; None without. [channel]
        slope: What the nonlinearity multiplies by; None without.
        skip: Weight of the skip around the mixing; None without. [channel]
        after: What the mixed values (and the skip) are multiplied by; None if by nothing.
        output: The hook name of what the way ends in.
    """

    inputs: Tensor
    taps: Tensor | None
    bias: Tensor | None
    slope: Tensor | None
    skip: Tensor | None
    after: Tensor | None
    output: str


def affine_map(
    path: ValuePath, pattern: Tensor, pattern_offset: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Compose the whole way.

    Args:
        pattern: Token mixing of the values. [batch, channel, query_pos, key_pos]
        pattern_offset: What the mixed values hold beside it. [batch, pos, channel]

    Returns:
        matrix [batch, channel, query_pos, key_pos] and offset [batch, query_pos, channel].
    """
    batch, length, channels = path.inputs.shape
    before = torch.eye(length, dtype=pattern.dtype, device=pattern.device)
    before = before.expand(batch, channels, length, length)
    offset = pattern.new_zeros(batch, length, channels)
    if path.taps is not None:
        before = toeplitz(path.taps.to(pattern.dtype), length).expand(batch, -1, -1, -1)
        offset = offset if path.bias is None else offset + path.bias
    if path.slope is not None:
        before = _rows(path.slope) * before
        offset = path.slope * offset
    mixed = torch.einsum("bcqk,bkc->bqc", pattern, offset) + pattern_offset
    matrix = pattern @ before
    if path.skip is not None:
        matrix = matrix + path.skip[:, None, None] * before
        mixed = mixed + path.skip * offset
    if path.after is not None:
        matrix, mixed = _rows(path.after) * matrix, path.after * mixed
    return matrix, mixed


def value_path(mixer: Mixer, activation: Activation) -> ValuePath | None:
    """Return the way around the mixing; None if the mixing of the values is all there is.

    Raises:
        HookUnavailableError: A mixer of the user's own, whose way is not known.
    """
    if isinstance(mixer, (Attention, Based, BaseConv, H3)):
        return None
    for kind, describe in _PATHS.items():
        if isinstance(mixer, kind):
            return describe(mixer, activation)
    raise HookUnavailableError(
        f"{type(mixer).__name__}: what surrounds its token mixing is not known here; allowed: "
        "through='values', or one of the mixers that come with hooked_ssm"
    )


def _mamba(mixer: Mamba, activation: Activation) -> ValuePath:
    conv = activation("hook_conv" if mixer.conv is not None else "hook_in_proj")
    taps, bias = _taps(mixer.conv)
    after = _ratio(activation("hook_gated"), activation("hook_y_skip"))
    inputs = activation("hook_in_proj")
    return ValuePath(inputs, taps, bias, conv.sigmoid(), mixer.D, after, "hook_gated")


def _mamba2(mixer: Mamba2, activation: Activation) -> ValuePath:
    values = slice(0, mixer.d_inner)
    conv = activation("hook_conv" if mixer.conv is not None else "hook_in_proj")[..., values]
    taps, bias = _taps(mixer.conv)
    output = "hook_normed" if mixer.norm is not None else "hook_gated"
    return ValuePath(
        activation("hook_in_proj")[..., values],
        None if taps is None else taps[values],
        None if bias is None else bias[values],
        conv.sigmoid(),
        mixer.D.expand(mixer.n_heads, mixer.d_head).flatten(),
        _ratio(activation(output), activation("hook_y_skip").flatten(2)),
        output,
    )


def _hyena(mixer: Hyena, activation: Activation) -> ValuePath:
    values = slice(2 * mixer.d_model, None)
    taps, bias = _taps(mixer.conv)
    assert taps is not None and bias is not None, "hyena's convolution has both"
    inputs = activation("hook_in_proj")[..., values]
    return ValuePath(inputs, taps[values], bias[values], None, None, None, "hook_y")


def _delta_rule(mixer: DeltaRuleMixer, activation: Activation) -> ValuePath:
    inputs = activation("hook_v").flatten(2)
    taps = None if mixer.conv is None else mixer.conv.v.weight.flip(-1)
    conv = inputs if mixer.conv is None else activation("hook_conv_v").flatten(2)
    after = _ratio(activation("hook_normed"), activation("hook_z")).flatten(2)
    return ValuePath(inputs, taps, None, conv.sigmoid(), None, after, "hook_normed")


def _gla(mixer: GLA, activation: Activation) -> ValuePath:
    inputs, slope, taps = mixer.v_proj(activation("input")), None, None
    if mixer.conv is not None:
        taps = mixer.conv.v.weight.flip(-1)
        slope = _shared(activation("hook_conv_v").flatten(2).sigmoid(), mixer)
        taps = _shared(taps.T, mixer).T
    after = _ratio(activation("hook_normed"), activation("hook_z")).flatten(2)
    return ValuePath(_shared(inputs, mixer), taps, None, slope, None, after, "hook_normed")


_PATHS: dict[type, Callable[..., ValuePath]] = {
    Mamba: _mamba,
    Mamba2: _mamba2,
    Hyena: _hyena,
    DeltaRuleMixer: _delta_rule,
    GLA: _gla,
}


def _taps(conv: object) -> tuple[Tensor | None, Tensor | None]:
    """A short convolution's taps, first on the current token, and its bias."""
    if conv is None:
        return None, None
    return conv.weight.flip(-1), conv.bias


def _shared(x: Tensor, mixer: GLA) -> Tensor:
    """Repeat the channels of shared heads for every query head. [..., channel]"""
    times = mixer.n_heads // mixer.n_kv_heads
    heads = x.unflatten(-1, (mixer.n_kv_heads, -1))
    return heads.repeat_interleave(times, dim=-2).flatten(-2)


def _ratio(output: Tensor, before: Tensor) -> Tensor:
    """output / before; zero where nothing was there to multiply."""
    return torch.where(before == 0, 0, output / torch.where(before == 0, 1, before))


def _rows(scale: Tensor) -> Tensor:
    """[batch, pos, channel] -> what multiplies the rows of [batch, channel, query, key]."""
    return scale.transpose(1, 2)[..., None]
