"""Which cases are measured, in the order of their weight: a suite may be short of time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.shapes import DTYPES, MODELS, SPREADS, Case
from benchmarks.work import WORKS
from grpo_kernels.tools import device_memory


@dataclass(frozen=True)
class Entry:
    """A case and how thoroughly it is measured."""

    case: Case
    memory: bool = False  # also on a CPU, where it takes a process for each provider
    slow: bool = False  # also the providers that compile for long or need a process; all rounds

    def too_large(self, device: str) -> str | None:
        """Return why the case is not measured on this machine; None where it fits."""
        needed = self.case.least_bytes
        if needed <= 0.8 * device_memory(device):
            return None
        return f"needs {needed / 2**30:.0f} GiB of memory"

    def __str__(self) -> str:
        case = self.case
        inputs = "" if case.inputs == "peaked" else f"-{case.inputs}"
        return f"{case.work.name}-{case.model.name}-{case.tokens}-{case.dtype}{inputs}"


def entry(work: str, model: str, tokens: int, dtype: str, **options: bool) -> Entry:
    return Entry(Case(MODELS[model], tokens, dtype, WORKS[work]), **options)


def _quick() -> list[Entry]:
    """Return one case, thoroughly: on a CPU of a head that is small and real."""
    model, tokens = ("qwen3-1.7b", 8192) if torch.cuda.is_available() else ("smollm2-135m", 1024)
    return [entry("dapo", model, tokens, dtype, memory=True, slow=True) for dtype in DTYPES]


def _small() -> list[Entry]:
    return [entry(work, "small", 128, dtype) for work in WORKS for dtype in DTYPES]


def _cpu() -> list[Entry]:
    """Return one real head, most important cases first, then every work at the small one."""
    head = "qwen2.5-0.5b"
    works = ("logprobs-grad", "nll", "gspo-kl", "dapo-frozen", "dapo-masked", "dapo-zero")
    return [
        *(entry("dapo", head, 1024, dtype, memory=True, slow=True) for dtype in DTYPES),
        *(entry("logprobs-entropy", head, 1024, dtype, memory=True) for dtype in DTYPES),
        *(
            entry("dapo", head, count, dtype, memory=True)
            for count in (256, 512)
            for dtype in DTYPES
        ),
        *(entry(work, head, 256, dtype) for work in works for dtype in DTYPES),
        *_small(),
    ]


_HEADS = ("qwen3-8b", "gemma-2-2b", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-4b")


def _gpu() -> list[Entry]:
    """Return the most important cases, for a machine that is there for minutes."""
    head = "qwen3-1.7b"
    tokens = (1024, 2048, 4096, 16384, 32768, 65536)
    first = ("dapo", "logprobs-entropy", "logprobs-grad", "nll")
    rest = [name for name in WORKS if name not in (*first, "logprobs")]
    return [
        entry("logprobs-entropy", head, 8192, "bf16"),
        entry("dapo", "qwen3-8b", 8192, "bf16"),
        # takes minutes, so two tables are safe by then
        entry("dapo", head, 8192, "bf16", slow=True),
        entry("logprobs-grad", head, 8192, "bf16"),
        entry("nll", head, 8192, "bf16"),
        entry("logprobs-entropy", "qwen3-8b", 8192, "bf16"),
        *(entry("dapo", head, count, "bf16") for count in tokens),
        *(entry(work, head, 8192, "bf16") for work in rest),
        *(entry("dapo", name, 8192, "bf16") for name in _HEADS[1:]),
        *(entry("logprobs-entropy", head, count, "bf16") for count in tokens),
        *(entry("logprobs-entropy", name, 8192, "bf16") for name in _HEADS[1:]),
    ]


def _gpu_full() -> list[Entry]:
    """Return every work and head over all lengths."""
    tokens = (1024, 4096, 16384, 65536)
    every = [
        entry(work, model, count, "bf16", slow=count == 4096)
        for work in WORKS
        for model in ("qwen3-1.7b", *_HEADS)
        for count in tokens
    ]
    wide = [entry(work, "qwen3-1.7b", 4096, "fp32") for work in WORKS]
    # the first entry of a case counts
    return list({str(each): each for each in reversed([*_gpu(), *every, *wide])}.values())[::-1]


SUITES = {
    "quick": _quick,
    "cpu": _cpu,
    "gpu": _gpu,
    "gpu-full": _gpu_full,
}


_VALUES, _GRADIENTS = "logprobs-entropy", "dapo"


def _policies(model: str, tokens: int, work: str = _VALUES) -> list[Entry]:
    return [entry(work, model, tokens, dtype, slow=True) for dtype in ("bf16", "fp32")]


def _briefly(entries: list[Entry], *slow: str) -> list[Entry]:
    """Return the entries with the slow providers in the dtypes ``slow`` only."""
    return [replace(each, slow=each.case.dtype in slow) for each in entries]


# errors on a policy's distributions, by suite; every token is kept, so they are few
ACCURACY = {
    "quick": _briefly([*_policies("small", 64), *_policies("small", 64, _GRADIENTS)]),
    "cpu": [*_policies("qwen2.5-0.5b", 512), *_policies("qwen2.5-0.5b", 256, _GRADIENTS)],
    "gpu": [
        *_briefly(_policies("qwen3-1.7b", 1024), "bf16"),
        *_briefly(_policies("qwen3-1.7b", 1024, _GRADIENTS)),
    ],
    "gpu-full": [
        *_policies("qwen3-1.7b", 1024),
        *_policies("qwen3-1.7b", 1024, _GRADIENTS),
        *_policies("qwen3-8b", 1024),
    ],
}

# what skipped rows and an adapter save, by suite
SAVINGS = {
    "quick": [entry("dapo", "small", 128, dtype) for dtype in DTYPES],
    "cpu": [entry("dapo", "qwen2.5-0.5b", 1024, dtype) for dtype in DTYPES],
    "gpu": [entry("dapo", "qwen3-1.7b", 8192, "bf16")],
    "gpu-full": [entry("dapo", model, 8192, "bf16") for model in ("qwen3-1.7b", "qwen3-8b")],
}


def _every_input(model: str, tokens: int, *dtypes: str, slow: bool = True) -> list[Entry]:
    """Return entries with the inputs that matter most first."""
    cases = [
        Case(MODELS[model], tokens, dtype, WORKS["logprobs-grad"], inputs)
        for inputs in sorted(SPREADS, key=list(SPREADS)[1:].__contains__, reverse=True)
        for dtype in dtypes
    ]
    return [Entry(case, memory=slow and case.inputs == "policy-like", slow=slow) for case in cases]


# the backwards of the ops, by suite
BACKWARDS = {
    "quick": _every_input("small", 128, *DTYPES, slow=False),
    "cpu": _every_input("qwen2.5-0.5b", 1024, *DTYPES),
    "gpu": _every_input("qwen3-1.7b", 8192, "bf16"),
    "gpu-full": [
        *_every_input("qwen3-1.7b", 8192, "bf16"),
        *_every_input("qwen3-8b", 8192, "bf16"),
    ],
}
