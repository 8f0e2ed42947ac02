"""The look is given per figure, and an architecture keeps its colour."""

from __future__ import annotations

import subprocess
import sys

import plotly.io as pio

from hooked_ssm.plots import heatmap, theme


def _luminance(hex_colour: str) -> float:
    parts = [int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(a: str, b: str) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_global_template_stays_and_the_figure_carries_ours():
    before = pio.templates.default
    pio.templates.default = "plotly_dark"
    try:
        fig = heatmap([[1.0]])
        assert pio.templates.default == "plotly_dark"
        assert fig.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
        assert fig.layout.template.layout.font.color == theme.INK
    finally:
        pio.templates.default = before


def test_ink_reads_on_white_and_on_near_black():
    assert _contrast(theme.INK, "#ffffff") >= 4.5
    assert _contrast(theme.INK, "#111111") >= 4.0


def test_every_category_shows_on_white_and_on_near_black():
    for colour in theme.PALETTE:
        assert _contrast(colour, "#ffffff") >= 2.0, colour
        assert _contrast(colour, "#111111") >= 3.0, colour


def test_scales_are_centred_and_monotone():
    assert theme.DIVERGING[5] == [0.5, "#f7f7f7"]
    ramp = [_luminance(c) for _, c in theme.SEQUENTIAL]
    assert ramp == sorted(ramp)


def test_architectures_keep_their_colour_and_others_get_a_free_one():
    chosen = theme.colours(["mine", "mamba2 (seed 1)", "Mamba", "BaseConv", "gated_delta_net"])
    assert chosen["mamba2 (seed 1)"] == theme.ARCHITECTURE_COLOURS["mamba2"]
    assert chosen["Mamba"] == theme.ARCHITECTURE_COLOURS["mamba"]
    assert chosen["BaseConv"] == theme.ARCHITECTURE_COLOURS["base_conv"]
    assert chosen["gated_delta_net"] == theme.ARCHITECTURE_COLOURS["gated_delta_net"]
    assert len(set(chosen.values())) == 5
    assert len(set(theme.ARCHITECTURE_COLOURS.values())) == len(theme.ARCHITECTURE_COLOURS)


def test_names_of_one_architecture_have_colours_of_their_own():
    chosen = theme.colours(["attention", "mamba, conv 1", "mamba, conv 2", "mamba"])
    assert chosen["mamba, conv 1"] == theme.ARCHITECTURE_COLOURS["mamba"]
    assert len(set(chosen.values())) == 4
    assert len(set(theme.colours(chosen, shared=True).values())) == 2


def test_importing_plots_does_not_import_circuitsvis_or_kaleido():
    code = (
        "import sys, hooked_ssm.plots;"
        "print([m for m in ('circuitsvis', 'kaleido') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
