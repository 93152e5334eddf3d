"""The work of GPU kernels, of ours and of others on the same inputs, without a GPU.

``python -m tests.emulated.work``, in ``tests/emulated/run.sh``'s environment, executes them as code
of gfx942 in the emulator, at two vocabularies: the difference is what a logit costs. With a
target, such as sm_90, it compiles them, and counts the instructions of their loops. Work is no
time: neither caches nor waits for memory are modelled.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS, COLUMNS = 2, (16384, 49152)  # of the logits, at two sizes
_DEPTH = 128  # of the products
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# kinds of instructions, by their names
_KINDS = {
    "matrix": r"V_(SMFMAC|MFMA|DOT)",
    "transcendental": r"V_(EXP|LOG|RCP|RSQ|SQRT|SIN|COS)_",
    "shared": r"DS_",
    "load": r"(GLOBAL|BUFFER)_LOAD",
    "store": r"(GLOBAL|BUFFER)_STORE",
    "wait": r"S_(WAITCNT|BARRIER|NOP|SLEEP)",
    "vector": r"V_",
    "scalar": r"",
}
Run = Callable[[int, torch.dtype], dict[str, Tensor]]


def _logits(columns: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, columns, generator=generator)
    return logits.to(dtype), torch.arange(rows) * (columns - 1) // (rows - 1)


def _ours(entropy: bool = False, extras: bool = False) -> Run:
    def run(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
        from grpo_kernels.backends import StatsGradients, Tile
        from grpo_kernels.backends.triton import TRITON_ROWS
        from grpo_kernels.head import Transform

        logits, target = _logits(columns, dtype)
        tile, one = Tile(logits, target, Transform()), torch.ones(ROWS)
        stats = TRITON_ROWS.stats(tile, extras)
        outer = StatsGradients(one, one if entropy else None)
        gradient = TRITON_ROWS.dlogits_(tile, stats, outer, torch.bfloat16)
        return {"logp": stats.logp, "entropy": stats.entropy, "gradient": gradient}

    return run


def _trl(entropy: bool) -> Run:
    def run(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
        from trl.kernels.logprob_entropy import _LogProbEntropyFunction

        logits, target = _logits(columns, dtype)
        logits.requires_grad_()
        logp, found = _LogProbEntropyFunction.apply(logits, target, 1.0, None)
        (logp + found * entropy if entropy else logp).sum().backward()
        return {"logp": logp, "entropy": found, "gradient": logits.grad}

    return run


def _trl_chunked(entropy: bool, outputs: tuple[str, ...] = ()) -> Run:
    """Its fold over tiles of logits; the product beside it is torch's."""

    def run(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
        from trl.kernels import chunked_logprob

        chunked_logprob._use_triton = lambda device: True
        logits, target = _logits(columns, dtype)
        hidden = torch.eye(ROWS, dtype=dtype, requires_grad=True)
        weight = logits.t().contiguous().requires_grad_()
        wanted = (("entropy",) if entropy else ()) + outputs
        found = chunked_logprob.ChunkedLogProbFunction.apply(
            hidden, weight, None, target, 1.0, columns, None, 1.0, wanted
        )
        (found[0] + found[1] if entropy else found[0]).sum().backward()
        of_logits = {"logp": found[0], "gradient": weight.grad.t()}
        return of_logits | ({"entropy": found[1]} if entropy else {})

    return run


def _liger(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    from liger_kernel.ops.grpo_loss import GrpoLossFunction, fused_selective_log_softmax

    logits, target = _logits(columns, dtype)
    padded = torch.cat([logits, logits[:1]])[None].contiguous().requires_grad_()
    logp = fused_selective_log_softmax(padded.detach(), target[None], 1.0)[0]
    mask = torch.ones(1, ROWS, dtype=torch.int)
    loss, *_ = GrpoLossFunction.apply(
        padded, None, None, target[None], -torch.ones(1), mask, 1.0, 0.0, 0.2, 0.2, False
    )
    (loss * ROWS).backward()
    return {"logp": logp, "gradient": padded.grad[0, :ROWS]}


def _fused(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Products and statistics, without a tile of logits."""
    from grpo_kernels.backends.triton import linear_stats
    from grpo_kernels.head import Head, Transform

    logits, target = _logits(columns, dtype, _DEPTH)
    head = Head(logits.t().contiguous(), None, Transform())
    stats = linear_stats(torch.eye(_DEPTH, dtype=dtype), head, target, "fp32", False)
    return {"logp": stats.logp, "entropy": stats.entropy}


class Case(NamedTuple):
    """Kernels of one library."""

    provider: str
    more: str  # what is wanted beside log-probabilities
    run: Run
    rows: int = ROWS
    dtypes: tuple[str, ...] = tuple(DTYPES)


CASES = [
    Case("ours", "", _ours()),
    Case("TRL 1.16, of logits", "", _trl(False)),
    Case("TRL 1.16, chunked", "", _trl_chunked(False)),
    Case("Liger 0.8.5, GRPO loss", "", _liger),
    Case("ours", "entropy", _ours(entropy=True)),
    Case("TRL 1.16, of logits", "entropy", _trl(True)),
    Case("TRL 1.16, chunked", "entropy", _trl_chunked(True)),
    Case("ours", "all statistics", _ours(entropy=True, extras=True)),
    Case(
        "TRL 1.16, chunked",
        "all statistics",
        _trl_chunked(True, ("log_sum_sq_probs", "mean_logits", "is_top1")),
    ),
    Case("ours", f"products of depth {_DEPTH}", _fused, _DEPTH, ("bf16",)),
]


def exact(columns: int, dtype: torch.dtype, entropy: bool, rows: int) -> dict[str, Tensor]:
    """Return the same in fp64."""
    logits, target = _logits(columns, dtype, rows)
    logits = logits.double().requires_grad_()
    logps = logits.log_softmax(-1)
    logp, found = logps.gather(-1, target[:, None])[:, 0], -(logps.exp() * logps).sum(-1)
    (gradient,) = torch.autograd.grad((logp + found * entropy).sum(), logits)
    return {"logp": logp.detach(), "entropy": found.detach(), "gradient": gradient}


def execute() -> list[dict[str, Any]]:
    """Return what each kernel executes for a logit, and the errors of its results."""
    from tests.emulated import device

    device.install("gfx942")
    lines = []
    for provider, more, run, rows, dtypes in CASES:
        for name in dtypes:
            launches, errors = [], {}
            for columns in COLUMNS:
                device.LAUNCHES.clear()
                found = run(columns, DTYPES[name])
                launches.append(list(device.LAUNCHES))
                want = exact(columns, DTYPES[name], "gradient" in found and bool(more), rows)
                errors = {key: _error(value, want[key]) for key, value in found.items()}
            logits = rows * (COLUMNS[1] - COLUMNS[0])
            work = [_per_logit(*pair, logits) for pair in zip(*launches, strict=True)]
            lines.append(
                {"provider": provider, "with": more, "dtype": name, "errors": errors, "work": work}
            )
            print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    return lines


def _error(value: Tensor, want: Tensor) -> float:
    return float((value.double() - want).norm() / want.norm())


def _per_logit(few: Any, many: Any, logits: int) -> dict[str, Any]:
    """Return the difference of two launches for each logit; of instructions, for a lane each."""
    kinds: Counter[str] = Counter()
    for name, count in (many.work.instructions - few.work.instructions).items():
        kinds[next(kind for kind, found in _KINDS.items() if re.match(found, name))] += count
    return {
        "kernel": many.kernel,
        "instructions": {kind: round(64 * kinds[kind] / logits, 2) for kind in _KINDS},
        "read": round((many.work.read - few.work.read) / logits, 2),
        "written": round((many.work.written - few.work.written) / logits, 2),
    }


def compile_for(target: str) -> list[dict[str, Any]]:
    """Return the instructions of SASS for each logit, and the registers, by kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tests.backends import compile_gate, fake_driver

    class Driver(fake_driver.Driver):
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)

    kernels: list[Any] = []
    compiles = JITFunction._do_compile

    def compile_only(function: Any, key: str, signature: Any, device: int, *rest: Any) -> None:
        kernels.append(compiles(function, key, signature, device, *rest))
        function.device_caches[device][0].pop(key)  # the launch ends here

    JITFunction._do_compile = compile_only
    driver.set_active(Driver())
    fake_driver.pretend(target)
    lines = []
    for provider, more, run, _, dtypes in CASES:
        for name in dtypes:
            kernels.clear()
            run(COLUMNS[0], DTYPES[name])
            for kernel in kernels if run is not _fused else ():  # whose loops are of products
                constants = zip(kernel.src.fn.arg_names, range(99), strict=False)
                block = next(
                    kernel.src.constants[(i,)]
                    for argument, i in constants
                    if argument in ("BLOCK_V", "BLOCK_SIZE", "BLOCK_N")
                )
                elements = block / (32 * kernel.metadata.num_warps)
                count = compile_gate.loop_length(kernel.asm, elements)
                lines.append(
                    {
                        "provider": provider,
                        "with": more,
                        "dtype": name,
                        "target": target,
                        "kernel": kernel.metadata.name,
                        "instructions": round(count / elements, 2),
                        **compile_gate.cuda_usage(kernel.asm),
                    }
                )
    return lines


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    print(json.dumps(compile_for(sys.argv[1]) if len(sys.argv) > 1 else execute()))
