"""A model's parts as a table, and how results look in a notebook."""

from __future__ import annotations

import pandas as pd
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.html_table import MOST_ROWS, largest, titled_table


def small(architecture: str = "mamba") -> HookedModel:
    return HookedModel(
        ModelConfig(architecture=architecture, d_model=16, n_layers=2, d_vocab=20, n_ctx=32)
    )


def test_summary_counts_parameters_hook_points_and_state() -> None:
    model = small()
    table = model.summary()
    assert list(table.columns) == ["kind", "parameters", "hook_points", "state"]
    assert table.loc["blocks.1.mixer", "kind"] == "Mamba"
    assert table["parameters"].drop("total").sum() == table.loc["total", "parameters"]
    assert table.loc["total", "parameters"] == sum(p.numel() for p in model.parameters())
    assert table.loc["total", "hook_points"] == len(model.hook_specs())
    # d_inner 32: a state of 16 numbers and a window of 3 earlier inputs, each
    assert table.loc["blocks.0.mixer", "state"] == 32 * (16 + 3)
    assert small("attention").summary().loc["total", "state"] == 0


def test_hook_points_of_single_positions_do_not_add_up() -> None:
    model = small()
    before = model.summary()
    for position in range(5):
        model.find_hook(model.hook_name(0, "carry", position=position))
    pd.testing.assert_frame_equal(model.summary(), before)


def test_a_model_and_its_cache_show_as_tables() -> None:
    model = small()
    assert f"{model.summary().loc['total', 'parameters']:,}" in model._repr_html_()
    _, cache = model.run_with_cache(torch.zeros(2, 3, dtype=torch.long))
    shown = cache._repr_html_()
    assert f"{len(cache)} activations" in shown
    assert "hook_embed" in shown and "[2, 3, 16]" in shown


def test_tables_escape_what_they_hold_and_stay_short() -> None:
    token = "</script><b>"
    table = pd.DataFrame({token: [token] * 100, "score": range(-50, 50)})
    shown = titled_table(token, table, token, [token])
    assert token not in shown and shown.count("&lt;/script&gt;") == 4 + MOST_ROWS
    assert "100 rows" in shown
    assert list(largest(table, "score")["score"][:3]) == [-50, -49, 49]
    assert titled_table("T") == "<p><b>T</b></p>"
