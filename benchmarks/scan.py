"""Mamba's scan on the CPU: the op against its floor, a model against others, length, memory.

    python benchmarks/scan.py            # everything; --quick for a short look

Ratios hold within one run; milliseconds depend on what else the machine does. As root,
`chrt -r 1 python benchmarks/scan.py` runs before everything else on the machine: no noise.
MiB is how far the process's resident memory rises, results included. Freed memory up to 32 MiB is
kept for reuse in every row; larger tensors, such as all states, come fresh from the system.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from peak_memory import keep_freed_memory, peak_mib
from torch import Tensor

from hooked_ssm import HookedModel
from hooked_ssm.ops.selective_scan import selective_scan

Runs = dict[str, tuple[Callable[[], object], int]]
"""What to run, and how often."""


def measure(runs: Runs) -> dict[str, tuple[float, float]]:
    """Milliseconds (the fastest: what else runs only adds to it) and MiB of each.

    The runs take turns, so that a slow minute of the machine is one for all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(max(repeats for _, repeats in runs.values())):
        for name, (run, repeats) in runs.items():
            if turn == 0:
                run()
            if turn < repeats:
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: (min(times[name]), peak_mib(run)) for name, (run, _) in runs.items()}


def table(title: str, rows: dict[str, tuple[float, float]], unit: str, of: str) -> None:
    print(f"\n{title}")
    for name, (ms, mib) in rows.items():
        ratio = ms / rows[of][0]
        print(f"  {name:40} {ms:8.1f} ms  {ratio:6.2f} x {unit}  {mib:7.0f} MiB")


def scan_inputs(length: int, channels: int, n: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    x, dt = normal(1, length, channels), F.softplus(normal(1, length, channels))
    A, B, C = -normal(channels, n).exp(), normal(1, length, n), normal(1, length, n)
    return x, dt, A, B, C


def carry_edited(inputs: tuple[Tensor, ...], at: int) -> tuple[Tensor, Tensor]:
    """The scan with its state halved after one position, as a carry hook has it done."""
    x, dt, A, B, C = inputs
    first, rest = slice(at + 1), slice(at + 1, None)
    before = selective_scan(x[:, first], dt[:, first], A, B[:, first], C[:, first])
    after = selective_scan(
        *(x[:, rest], dt[:, rest], A, B[:, rest], C[:, rest]),
        initial_state=before.final_state / 2,
    )
    return torch.cat([before.y, after.y], dim=1), after.final_state


@torch.no_grad()
def the_op(repeats: int) -> None:
    length, channels, n = 1024, 1536, 16
    inputs = scan_inputs(length, channels, n)
    states = torch.randn(1, length, channels, n)
    target = torch.empty_like(states)
    ours = partial(selective_scan, *inputs)
    rows = measure(
        {
            "copy of the state tensor": (lambda: target.copy_(states), 3 * repeats),
            "reference loop, all states": (lambda: ours(return_states=True, impl="reference"), 2),
            "ours, outputs only": (ours, 2 * repeats),
            "ours, carry edited at one position": (lambda: carry_edited(inputs, 511), 2 * repeats),
            "ours, states at 2 positions": (lambda: ours(return_states=[511, 1023]), repeats),
            "ours, all states": (lambda: ours(return_states=True), repeats),
        }
    )
    title = f"selective scan [1, {length}, {channels}, {n}] float32"
    table(title, rows, "copy", "copy of the state tensor")


def tiny_mamba(layers: int) -> torch.nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=1024, hidden_size=768, num_hidden_layers=layers)
    torch.manual_seed(0)
    return MambaForCausalLM(config).eval()


def our_runs(theirs: torch.nn.Module, tokens: Tensor, layers: int, repeats: int) -> Runs:
    ours = HookedModel.from_hf(theirs).eval()
    mixers = [f"blocks.{layer}.mixer" for layer in range(layers)]
    states = [f"{mixer}.hook_ssm_state" for mixer in mixers]
    carries = [f"{mixer}.hook_ssm_carry.{t}" for mixer in mixers for t in (99, 499)]
    edits = [(f"{mixer}.hook_ssm_carry.255", lambda state, hook: state / 2) for mixer in mixers]

    def cached(names: list[str]) -> object:
        return ours.run_with_cache(tokens, names_filter=names, stop_at_layer=layers)

    def edited() -> object:
        return ours.run_with_hooks(tokens, fwd_hooks=edits, stop_at_layer=layers)

    return {
        "ours, no states": (lambda: ours(tokens, stop_at_layer=layers), repeats),
        "ours, carry edited at one position": (edited, repeats),
        "ours, states at 2 positions": (lambda: cached(carries), repeats),
        "ours, all states cached": (lambda: cached(states), repeats),
    }


@torch.no_grad()
def the_model(repeats: int, layers: int = 6, length: int = 512) -> None:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    theirs = tiny_mamba(layers)
    tokens = torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0))
    runs = our_runs(theirs, tokens, layers, repeats)
    bridged = tiny_mamba(layers)  # the bridge changes the model that it is given
    bridge = build_bridge_from_module(bridged, "MambaForCausalLM", hf_config=bridged.config)
    for block in bridge.blocks:
        block.mixer.eager_scan = True
    few = max(repeats // 2, 2)
    runs["Hugging Face backbone, no states"] = (
        lambda: theirs.backbone(tokens, use_cache=False),
        few,
    )
    runs["transformer-lens eager scan, all states"] = (
        lambda: bridge.run_with_cache(
            tokens, names_filter=lambda name: name.endswith("hook_ssm_state"), use_cache=False
        ),
        few,
    )
    title = f"Mamba of 130M shape, {layers} layers, {length} tokens, to the last residual stream"
    table(title, measure(runs), "ours with all states", "ours, all states cached")


@torch.no_grad()
def the_length(lengths: list[int]) -> None:
    print("\ntime and memory by length, [1, length, 256, 16], outputs only")
    for length in lengths:
        inputs = scan_inputs(length, 256, 16)
        ms, mib = measure({"": (partial(selective_scan, *inputs), 3)})[""]
        print(
            f"  {length:6} tokens {ms:8.1f} ms  {1e3 * ms / length:6.2f} us a token  {mib:6.1f} MiB"
        )
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    repeats = 3 if args.quick else 7
    the_op(repeats)
    the_model(repeats)
    the_length([1024, 4096] if args.quick else [1024, 2048, 4096, 8192, 16384, 32768])


if __name__ == "__main__":
    main()
