"""``grpo-kernels plan``: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import replace

import torch

from grpo_kernels.tools import machine
from grpo_kernels.tools.estimate.cost import fitted_speed
from grpo_kernels.tools.estimate.model_config import ModelHead, read_model
from grpo_kernels.tools.estimate.report import Line, Question, answer, as_dict, in_units
from grpo_kernels.tools.estimate.shape import HeadShape
from grpo_kernels.tools.estimate.speed import GPUS, Speed, datasheet, find_gpu, measured
from grpo_kernels.tools.text import BadArgumentError, aligned, count, duration

_UNITS = {
    "b": 1,
    **{f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}
_LARGEST = 1 << 44
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL_WORKSPACE = {"cpu": 32 << 20, "cuda": 256 << 20}


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Those of the subcommand, and what it runs."""
    head = plan.add_argument_group("the head")
    head.add_argument("--model", help="folder with a config.json, or that file")
    head.add_argument("--hidden", type=count, help="hidden size, in place of --model")
    head.add_argument("--vocab", type=count, help="vocabulary size, in place of --model")
    head.add_argument(
        "--dtype", choices=_DTYPES, help="of the hidden states [the config's, else bf16]"
    )
    head.add_argument(
        "--weight-dtype", choices=_DTYPES, help="of the weight, under autocast [--dtype]"
    )
    head.add_argument("--frozen-head", action="store_true", help="its weight needs no gradient")
    plan.add_argument("--tokens", type=count, required=True, help="with a loss, of a micro-batch")
    device = plan.add_argument_group("the device")
    device.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="[cuda]")
    device.add_argument("--gpu-memory", type=_size, help="such as 24GiB [the present device's]")
    device.add_argument("--reserved", type=_size, default=0, help="for the rest of the training")
    device.add_argument(
        "--max-workspace", type=_size, help="tile of the line with a small one [256MiB; cpu: 32MiB]"
    )
    names = ", ".join(gpu.name for gpu in GPUS)
    device.add_argument("--gpu", help=f"for the time [the present device]: {names}")
    device.add_argument("--tflops", type=_positive, help="for the time: reached by products")
    device.add_argument("--bandwidth", type=_positive, help="for the time: GB/s that are reached")
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit code.

    Raises:
        BadArgumentError: one of the arguments is wrong.
    """
    name, head = _head(arguments)
    question = Question(
        head=head,
        tokens=arguments.tokens,
        device=arguments.device,
        speed=_speed(arguments, head),
        memory=arguments.gpu_memory or _present_memory(arguments.device),
        reserved=arguments.reserved,
        small_workspace=arguments.max_workspace or _SMALL_WORKSPACE[arguments.device],
    )
    try:
        lines = answer(question)
    except ValueError as error:
        # the only number that the types above cannot judge: less than a row of logits
        message = str(error).replace("max_workspace_bytes", "argument --max-workspace")
        raise BadArgumentError(message) from error
    if arguments.json:
        print(json.dumps({"model": name, **as_dict(question, lines)}, indent=1))
    else:
        print(_text(name, question, lines))
    return 0


def _head(arguments: argparse.Namespace) -> tuple[str | None, HeadShape]:
    sizes = (arguments.hidden, arguments.vocab)
    if arguments.model is not None and sizes != (None, None):
        raise BadArgumentError("argument --model: not allowed with --hidden or --vocab")
    if arguments.model is None and None in sizes:
        raise BadArgumentError("argument --model: expected it, or both --hidden and --vocab")
    model = ModelHead(None, *sizes, None, False)
    if arguments.model is not None:
        try:
            model = read_model(arguments.model)
        except ValueError as error:
            raise BadArgumentError(f"argument --model: {error}") from error
    dtype = _DTYPES[arguments.dtype] if arguments.dtype else model.dtype or torch.bfloat16
    if dtype not in _DTYPES.values():
        known = ", ".join(_DTYPES)
        raise BadArgumentError(
            f"argument --dtype: the config says {dtype}; expected one of {known}"
        )
    weight_dtype = _DTYPES[arguments.weight_dtype] if arguments.weight_dtype else None
    if weight_dtype not in (None, torch.float32, dtype):
        raise BadArgumentError(
            f"argument --weight-dtype: expected fp32 or the dtype of the hidden states; "
            f"got {arguments.weight_dtype}"
        )
    return model.name, HeadShape(
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        dtype=dtype,
        weight_dtype=weight_dtype,
        frozen=arguments.frozen_head,
        softcap=model.softcap,
    )


def _speed(arguments: argparse.Namespace, head: HeadShape) -> Speed:
    """From the arguments, else a data sheet, else a measurement."""
    tflops, bandwidth = arguments.tflops, arguments.bandwidth
    # on a CPU, 16-bit hidden states also need the rate of fp32 products
    if tflops and bandwidth and (arguments.device == "cuda" or head.dtype == torch.float32):
        if arguments.gpu is not None:
            raise BadArgumentError("argument --gpu: not allowed with --tflops and --bandwidth")
        return Speed(
            matrix=tflops * 1e12,
            wide_matrix=tflops * 1e12,
            bandwidth=bandwidth * 1e9,
            where="as given",
            source="--tflops and --bandwidth",
        )
    known = _known_speed(arguments, head)
    if tflops is not None:
        rate = {"matrix": tflops * 1e12, "sums": None, "fused": None}
        known = replace(known, **rate, source=f"--tflops; else {known.source}")
    if bandwidth is not None:
        rate = {"bandwidth": bandwidth * 1e9, "adding": None}
        known = replace(known, **rate, source=f"--bandwidth; else {known.source}")
    return known


def _known_speed(arguments: argparse.Namespace, head: HeadShape) -> Speed:
    if arguments.gpu is not None:
        gpu = find_gpu(arguments.gpu)
        if gpu is None or arguments.device == "cpu":
            names = ", ".join(gpu.name for gpu in GPUS)
            raise BadArgumentError(
                f"argument --gpu: expected one of {names}, with --device cuda; "
                f"got {arguments.gpu!r}"
            )
        return datasheet(gpu, head.dtype)
    if arguments.device == "cuda" and torch.cuda.is_available():
        gpu = find_gpu(torch.cuda.get_device_name())
        if gpu is not None:
            return datasheet(gpu, head.dtype)
        return measured(torch.device("cuda"), head.dtype, head.hidden)
    cpu = torch.device("cpu")
    if arguments.device == "cpu" and (fitted := fitted_speed(cpu, head.dtype)) is not None:
        return fitted
    speed = measured(cpu, head.dtype, head.hidden)
    if arguments.device == "cpu":
        return speed
    return replace(speed, source=f"{speed.source}; no GPU is here, and --gpu names none")


def _present_memory(device: str) -> int | None:
    return machine.device_memory(device) if device in machine.device_types() else None


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"expected a number > 0; got {text!r}")
    return number


def _size(text: str) -> int:
    """Bytes. The unit has to be there: 24 could be GB or GiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a size with a unit (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB), such as 24GiB; "
            f"got {text!r}"
        )
    size = float(match[1]) * _UNITS[match[2]]
    if size > _LARGEST:
        raise argparse.ArgumentTypeError(f"expected at most {in_units(_LARGEST)}; got {text!r}")
    return int(size)


def _text(name: str | None, question: Question, lines: list[Line]) -> str:
    return "\n".join(
        [
            *_title(name, question),
            "A prediction from formulas, of the loss's forward and backward at the head.",
            "",
            *aligned(_table(question, lines)),
            "",
            *_sizes(question, lines),
            *_limits(question),
            f"time       matrix products, then passes over the logits. {_rates(question.speed)}",
            "           A tile of few rows multiplies slower than that.",
        ]
    )


def _title(name: str | None, question: Question) -> list[str]:
    head = question.head
    return [
        f"{name or 'A head'}: hidden size {head.hidden:,}, vocabulary {head.vocabulary:,}"
        f"{', softcap' if head.softcap else ''}; hidden states {_short(head.dtype)}, "
        f"weight {_short(head.weight_dtype or head.dtype)}",
        f"{question.tokens:,} tokens on {question.device}",
    ]


def _table(question: Question, lines: list[Line]) -> list[list[str]]:
    rows = [["", "inputs", "gradients", "extra", "peak", f"time, {question.speed.where}"]]
    if question.memory is not None:
        rows[0].append("largest micro-batch")
    for line in lines:
        sizes = (line.memory.inputs, line.memory.returned, line.memory.extra, line.memory.total)
        rows.append([line.title, *map(in_units, sizes), duration(line.seconds)])
        if line.largest is not None:
            rows[-1].append(f"{line.largest:,} tokens" if line.largest else "not one token")
    return rows


def _sizes(question: Question, lines: list[Line]) -> list[str]:
    head = question.head
    hidden = in_units(question.tokens * head.hidden * head.width)
    weight = in_units(head.size * head.weight_width)
    both = "of the hidden states alone: the head is frozen" if head.frozen else "of both, as large"
    return [
        f"inputs     hidden states {hidden}, head weight {weight}",
        f"gradients  {both}",
        "extra      what else is alive at the peak, which is at",
        *(f"             {line.title}: {line.memory.peak}" for line in lines),
    ]


def _limits(question: Question) -> list[str]:
    peak = "peak       all of it, without the CUDA context and the libraries' workspaces"
    if question.memory is None:
        return [peak, "           (--gpu-memory 24GiB: the largest micro-batch that fits)"]
    reserved = in_units(question.reserved) if question.reserved else "nothing"
    hint = "" if question.reserved else " (--reserved: model, optimizer, activations)"
    return [
        peak,
        f"largest    peak and {reserved} reserved{hint} fit into {in_units(question.memory)}",
    ]


def _rates(speed: Speed) -> str:
    return (
        f"Rates: {speed.matrix / 1e12:.3g} TFLOP/s, {speed.bandwidth / 1e9:.0f} GB/s, "
        f"from: {speed.source}."
    )


def _short(dtype: torch.dtype) -> str:
    return next(name for name, known in _DTYPES.items() if known == dtype)
