"""QuACK's chunked linear cross entropy."""

from __future__ import annotations

from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider, with_gradients
from benchmarks.providers.baselines import no_softcap
from benchmarks.shapes import Case

_ALIGNMENT = 8  # of the vocabulary, for its bulk copies; the hidden sizes have it


def _run(problem: Problem) -> Result:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss = chunked_linear_cross_entropy(
        problem.hidden.flatten(0, 1), problem.weight, problem.target.flatten()
    )
    return with_gradients(problem, loss, loss=loss)


def _unable(case: Case) -> str | None:
    if case.work.kind != "mean":
        return "a mean only, no values of tokens"
    if case.dtype == "fp32":
        return "16-bit inputs only"
    if case.model.vocabulary % _ALIGNMENT:
        return f"the vocabulary has to be a multiple of {_ALIGNMENT}"
    return no_softcap(case)


QUACK = Provider(
    name="quack",
    note="quack.linear_cross_entropy.chunked_linear_cross_entropy with its defaults: 4096 rows a "
    "chunk, tuned, and the scaled-exp kernels where they apply (compute capability 9.0, bf16)",
    run=_run,
    unable=_unable,
    packages=(
        *("quack-kernels", "nvidia-cutlass-dsl", "cuda-bindings", "apache-tvm-ffi"),
        *("torch-c-dlpack-ext", "einops"),
    ),
    capability=(9, 0),
    or_newer=True,
    slow_start=True,
)
