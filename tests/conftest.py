"""What every test runs under: type checks, loud uninitialised memory, one thread, markers.

Everything here happens before `hooked_ssm` (and Triton) is imported for the first time.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    assert "triton" not in sys.modules, "TRITON_INTERPRET counts only before triton is imported"
    os.environ["TRITON_INTERPRET"] = "1"

assert not any(name.split(".")[0] == "hooked_ssm" for name in sys.modules), (
    "hooked_ssm was imported before its type checks were installed"
)
from jaxtyping import install_import_hook  # noqa: E402

# Every public annotation is checked at run time, in tests only.
install_import_hook(["hooked_ssm"], "beartype.beartype")


def _filled_with_nan(make):
    """Wrap a function that returns uninitialised memory: whoever reads it finds NaN."""

    def filled(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            with torch.no_grad():
                tensor.fill_(torch.nan)
        return tensor

    return filled


for owner, name in (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
):
    setattr(owner, name, _filled_with_nan(getattr(owner, name)))

# One thread: on tensors this small a second one only waits for the first (20 times slower on a
# busy machine). What is shared among threads is tested with threads of its own.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config, items):
    """Skip, with the reason, what this machine or this run is not for."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_time = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "gpu" in item.keywords and not CUDA:
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(no_time)


@pytest.fixture(autouse=True)
def seeded():
    """The library draws from explicit generators only; this is for what torch draws by itself."""
    torch.manual_seed(0)


@pytest.fixture
def as_shipped(monkeypatch):
    """Turn the run-time type checks off, as for a user: wrong input meets our own errors."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.fixture
def model():
    """A small Mamba, for what is refused whatever the model."""
    from hooked_ssm import HookedModel, ModelConfig

    cfg = ModelConfig(architecture="mamba", d_model=16, n_layers=2, d_vocab=11, n_ctx=16)
    return HookedModel(cfg).eval()


@pytest.fixture
def ids():
    """Documents for it. [batch, pos]"""
    return torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def as_in_a_terminal():
    """A shell starts jobs in the background with SIGINT ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
