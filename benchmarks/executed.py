"""Count the instructions that GPU kernels execute, ours and others', without a GPU.

``python -m benchmarks.executed``, in the environment of ``tests/emulated/run.sh``, executes them as
gfx942 code in the emulator, at two vocabularies; the difference is the cost of a logit. With a
target, such as sm_90, it compiles them and counts the instructions of their loops. Counts are not
times: neither caches nor waits for memory are modeled.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.emulated.work import (
    DTYPES,
    OF_ENTRIES,
    ROWS,
    Run,
    entries,
    logits_of,
    one_read,
    per_logit,
)

COLUMNS = (16384, 49152)  # of the logits, at two sizes
_DEPTH = 128  # of the products


def _ours(
    columns: int, dtype: torch.dtype, entropy: bool = False, extras: bool = False
) -> dict[str, Tensor]:
    from grpo_kernels.backends import StatsGrad, Tile, output_view
    from grpo_kernels.backends.triton import dlogits_, row_stats
    from grpo_kernels.head import Transform

    logits, target = logits_of(columns, dtype)
    tile, one = Tile(logits, target, Transform()), torch.ones(ROWS)
    stats = row_stats(tile, extras)
    grad_stats = StatsGrad(one, one if entropy else None)
    gradient = dlogits_(tile, stats, grad_stats, output_view(logits, torch.bfloat16))
    return {"logp": stats.logprobs, "entropy": stats.entropy, "gradient": gradient}


def _trl(columns: int, dtype: torch.dtype, entropy: bool = False) -> dict[str, Tensor]:
    from trl.kernels.logprob_entropy import _LogProbEntropyFunction

    logits, target = logits_of(columns, dtype)
    logits.requires_grad_()
    logp, found = _LogProbEntropyFunction.apply(logits, target, 1.0, None)
    (logp + found * entropy if entropy else logp).sum().backward()
    return {"logp": logp, "entropy": found, "gradient": logits.grad}


def _trl_chunked(
    columns: int, dtype: torch.dtype, entropy: bool = False, outputs: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Its fold over tiles of logits, without the product, which torch computes."""
    from trl.kernels import chunked_logprob

    chunked_logprob._use_triton = lambda device: True
    logits, target = logits_of(columns, dtype)
    hidden = torch.eye(ROWS, dtype=dtype, requires_grad=True)
    weight = logits.t().contiguous().requires_grad_()
    wanted = (("entropy",) if entropy else ()) + outputs
    found = chunked_logprob.ChunkedLogProbFunction.apply(
        hidden, weight, None, target, 1.0, columns, None, 1.0, wanted
    )
    (found[0] + found[1] if entropy else found[0]).sum().backward()
    of_logits = {"logp": found[0], "gradient": weight.grad.t()}
    return of_logits | ({"entropy": found[1]} if entropy else {})


def _liger(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    from liger_kernel.ops.grpo_loss import GrpoLossFunction, fused_selective_log_softmax

    logits, target = logits_of(columns, dtype)
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

    logits, target = logits_of(columns, dtype, _DEPTH)
    head = Head(logits.t().contiguous(), None, Transform())
    stats = linear_stats(torch.eye(_DEPTH, dtype=dtype), head, target, "fp32", False)
    return {"logp": stats.logprobs, "entropy": stats.entropy}


def _exponentials(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Also compute the gradient of log-probabilities, as a step does before its loss."""
    from grpo_kernels.backends.triton import linear_logp_gradient
    from grpo_kernels.head import Head, Transform

    logits, target = logits_of(columns, dtype, _DEPTH)
    head, out = Head(logits.t().contiguous(), None, Transform()), torch.empty_like(logits)
    stats, gradient = linear_logp_gradient(torch.eye(_DEPTH, dtype=dtype), head, target, out)
    assert gradient.row_scale is not None
    dlogits = gradient.dlogits.float() * gradient.row_scale[:, None]
    return {"logp": stats.logprobs, "entropy": stats.entropy, "gradient": dlogits}


def _trl_divergence(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    from trl.kernels import chunked_divergence

    chunked_divergence._use_triton = lambda device: True
    student, teacher = (x.to(dtype).t().contiguous() for x in _two(columns, dtype))
    one, student = torch.eye(ROWS, dtype=dtype, requires_grad=True), student.requires_grad_()
    found, _ = chunked_divergence.ChunkedDivergenceFunction.apply(
        one, student, None, one.detach(), teacher, None, 0.5
    )
    found.sum().backward()
    return {"jsd": found, "jsd gradient": student.grad.t()}


def _liger_divergence(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """From log-probabilities; torch computes the softmaxes and their backward."""
    from liger_kernel.ops.jsd import LigerJSDFunction

    student, teacher = _two(columns, dtype)
    student.requires_grad_()
    logps = (x.float().log_softmax(-1).to(dtype) for x in (student, teacher))
    found = LigerJSDFunction.apply(*logps, None, 0.5) * ROWS
    found.backward()
    return {"jsd": found, "jsd gradient": student.grad}


def _two(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits, _ = logits_of(columns, dtype)
    return logits, logits.flip(0)


class Case(NamedTuple):
    """Kernels of one library."""

    provider: str
    more: str  # outputs in addition to log-probabilities
    run: Run
    rows: int = ROWS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    columns: tuple[int, int] = COLUMNS


CASES = [
    Case("ours", "", _ours),
    Case("ours, one read", "", one_read),
    Case("TRL 1.16, of logits", "", _trl),
    Case("TRL 1.16, chunked", "", _trl_chunked),
    Case("Liger 0.8.5, GRPO loss", "", _liger),
    Case("ours", "entropy", partial(_ours, entropy=True)),
    Case("TRL 1.16, of logits", "entropy", partial(_trl, entropy=True)),
    Case("TRL 1.16, chunked", "entropy", partial(_trl_chunked, entropy=True)),
    Case("ours", "all statistics", partial(_ours, entropy=True, extras=True)),
    Case(
        "TRL 1.16, chunked",
        "all statistics",
        partial(_trl_chunked, entropy=True, outputs=("log_sum_sq_probs", "mean_logits", "is_top1")),
    ),
    Case("ours", "entries", entries(stored=False), columns=OF_ENTRIES),
    Case("ours, of exponentials", "entries", entries(stored=True), columns=OF_ENTRIES),
    Case("TRL 1.16, chunked", "divergence", _trl_divergence),
    Case("Liger 0.8.5", "divergence", _liger_divergence),
    Case("ours", f"products of depth {_DEPTH}", _fused, _DEPTH, ("bf16",)),
    Case("ours, exponentials", f"products of depth {_DEPTH}", _exponentials, _DEPTH, ("bf16",)),
]


def exact(columns: int, dtype: torch.dtype, entropy: bool, rows: int) -> dict[str, Tensor]:
    """Return the same in fp64."""
    logits, target = logits_of(columns, dtype, rows)
    logits = logits.double().requires_grad_()
    logps = logits.log_softmax(-1)
    logp, found = logps.gather(-1, target[:, None])[:, 0], -(logps.exp() * logps).sum(-1)
    (gradient,) = torch.autograd.grad((logp + found * entropy).sum(), logits, retain_graph=True)
    teacher = logps.detach().flip(0)
    mixed = ((logps.exp() + teacher.exp()) / 2).log()
    jsd = ((logps.exp() * (logps - mixed) + teacher.exp() * (teacher - mixed)) / 2).sum(-1)
    (of_jsd,) = torch.autograd.grad(jsd.sum(), logits)
    exact = {"logp": logp, "entropy": found, "jsd": jsd}
    return {k: v.detach() for k, v in exact.items()} | {
        "gradient": gradient,
        "jsd gradient": of_jsd,
    }


def execute() -> list[dict[str, Any]]:
    """Return the instructions of each kernel per logit, and the errors of its results."""
    from tests.emulated import device

    device.install("gfx942")
    lines = []
    for provider, more, run, rows, dtypes, sizes in CASES:
        for name in dtypes:
            launches, errors = [], {}
            for columns in sizes:
                device.LAUNCHES.clear()
                found = run(columns, DTYPES[name])
                launches.append(list(device.LAUNCHES))
                with_entropy = "gradient" in found and bool(more) and "products" not in more
                want = exact(columns, DTYPES[name], with_entropy, rows)
                errors = {key: _error(value, want[key]) for key, value in found.items()}
            work = per_logit(*launches, rows * (sizes[1] - sizes[0]))
            lines.append(
                {"provider": provider, "with": more, "dtype": name, "errors": errors, "work": work}
            )
            print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    return lines


def _error(value: Tensor, want: Tensor) -> float:
    want = want if value.shape == want.shape else want.sum()
    return float((value.double() - want).norm() / want.norm())


# of products, of cuts, of two tiles
_UNCOUNTED = ("products", "entries", "divergence")


def compile_for(target: str) -> list[dict[str, Any]]:
    """Return the SASS instructions per logit, and the registers, by kernel."""
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
    for provider, more, run, _, dtypes, _ in CASES:
        for name in dtypes:
            kernels.clear()
            run(COLUMNS[0], DTYPES[name])
            for kernel in kernels if not more.startswith(_UNCOUNTED) else ():
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
