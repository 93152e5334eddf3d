"""Compiles every Triton kernel for real targets, without a GPU, and reads the resource usage.

``python -m tests.backends.compile_gate TARGET``, in a process without ``TRITON_INTERPRET``, prints
one JSON object per compiled variant; ``--largest TARGET ...`` the largest of each kernel and tile;
``--table``, a table of all targets by kernel.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import grpo_kernels.backends.triton as room
from grpo_kernels.backends.gpu_tiles import ROW_CONFIG, aligned_config
from grpo_kernels.backends.triton.codegen.trace import KERNEL_NAME
from grpo_kernels.backends.triton.row_stats import _row_stats_kernel
from tests.backends.fake_driver import TARGETS, Variant
from tests.backends.gate_cases import variants_of

# bytes of shared memory that one block can have
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}


def kernels() -> dict[str, JITFunction]:
    """Return every ``triton.jit`` function of the package whose name ends in ``_kernel``."""
    found = {}
    for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found[name] = value
    return found


def largest(variants: list[Variant]) -> list[Variant]:
    """Return that with the most arguments of each kernel and tile, with and without a gradient."""
    chosen: dict[tuple[Any, ...], Variant] = {}
    for variant in variants:
        key = variant.name, variant.sizes, "out_ptr" in variant.types
        if key not in chosen or len(variant.types) >= len(chosen[key].types):
            chosen[key] = variant
    return list(chosen.values())


def compile_for(target: str, variant: Variant) -> Iterator[dict[str, Any]]:
    """Compile one variant for one target; yield registers, stack, spills, shared memory, and on
    sm_90 the instructions of a loop that reads rows."""
    compiled = _compiled(variant, target)
    usage = cuda_usage if TARGETS[target].backend == "cuda" else _hip_usage
    yield {
        "target": target,
        "kernel": variant.name,
        "case": variant.label,
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_LIMITS[target],
        **usage(compiled.asm),
    }
    if target == "sm_90" and variant.kernel is _row_stats_kernel:
        yield _row_loops(variant, compiled.asm)


def _compiled(variant: Variant, target: str) -> Any:
    source = ASTSource(
        variant.kernel, variant.signature, constexprs=variant.constants, attrs=variant.attributes
    )
    return triton.compile(source, target=TARGETS[target], options=variant.options)


def instructions_per_logit(variant: Variant, target: str) -> float:
    """Count the SASS instructions that a row kernel issues per logit, in loops that take an exp."""
    elements = variant.constants["BLOCK_V"] / (32 * variant.options["num_warps"])
    return loop_length(_compiled(variant, target).asm, elements) / elements


def loop_length(asm: dict[str, Any], elements: float) -> float:
    """Count the SASS instructions of loops that take an exp, for so many ``elements`` of a thread.

    Without such a loop all instructions count.
    """
    bodies = _exp_loops(asm)
    bodies = bodies or [[text for _, text in _sass(asm)[0] if not text.startswith("NOP")]]
    exps = sum("MUFU.EX2" in text for body in bodies for text in body)
    unrolled = max(1, int(exps / elements))
    return sum(map(len, bodies)) / unrolled


def _exp_loops(asm: dict[str, Any]) -> list[list[str]]:
    """Return the SASS of each loop that takes an exp.

    What is nested in such a loop is left out, with all that is skipped along with it: it rewrites a
    row whose anchor rises, once or never.
    """
    lines, loops, skips = _sass(asm)
    bodies = []
    for loop in loops:
        nested = [x for x in loops if x != loop and _within(x, loop)]
        skipped = [x for x in skips if _within(x, loop) and any(_within(y, x) for y in nested)]
        left_out = [*nested, *skipped]
        bodies.append([t for at, t in lines if at in loop and not any(at in x for x in left_out)])
    return [body for body in bodies if any("MUFU.EX2" in text for text in body)]


def _row_loops(variant: Variant, asm: dict[str, Any]) -> dict[str, Any]:
    """Return how often each instruction is in the loops of the kernel that reads rows."""
    texts = itertools.chain(*_exp_loops(asm))
    counts = Counter(re.sub(r"^@!?\w+ +", "", text).split()[0] for text in texts)
    return {"case": variant.label, "aligned": variant.aligned, "counts": counts}


def _within(inner: range, whole: range) -> bool:
    return whole.start <= inner.start and inner.stop <= whole.stop


def _sass(asm: dict[str, Any]) -> tuple[list[tuple[int, str]], list[range], list[range]]:
    """Return the instructions with their addresses, and the addresses of each loop and of what
    each forward branch skips."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _dump(asm, "-sass"))
    lines = [(int(place, 16), text) for place, text in found]
    loops, skips = [], []
    for place, text in lines:
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if branch is None:
            continue
        target = int(branch[1], 16)
        if target < place:
            loops.append(range(target, place + 1))
        else:
            skips.append(range(place + 1, target))
    return lines, loops, skips


def cuda_usage(asm: dict[str, Any]) -> dict[str, int]:
    text = _dump(asm, "-res-usage")
    values = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
    stack, looped = values["STACK"], 0
    if stack:
        lines, loops, _ = _sass(asm)
        moves = [at for at, move in lines if re.search(r"\b(STL|LDL)\b", move)]
        looped = sum(any(at in loop for loop in loops) for at in moves)
    names = {"registers": values["REG"], "stack": stack, "spilled": values["LOCAL"]}
    return {**names, "looped": looped}


def _dump(asm: dict[str, Any], what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(tool), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _hip_usage(asm: dict[str, Any]) -> dict[str, int]:
    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", asm["amdgcn"])[1])

    # spilled scalar registers go to lanes of vector registers, not to memory
    stack, spilled = field("private_segment_fixed_size"), field("vgpr_spill_count")
    return {"registers": field("vgpr_count"), "stack": stack, "spilled": spilled, "looped": stack}


def report(targets: list[str], largest_of: list[str]) -> None:
    """Compile what calls launch on devices that share tiles."""
    every = [*targets, *largest_of]
    assert len({(aligned_config(x), ROW_CONFIG.on(x)) for x in every}) == 1, "other tiles"
    variants = variants_of(every[0])
    missing = {*kernels(), KERNEL_NAME} - {variant.name for variant in variants}
    assert not missing, f"launched by no call of gate_cases.py: {missing}"
    for target in every:
        for variant in variants if target in targets else largest(variants):
            for line in compile_for(target, variant):
                print(json.dumps(line), flush=True)


def command(*arguments: str) -> list[str]:
    """Run this module in another process, from the root of the repository."""
    return [sys.executable, "-m", "tests.backends.compile_gate", *arguments]


def print_table() -> None:
    """Print the most that any variant of a kernel takes; a star where it is over a limit."""
    print("| kernel | target | variants | registers | stack | spilled | shared memory | limit |")
    print("|---|---|---|---|---|---|---|---|")
    for target in TARGETS:
        run = subprocess.run(command(target), stdout=subprocess.PIPE, text=True, check=True)
        results = defaultdict(list)
        for result in map(json.loads, run.stdout.splitlines()):
            if "counts" not in result:
                results[result["kernel"]].append(result)
        for kernel, variants in results.items():
            names = ("registers", "stack", "spilled", "shared", "shared_limit")
            most = [str(max(variant[name] for variant in variants)) for name in names]
            star = "" if all(map(fits, variants)) else " *"
            print(f"| {kernel}{star} | {target} | {len(variants)} | {' | '.join(most)} |")
    print("\n| row kernel on sm_90 | instructions per logit |\n|---|---|")
    for variant in variants_of("sm_90"):
        if "logits_ptr" in variant.types and "BLOCK_V" in variant.constants and variant.aligned:
            count = instructions_per_logit(variant, "sm_90")
            print(f"| {variant.label} | {count:.1f} |", flush=True)


_STACK_BYTES = 8


def fits(result: dict[str, Any]) -> bool:
    """Return whether nothing spills, and shared memory suffices.

    One 8-byte value of the largest kernels may lie on the stack, and any that is set before a loop
    and read behind it: ptxas takes the registers for occupancy.
    """
    clean = result["stack"] <= _STACK_BYTES or result["looped"] == 0
    clean = clean and result["spilled"] == 0
    return clean and result["shared"] <= result["shared_limit"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=f"Targets: {', '.join(TARGETS)}.")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--largest", nargs="+", metavar="TARGET", default=[])
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print_table()
    else:
        report(arguments.targets, arguments.largest)
