"""The GPU benchmark's inputs, timing and table, on the CPU at tiny sizes."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hooked_ssm.ops.dispatch import last_impl

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


CPU = torch.device("cpu")


def test_every_op_is_measured_with_no_some_and_all_states(gpu):
    rows = []
    for op in gpu.CASES:
        rows += gpu.rows_of(op, CPU, batch=2, length=9, tiny=True, repeats=1)
        assert last_impl() == (op.removeprefix("gated_"), "cpu")
    ours = [row for row in rows if row.who == "ours"]
    assert [(row.op, row.states) for row in ours] == [
        (op, states) for op in gpu.CASES for states in ("none", "3", "all")
    ]
    for row in ours:
        assert all(
            math.isfinite(x) and x > 0
            for x in (row.forward_ms, row.both_ms, row.forward_copies, row.both_copies)
        )
    lines = gpu.markdown(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert all(line.count("|") == 8 for line in lines)
    assert lines[2].startswith("| selective_scan | ours | none | ")


def test_another_kernel_is_called_on_the_same_inputs(gpu, monkeypatch):
    """A stand-in for mamba_ssm with its layout: our own scan, turned around."""
    from hooked_ssm.ops.selective_scan import selective_scan

    stand_in = ModuleType("stand_in")
    asked = []

    def selective_scan_fn(u, delta, A, B, C):
        asked.append(u.shape)
        return selective_scan(u.mT, delta.mT, A, B.mT, C.mT).y.mT

    stand_in.selective_scan_fn = selective_scan_fn
    monkeypatch.setitem(sys.modules, gpu.CASES["selective_scan"].module, stand_in)
    *_, last = gpu.rows_of("selective_scan", CPU, batch=2, length=9, tiny=True, repeats=1)
    assert (last.who, last.states) == ("mamba_ssm", "none")
    assert set(asked) == {(2, 5, 9)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(gpu):
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert str(stopped.value).count("\n") == 0
    assert "needs a CUDA device" in str(stopped.value)
