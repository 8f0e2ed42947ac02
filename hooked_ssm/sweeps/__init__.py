"""Sweeps: a grid of trainings, each evaluated, on a laptop or on a cluster.

`run_sweep(read_sweep("experiments/ar_32.yaml"), "runs/ar_32")` trains and evaluates what is
missing; `results_table("runs/ar_32")` is a DataFrame, `write_report` a page.
"""

from __future__ import annotations

from hooked_ssm.sweeps.executors import LocalExecutor
from hooked_ssm.sweeps.grid import parse_sweep, read_sweep
from hooked_ssm.sweeps.ray_executor import RayExecutor
from hooked_ssm.sweeps.report import sweep_page, write_report
from hooked_ssm.sweeps.run_folder import RunFolder
from hooked_ssm.sweeps.spec import EvaluationConfig, RunSpec
from hooked_ssm.sweeps.sweep import Failure, SweepOutcome, run_sweep
from hooked_ssm.sweeps.table import best_over_lr, results_table, task_descriptions

__all__ = [
    "EvaluationConfig",
    "Failure",
    "LocalExecutor",
    "RayExecutor",
    "RunFolder",
    "RunSpec",
    "SweepOutcome",
    "best_over_lr",
    "parse_sweep",
    "read_sweep",
    "results_table",
    "run_sweep",
    "sweep_page",
    "task_descriptions",
    "write_report",
]
