"""Seconds of the full mechanistic evaluation: 64 documents, 2 corruptions x 4 positions x 12 sites.

    python benchmarks/interchange.py
The paper's code needs 23 to 35 s for the same cells on 2 such cores.
"""

from __future__ import annotations

import argparse
import time

import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis import mechanistic_evaluation
from hooked_ssm.tasks import AssociativeRecall

DEFAULT = ["attention", "base_conv", "based", "mamba"]
TASK = AssociativeRecall(num_kv=8192, num_pairs=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", nargs="+", default=DEFAULT)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'architecture':16} {'cells':>6} {'seconds':>8}")
    for name in args.architectures:
        cfg = ModelConfig(architecture=name, d_model=64, n_layers=2, d_vocab=TASK.d_vocab, n_ctx=64)
        model = HookedModel(cfg)
        mechanistic_evaluation(model, TASK, 4)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            result = mechanistic_evaluation(model, TASK, args.documents)
            times.append(time.perf_counter() - start)
        print(f"{name:16} {len(result.frame):6} {min(times):8.2f}")


if __name__ == "__main__":
    main()
