"""Patching heatmaps: one, and small multiples with one colour bar."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hooked_ssm.errors import ShapeError
from hooked_ssm.plots import patching_heatmap

TOKENS = ["<bos>", "k1", "v2", "k1"]
LABELS = ("&lt;bos&gt; (0)", "k1 (1)", "v2 (2)", "k1 (3)")


def test_one_site():
    values = torch.arange(8.0).reshape(2, 4).requires_grad_()
    fig = patching_heatmap(values, TOKENS, title="resid_pre", value_name="logit difference")
    trace = fig.data[0]
    assert np.array_equal(trace.z, values.detach())
    assert trace.x == LABELS
    assert trace.y == ("0", "1")
    assert trace.zmid == 0 and trace.zmin == -7
    assert trace.colorbar.title.text == "logit difference"
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("position", "layer")


def test_positions_are_numbered_without_tokens_and_ids_are_tokens_too():
    assert patching_heatmap(torch.zeros(2, 3)).data[0].x == ("0", "1", "2")
    fig = patching_heatmap(torch.zeros(2, 3), torch.tensor([7, 8, 7]))
    assert fig.data[0].x == ("7 (0)", "8 (1)", "7 (2)")


@pytest.mark.parametrize("as_mapping", [True, False])
@pytest.mark.parametrize("n_sites", [2, 5])
def test_several_sites_share_one_scale(as_mapping, n_sites):
    values = torch.randn(n_sites, 2, 4, generator=torch.Generator().manual_seed(0))
    sites = [f"site_{i}" for i in range(n_sites)]
    if as_mapping:
        fig = patching_heatmap(dict(zip(sites, values, strict=True)), TOKENS)
    else:
        fig = patching_heatmap(values, TOKENS, sites)
    assert len(fig.data) == n_sites
    for trace, matrix in zip(fig.data, values, strict=True):
        assert np.array_equal(trace.z, matrix)
        assert trace.coloraxis == "coloraxis" and trace.x == LABELS
    most = float(values.abs().max())
    axis = fig.layout.coloraxis
    assert (axis.cmin, axis.cmid, axis.cmax) == (-most, 0, most)
    assert [a.text for a in fig.layout.annotations] == sites


def test_long_documents_are_stacked():
    fig = patching_heatmap(torch.zeros(2, 3, 30), sites=["a", "b"])
    assert fig.layout.xaxis.domain == fig.layout.xaxis2.domain == (0.0, 1.0)


def test_errors():
    with pytest.raises(ShapeError, match="names of the 2 sites"):
        patching_heatmap(torch.zeros(2, 3, 4))
    with pytest.raises(ShapeError, match="sites has 1 entries"):
        patching_heatmap(torch.zeros(2, 3, 4), sites=["a"])
    with pytest.raises(ShapeError, match="tokens has 4 entries"):
        patching_heatmap(torch.zeros(2, 3), TOKENS)
    with pytest.raises(ShapeError, match=r"\[layer pos\] or \[site layer pos\]"):
        patching_heatmap(torch.zeros(3))
