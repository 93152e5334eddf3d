"""Compiles every Triton kernel for real targets, without a GPU, and reads the resource usage.

``python -m tests.backends.compile_gate TARGET``, in a process without ``TRITON_INTERPRET``, prints
the kernels of the package and then one JSON object per compiled variant; ``--table`` in place of
the target, a table of all targets by kernel.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import grpo_kernels.backends.triton as room
from grpo_kernels.backends.triton.row_stats import _row_stats_kernel
from tests.backends.gate_cases import Case, cases

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
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


def compile_case(case: Case, target: str) -> Iterator[dict[str, Any]]:
    """Compile one variant for one target; yield registers, stack, spills, shared memory, and on
    sm_90 the instructions of a loop that reads rows."""
    compiled = _compiled(case, target)
    usage = cuda_usage if TARGETS[target].backend == "cuda" else _hip_usage
    yield {
        "kernel": case.kernel.__name__,
        "case": case.label,
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_LIMITS[target],
        **usage(compiled.asm),
    }
    if target == "sm_90" and case.kernel is _row_stats_kernel:
        yield _row_loops(case, compiled.asm)


def _compiled(case: Case, target: str) -> Any:
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    pointers = [
        index
        for index, parameter in enumerate(case.kernel.params)
        if signature[parameter.name].startswith("*")
        and not parameter.do_not_specialize_on_alignment
    ]
    sizes = [
        i
        for i, name in enumerate(names)
        if name.startswith(("stride", "num_columns", "depth"))
        and not case.kernel.params[i].do_not_specialize
    ]
    divisible = [*pointers, *(sizes if case.aligned else [])]
    attrs = {(index,): [["tt.divisibility", 16]] for index in divisible}
    source = ASTSource(case.kernel, signature, constexprs=case.constants, attrs=attrs)
    return triton.compile(source, target=TARGETS[target], options=case.options)


def instructions_per_logit(case: Case, target: str) -> float:
    """Count the SASS instructions that a row kernel issues per logit, in loops that take an exp."""
    elements = case.constants["BLOCK_V"] / (32 * case.options["num_warps"])
    return loop_length(_compiled(case, target).asm, elements) / elements


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


def _row_loops(case: Case, asm: dict[str, Any]) -> dict[str, Any]:
    """Return how often each instruction is in the loops of the kernel that reads rows."""
    texts = itertools.chain(*_exp_loops(asm))
    counts = Counter(re.sub(r"^@!?\w+ +", "", text).split()[0] for text in texts)
    return {"case": case.label, "aligned": case.aligned, "counts": counts}


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


def report(target: str) -> None:
    print(json.dumps({"kernels": sorted(kernels())}))
    for case in cases(target):
        for line in compile_case(case, target):
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
        results: dict[str, list[dict[str, Any]]] = {}
        for result in map(json.loads, run.stdout.splitlines()[1:]):
            if "counts" not in result:
                results.setdefault(result["kernel"], []).append(result)
        for kernel, variants in results.items():
            names = ("registers", "stack", "spilled", "shared", "shared_limit")
            most = [str(max(variant[name] for variant in variants)) for name in names]
            star = "" if all(map(fits, variants)) else " *"
            print(f"| {kernel}{star} | {target} | {len(variants)} | {' | '.join(most)} |")
    print("\n| row kernel on sm_90 | instructions per logit |\n|---|---|")
    for case in cases("sm_90"):
        if "logits_ptr" in case.types and case.aligned:
            print(f"| {case.label} | {instructions_per_logit(case, 'sm_90'):.1f} |", flush=True)


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
    if sys.argv[1] == "--table":
        print_table()
    else:
        report(sys.argv[1])
