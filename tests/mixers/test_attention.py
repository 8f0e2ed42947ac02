"""Attention's mixing of values against the fixtures of the operation alone."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.mixers import Attention
from hooked_ssm.mixers.attention import AttentionOptions
from tests.parity import Fixture, fixture_names


def mixer_for(fixture: Fixture) -> Attention:
    heads, width = fixture.config["heads"], fixture.config["head_dim"]
    options = AttentionOptions(n_heads=heads, scale=fixture.config["softmax_scale"])
    return Attention(heads * width, 32, options)


@pytest.mark.parametrize("name", fixture_names("op_attention"))
@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [(torch.float64, "out64."), (torch.float32, "out.")])
def test_mixing_equals_the_reference(
    name: str, looked_at: bool, dtype: torch.dtype, out: str
) -> None:
    """Both paths: the fused one, and the one that shows its pattern."""
    fixture = Fixture(name)
    mixer, inputs = mixer_for(fixture), fixture.group("in.", dtype)
    seen: dict[str, torch.Tensor] = {}
    if looked_at:
        mixer.hook_attn_scores.add_hook(lambda x, hook: seen.__setitem__("scores", x))
        mixer.hook_pattern.add_hook(lambda x, hook: seen.__setitem__("pattern", x))
    y = mixer._attend(inputs["q"], inputs["k"], inputs["v"], None)
    fixture.check(f"{out}y", y)
    if looked_at and dtype == torch.float64:
        fixture.check("mid64.pattern", seen["pattern"])
        causal = seen["scores"].isfinite()
        want = fixture.tensors["mid64.scores_before_mask"]
        torch.testing.assert_close(seen["scores"][causal], want[causal], atol=1e-9, rtol=0)
        assert torch.equal(causal[0, 0], torch.ones_like(causal[0, 0]).tril())
