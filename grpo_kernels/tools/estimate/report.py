"""The answer to ``grpo-kernels plan``: every implementation's memory, time and micro-batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from grpo_kernels.tools.estimate.cost import predict_costs, speed_of
from grpo_kernels.tools.estimate.memory import (
    MemoryPrediction,
    largest_micro_batch,
    predict_head_memory,
)
from grpo_kernels.tools.estimate.shape import HeadShape, Setting
from grpo_kernels.tools.estimate.speed import Speed
from grpo_kernels.tools.estimate.time import predict_head_work
from grpo_kernels.tools.estimate.work import Work


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    head: HeadShape
    tokens: int
    device: str  # "cpu" | "cuda"
    speed: Speed
    memory: int | None = None  # bytes of the device; None: no micro-batch is looked for
    reserved: int = 0  # bytes of it that the rest of the training takes
    small_workspace: int = 256 << 20  # the tile of the last line


@dataclass(frozen=True)
class Line:
    """One implementation."""

    title: str
    implementation: str
    memory: MemoryPrediction
    work: Work
    seconds: float
    largest: int | None  # tokens; None: not asked


def answer(question: Question) -> list[Line]:
    """The lines of the table.

    Raises:
        ValueError: a number is out of range; the message names the argument.
    """
    small = question.small_workspace
    mark = {default_schedule(question): " (the default)"}
    return [
        _line(question, "eager, full logits", "eager"),
        _line(question, "TRL 1.16, chunked head", "trl"),
        _line(question, f"ours, one_pass{mark.get('one_pass', '')}", "ours"),
        _line(question, f"ours, two_pass{mark.get('two_pass', '')}", "ours-two-pass"),
        _line(question, f"ours, one_pass, tile of {in_units(small)}", "ours", small),
    ]


def default_schedule(question: Question) -> str:
    """What ``schedule="auto"`` takes for a loss of token scope."""
    setting = Setting(tokens=question.tokens, device=question.device)
    speed = question.speed
    if question.device == "cpu":
        speed = speed_of(torch.device("cpu"), question.head.dtype)
    costs = predict_costs(question.head, setting, "fp32", speed)
    free = None if question.memory is None else question.memory - question.reserved
    inputs = question.head.input_bytes(question.tokens)
    return costs.choose(None if free is None else free - inputs)[0]


def as_dict(question: Question, lines: list[Line]) -> dict[str, Any]:
    """Question and answer as plain data; bytes and seconds."""
    head = question.head
    return {
        "head": {
            "hidden": head.hidden,
            "vocabulary": head.vocabulary,
            "dtype": str(head.dtype).removeprefix("torch."),
            "weight_dtype": str(head.weight_dtype or head.dtype).removeprefix("torch."),
            "frozen": head.frozen,
            "softcap": head.softcap,
        },
        "tokens": question.tokens,
        "device": question.device,
        "memory_bytes": question.memory,
        "reserved_bytes": question.reserved,
        "speed": asdict(question.speed),
        "implementations": [_plain(line) for line in lines],
    }


def in_units(size: int) -> str:
    """Bytes as a person reads them."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << exponent:
            return f"{size / (1 << exponent):.4g} {unit}"
    return f"{size} B"


def _line(question: Question, title: str, name: str, workspace: int | None = None) -> Line:
    def memory(tokens: int) -> MemoryPrediction:
        prediction = predict_head_memory(
            name,
            question.head,
            tokens,
            device=question.device,
            max_workspace_bytes=workspace,
        )
        assert prediction is not None
        return prediction

    def fits(tokens: int) -> bool:
        assert question.memory is not None
        return memory(tokens).total + question.reserved <= question.memory

    work = predict_head_work(
        name,
        question.head,
        question.tokens,
        device=question.device,
        max_workspace_bytes=workspace,
    )
    assert work is not None
    return Line(
        title=title,
        implementation=name,
        memory=memory(question.tokens),
        work=work,
        seconds=work.seconds(question.speed),
        largest=None if question.memory is None else largest_micro_batch(fits),
    )


def _plain(line: Line) -> dict[str, Any]:
    memory = line.memory
    return {
        "title": line.title,
        "implementation": line.implementation,
        "inputs_bytes": memory.inputs,
        "returned_bytes": memory.returned,
        "extra_bytes": memory.extra,
        "total_bytes": memory.total,
        "peak": memory.peak,
        "flop": line.work.all_flop,
        "traffic_bytes": line.work.traffic + line.work.adding,
        "seconds": line.seconds,
        "largest_micro_batch_tokens": line.largest,
    }
