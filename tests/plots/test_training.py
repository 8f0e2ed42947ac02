"""Curves over training."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import accuracy_curve, loss_curve, theme

HISTORY = pd.DataFrame(
    {"step": [0, 10, 20], "loss": [3.0, 2.0, 1.0], "accuracy": [0.1, np.nan, 0.9]}
)


def test_accuracy_leaves_out_steps_without_one_and_draws_chance():
    fig = accuracy_curve({"mamba": HISTORY, "mamba (seed 1)": HISTORY}, chance=0.125)
    first, second = fig.data
    assert list(first.x) == [0, 20] and list(first.y) == [0.1, 0.9]
    assert first.line.color == second.line.color == theme.ARCHITECTURE_COLOURS["mamba"]
    assert first.line.dash != second.line.dash
    assert fig.layout.shapes[0].y0 == 0.125
    assert fig.layout.annotations[0].text == "chance 12.5%"
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("step", "accuracy")


def test_loss_is_on_a_log_axis():
    fig = loss_curve({"<mine>": HISTORY})
    assert list(fig.data[0].y) == [3.0, 2.0, 1.0]
    assert fig.layout.yaxis.type == "log"
    assert fig.data[0].name == "&lt;mine&gt;"


def test_errors():
    with pytest.raises(ShapeError, match="histories is empty"):
        accuracy_curve({})
    with pytest.raises(ConfigError, match="'a' has no column 'accuracy'; it has step, loss"):
        accuracy_curve({"a": HISTORY[["step", "loss"]]})
