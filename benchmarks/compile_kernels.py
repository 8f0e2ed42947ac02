"""Compile every Triton kernel down to machine code on a machine without a GPU.

    python benchmarks/compile_kernels.py [--arch 80 90] [--json] [NAME ...]

The ops run forwards and backwards on meta tensors of a realistic size; every kernel they would
start is compiled with just these argument types, tile sizes and warps. Prints registers a thread,
bytes spilled and shared memory, as triton's own ptxas reports them. Needs triton, and no
TRITON_INTERPRET in the environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hooked_ssm.ops.selective_scan.triton import selective_scan_triton
from hooked_ssm.ops.short_conv.triton import short_conv_triton

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one kernel of one case."""

    case: str
    kernel: str
    arch: int
    warps: int
    registers: int
    spills: int
    shared_bytes: int
    cubin_bytes: int


Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data whose gradient is wanted."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def _both_ways(run: Callable[[], Any]) -> None:
    """Run an op and its backward pass, with a gradient for each of its outputs."""
    outputs = [t for t in run() if t is not None]
    sum(t.abs().sum().double() for t in outputs).backward()


def _selective_scan(core: torch.dtype, given: torch.dtype, groups: int) -> None:
    batch, length, channels, n = 2, 1024, 1536, 16
    x, dt = meta(batch, length, channels, dtype=given), meta(batch, length, channels, dtype=core)
    B, C = (meta(batch, length, groups, n, dtype=given) for _ in range(2))
    A, start = meta(channels, n, dtype=core), meta(batch, channels, n, dtype=core)
    _both_ways(lambda: selective_scan_triton(x, dt, A, B, C, start, [3, 77]))


def _short_conv(core: torch.dtype, given: torch.dtype, width: int) -> None:
    x, weight = meta(2, 1024, 1536, dtype=given), meta(1536, width, dtype=core)
    bias, window = meta(1536, dtype=core), meta(2, 1536, width - 1, dtype=core)
    _both_ways(lambda: short_conv_triton(x, weight, bias, window, [3, 77]))


CASES: dict[str, Callable[[], None]] = {
    "selective_scan": lambda: _selective_scan(torch.float32, torch.float32, 1),
    "selective_scan-bf16": lambda: _selective_scan(torch.float32, torch.bfloat16, 1),
    "selective_scan-float64-groups": lambda: _selective_scan(torch.float64, torch.float64, 3),
    "short_conv": lambda: _short_conv(torch.float32, torch.float32, 4),
    "short_conv-bf16": lambda: _short_conv(torch.float32, torch.bfloat16, 3),
    "short_conv-float64": lambda: _short_conv(torch.float64, torch.float64, 128),
}


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect what would be launched instead of launching it."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self, args, options))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def source_of(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """The kernel with the types, constants and alignments of this call, as a launch infers them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        pointer, special = isinstance(value, Tensor), not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and not pointer and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = POINTERS[value.dtype] if pointer else "i32"
        if pointer or (special and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_case(case: str, arch: int) -> list[Compiled]:
    """Compile each kernel that the case starts."""
    with recorded() as launches:
        CASES[case]()
    done = []
    for kernel, args, options in launches:
        warps = options["num_warps"]
        compiled = triton.compile(
            source_of(kernel, args, {n: v for n, v in options.items() if n != "num_warps"}),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": warps},
        )
        registers, spills = _resources(compiled.asm["ptx"], arch)
        done.append(
            Compiled(
                case,
                kernel.__name__,
                arch,
                warps,
                registers,
                spills,
                compiled.metadata.shared,
                len(compiled.asm["cubin"]),
            )
        )
    return done


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled to memory, by the ptxas that triton ships."""
    ptxas = triton.knobs.nvidia.ptxas.path
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={name}", str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    words = said.replace(",", " ").split()
    registers = int(words[words.index("registers") - 1])
    stores = said.split(" bytes spill stores")[0].split()[-1]
    return registers, int(stores)


def main() -> None:
    """Compile what was asked for and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [c for name in args.names or CASES for a in args.arch for c in compile_case(name, a)]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'case':30} {'kernel':28} sm  warps registers spill_bytes shared_bytes")
    for r in rows:
        print(
            f"{r.case:30} {r.kernel:28} {r.arch}  {r.warps:5} {r.registers:9} {r.spills:11} "
            f"{r.shared_bytes:12}"
        )


if __name__ == "__main__":
    main()
