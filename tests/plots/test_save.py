"""Writing figures: whole or not at all, offline, clear errors."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat

import pytest

from hooked_ssm.errors import ConfigError, FileError
from hooked_ssm.plots import MissingDependencyError, attention_heads, heatmap, save
from tests.plots.pages import Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CAN_DRAW = importlib.util.find_spec("kaleido") and any(map(shutil.which, BROWSERS))

TOKENS = ["<bos>", "</script>"]


def test_html_is_self_contained(tmp_path):
    path = save(heatmap([[1.0, 2.0]], cols=TOKENS), tmp_path / "new" / "figure.html")
    source = path.read_text()
    page = Page(source)
    assert page.external() == []
    assert source.count("plotly.js v") == 1
    assert "script" in page.tags and source.count("<script") == source.count("</script>")
    assert os.listdir(path.parent) == ["figure.html"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o400


def test_unknown_extension(tmp_path):
    with pytest.raises(ConfigError, match="unknown extension '.pdf'.*Allowed: .html, .png, .svg"):
        save(heatmap([[1.0]]), tmp_path / "figure.pdf")
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ConfigError, match=r"folder='.*file' is, or lies in, a file"):
        save(heatmap([[1.0]]), tmp_path / "file" / "figure.html")


def test_nothing_is_left_where_nothing_can_be_drawn(tmp_path):
    with pytest.raises(ConfigError, match=r"\.html or \.png, not as \.svg"):
        save(attention_heads([[1.0]], ["a"]), tmp_path / "new" / "heads.svg")
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "figure.html"
    path.write_text("old")

    def fails(*_):
        raise OSError("disk")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(FileError, match=r"cannot write .*figure\.html: disk"):
        save(heatmap([[1.0]]), path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["figure.html"]


def test_pictures_need_kaleido(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "kaleido" else find(name, *a)
    )
    with pytest.raises(MissingDependencyError, match=r"needs kaleido.*hooked-ssm\[notebooks\]"):
        save(heatmap([[1.0]]), tmp_path / "figure.png")


@pytest.mark.skipif(not importlib.util.find_spec("kaleido"), reason="kaleido is not installed")
def test_pictures_need_a_browser(tmp_path, monkeypatch):
    import kaleido.errors
    import plotly.graph_objects as go

    def no_browser(*_, **__):
        raise kaleido.errors.ChromeNotFoundError

    monkeypatch.setattr(go.Figure, "to_image", no_browser)
    with pytest.raises(MissingDependencyError, match="needs Chrome or Chromium"):
        save(heatmap([[1.0]]), tmp_path / "figure.svg")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not CAN_DRAW, reason="kaleido or Chromium is not installed")
def test_pictures(tmp_path):
    fig = heatmap([[1.0, 2.0]], cols=TOKENS)
    png = save(fig, tmp_path / "figure.png", scale=1, background="#ffffff").read_bytes()
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20], "big") == 900
    assert fig.layout.paper_bgcolor is None  # the caller's figure is left alone


@pytest.mark.skipif(not CAN_DRAW, reason="kaleido or Chromium is not installed")
def test_pictures_of_attention_views_are_as_high_as_the_view(tmp_path):
    view = attention_heads([[1.0, 0.0], [0.5, 0.5]], TOKENS)
    png = view.save(tmp_path / "heads.png", scale=1, width=400).read_bytes()
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert png.startswith(b"\x89PNG") and width == 400 and 300 < height < 700
    assert len(png) > 3000  # something is drawn


def test_pictures_of_attention_views_need_a_browser(tmp_path, monkeypatch):
    chromium = pytest.importorskip("choreographer.browsers.chromium").Chromium
    monkeypatch.setattr(chromium, "find_browser", lambda **_: None)
    with pytest.raises(MissingDependencyError, match="Chrome or Chromium, which is not found"):
        attention_heads([[1.0]], ["a"]).save(tmp_path / "heads.png")
    assert os.listdir(tmp_path) == []
