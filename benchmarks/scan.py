"""Mamba's scan on the CPU: the op against its floor, a model against others, length, memory.

    python benchmarks/scan.py            # everything; --quick for a short look

Ratios hold within one run; milliseconds depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm import HookedModel
from hooked_ssm.ops.selective_scan import selective_scan


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Fastest of several runs after one that does not count: what else runs only adds to it."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def scan_inputs(length: int, channels: int, n: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    x, dt = normal(1, length, channels), F.softplus(normal(1, length, channels))
    A, B, C = -normal(channels, n).exp(), normal(1, length, n), normal(1, length, n)
    return x, dt, A, B, C


@torch.no_grad()
def the_op(repeats: int) -> None:
    length, channels, n = 1024, 1536, 16
    inputs = scan_inputs(length, channels, n)
    states = torch.randn(1, length, channels, n)
    target = torch.empty_like(states)
    floor = milliseconds(lambda: target.copy_(states), 3 * repeats)
    rows = {
        "copy of the state tensor": floor,
        "reference loop, all states": milliseconds(
            lambda: selective_scan(*inputs, return_states=True, impl="reference"), 2
        ),
        "ours, outputs only": milliseconds(lambda: selective_scan(*inputs), repeats),
        "ours, states at 2 positions": milliseconds(
            lambda: selective_scan(*inputs, return_states=[511, 1023]), repeats
        ),
        "ours, all states": milliseconds(
            lambda: selective_scan(*inputs, return_states=True), repeats
        ),
    }
    print(f"\nselective scan [1, {length}, {channels}, {n}] float32")
    for name, ms in rows.items():
        print(f"  {name:32} {ms:8.1f} ms  {ms / floor:6.1f} x copy")


def tiny_mamba(layers: int) -> torch.nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=1024, hidden_size=768, num_hidden_layers=layers)
    torch.manual_seed(0)
    return MambaForCausalLM(config).eval()


@torch.no_grad()
def the_model(repeats: int, layers: int = 6, length: int = 512) -> None:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    theirs = tiny_mamba(layers)
    ours = HookedModel.from_hf(theirs).eval()
    tokens = torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0))
    states = [f"blocks.{layer}.mixer.hook_ssm_state" for layer in range(layers)]
    carries = [
        f"blocks.{layer}.mixer.hook_ssm_carry.{t}" for layer in range(layers) for t in (99, 499)
    ]

    def cached(names: list[str]) -> object:
        return ours.run_with_cache(tokens, names_filter=names, stop_at_layer=layers)

    rows = {
        "ours, no states": milliseconds(lambda: ours(tokens, stop_at_layer=layers), repeats),
        "ours, states at 2 positions": milliseconds(lambda: cached(carries), repeats),
        "ours, all states cached": milliseconds(lambda: cached(states), repeats),
        "Hugging Face backbone, no states": milliseconds(
            lambda: theirs.backbone(tokens, use_cache=False), max(repeats // 2, 2)
        ),
    }
    bridge = build_bridge_from_module(theirs, "MambaForCausalLM", hf_config=theirs.config)
    for block in bridge.blocks:
        block.mixer.eager_scan = True
    rows["transformer-lens eager scan, all states"] = milliseconds(
        lambda: bridge.run_with_cache(
            tokens, names_filter=lambda name: name.endswith("hook_ssm_state"), use_cache=False
        ),
        2,
    )
    print(f"\nMamba of 130M shape, {layers} layers, {length} tokens, to the last residual stream")
    ours_with_states = rows["ours, all states cached"]
    for name, ms in rows.items():
        print(f"  {name:40} {ms:8.0f} ms  {ms / ours_with_states:5.2f} x ours with all states")


@torch.no_grad()
def the_length(lengths: list[int]) -> None:
    print("\ntime by length, [1, length, 256, 16]")
    for length in lengths:
        inputs = scan_inputs(length, 256, 16)
        ms = milliseconds(lambda inputs=inputs: selective_scan(*inputs), 3)
        print(f"  {length:6} tokens {ms:8.1f} ms  {1e3 * ms / length:6.2f} us a token")
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    repeats = 3 if args.quick else 7
    the_op(repeats)
    the_model(repeats)
    the_length([1024, 4096] if args.quick else [1024, 2048, 4096, 8192, 16384, 32768])


if __name__ == "__main__":
    main()
