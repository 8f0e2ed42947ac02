"""Token-mixing patterns in plotly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import pattern, theme

TOKENS = ["<bos>", "a", "</script>"]
LABELS = ("&lt;bos&gt; (0)", "a (1)", "&lt;/script&gt; (2)")


def _weights(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_one_pattern_is_sequential_and_square():
    weights = _weights(3, 3).bfloat16().requires_grad_()
    fig = pattern(weights, TOKENS, title="Layer 0")
    trace = fig.data[0]
    assert np.array_equal(trace.z, weights.detach().float())
    assert trace.x == trace.y == LABELS
    assert fig.layout.coloraxis.cmid is None and fig.layout.coloraxis.cmin == 0
    assert fig.layout.coloraxis.colorscale[0][1] == theme.SEQUENTIAL[0][1]
    assert fig.layout.yaxis.scaleanchor == "x"
    assert fig.layout.title.text == "Layer 0"
    assert fig.layout.xaxis.title.text == "key position"
    assert fig.layout.yaxis.title.text == "query position"
    for word in ("query: %{y}", "key: %{x}", "weight: %{z"):
        assert word in trace.hovertemplate


def test_negative_weights_make_it_diverging_unless_told():
    weights = _weights(2, 3, 3) - 0.5
    most = float(weights.abs().max())
    axis = pattern(weights, TOKENS).layout.coloraxis
    assert (axis.cmin, axis.cmid, axis.cmax) == (-most, 0, most)
    assert pattern(weights, TOKENS, signed=False).layout.coloraxis.cmid is None
    assert pattern(weights.abs(), TOKENS, signed=True).layout.coloraxis.cmid == 0


@pytest.mark.parametrize("n_heads", [2, 3, 4, 6])
def test_a_facet_per_head(n_heads):
    fig = pattern(_weights(n_heads, 3, 3), TOKENS)
    assert [a.text for a in fig.layout.annotations] == [f"head {i}" for i in range(n_heads)]
    assert len(fig.data) == n_heads
    assert fig.layout.title.text is None


def test_the_title_says_what_is_left_out():
    fig = pattern(_weights(9, 3, 3), kind="channel", most=4, title="Mamba")
    assert len(fig.data) == 4
    assert fig.layout.title.text == "Mamba (the first 4 of 9 channels)"
    assert pattern(_weights(9, 3, 3)).layout.title.text == "The first 6 of 9 heads"


def test_fewer_queries_than_keys_are_the_last_ones():
    assert pattern(_weights(1, 3), TOKENS).data[0].y == LABELS[-1:]


def test_errors():
    with pytest.raises(ShapeError, match=r"\[query_pos key_pos\] or \[head query_pos key_pos\]"):
        pattern(_weights(1, 2, 3, 3), TOKENS)
    with pytest.raises(ShapeError, match="tokens has 3 entries"):
        pattern(_weights(4, 4), TOKENS)
    with pytest.raises(ShapeError, match="names has 1 entries"):
        pattern(_weights(2, 3, 3), names=["a"])
    with pytest.raises(ConfigError, match="at least 1"):
        pattern(_weights(2, 3, 3), most=0)
