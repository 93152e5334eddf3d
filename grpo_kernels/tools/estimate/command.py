"""``grpo-kernels plan``: its arguments, its rates and its answer."""

from __future__ import annotations

import argparse
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.backends import cpu
from grpo_kernels.engine import Bounded
from grpo_kernels.tools import machine
from grpo_kernels.tools.estimate.call import DTYPES, HeadShape
from grpo_kernels.tools.estimate.memory import (
    MemoryEstimate,
    default_schedule,
    estimate_memory,
    what_is_kept,
)
from grpo_kernels.tools.estimate.shard import SHARDS, Shard, read_shard
from grpo_kernels.tools.estimate.table import table
from grpo_kernels.tools.hub import read_config
from grpo_kernels.tools.text import BadArgumentError, byte_size, count, in_units, positive

# name, pattern of what a driver or a user calls it, TFLOP/s in 16 bits and in fp32: dense GEMMs
# with fp32 sums, by the data sheets. The first pattern that is found decides.
GPUS = (
    ("H100 SXM", r"\bh100\b(?!.*(pcie|nvl))", 989, 67),
    ("H200", r"\bg?h200\b", 989, 67),
    ("B200", r"\bg?b200\b", 2250, 75),
    ("A100", r"\ba100\b", 312, 19.5),
    ("MI300X", r"\bmi300x\b", 1307, 163.4),
)
_NAMES = ", ".join(name for name, *_ in GPUS)
_REACHED = 0.7  # of a data sheet's rate, by large GEMMs: a guess
# TFLOP/s of a thread in 16 bits and in fp32, by the instructions of the native kernels
_MEASURED_THREADS = {"amx": (0.9, 0.2)}  # a Xeon with two threads
_SOME_THREAD = (0.05, 0.05)  # a guess
# names in messages -> options
_OPTIONS = {
    "model": "--model",
    "gpu": "--gpu",
    "dtype": "--dtype",
    "weight_dtype": "--weight-dtype",
    "max_workspace_bytes": "--max-workspace",
    "activation_bytes": "--activation-bytes",
    "bounded": "--bounded",
}
_OTHERS = {"eager": "eager, full logits", "trl": "TRL 1.16, chunked head"}
# exact GEMMs over the head, forward and backward; one fewer where it is frozen
_GEMMS = {"eager": 3, "trl": 4, "one_pass": 3}


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add those of the subcommand, and what it runs."""
    head = plan.add_argument_group("the head")
    head.add_argument("--model", help="folder with a config.json, that file, or a hub id")
    head.add_argument("--hidden", type=count, help="hidden size, in place of --model")
    head.add_argument("--vocab", type=count, help="vocabulary size, in place of --model")
    head.add_argument(
        "--dtype", choices=DTYPES, help="of the hidden states [the config's, else bf16]"
    )
    head.add_argument(
        "--weight-dtype", choices=DTYPES, help="of the weight, under autocast [--dtype]"
    )
    head.add_argument("--frozen-head", action="store_true", help="no gradient for it, as with LoRA")
    head.add_argument(
        "--shard",
        type=read_shard,
        metavar="HOW=RANKS",
        help=f"over ranks, as fsdp=8, and say what one takes: {', '.join(SHARDS)}",
    )
    plan.add_argument("--tokens", type=count, required=True, help="with a loss, of a micro-batch")
    device = plan.add_argument_group("the device")
    device.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="[cuda]")
    device.add_argument("--gpu-memory", type=byte_size, help="as 24GiB [the present device's]")
    device.add_argument("--reserved", type=byte_size, default=0, help="for all else in training")
    device.add_argument(
        "--max-workspace", type=byte_size, help="also one pass with such a tile, as 64MiB"
    )
    device.add_argument("--gpu", help=f"for the time [the present device]: {_NAMES}")
    device.add_argument("--tflops", type=positive, help="for the time: reached by GEMMs")
    backward = plan.add_argument_group("our backward")
    backward.add_argument(
        "--activation-bytes",
        type=lambda text: 0 if text == "0" else byte_size(text),
        help="what two passes may keep for it, as 2GiB; 0: nothing [what a frozen head keeps]",
    )
    backward.add_argument(
        "--bounded",
        type=count,
        nargs="?",
        const=Bounded().slots,
        metavar="SLOTS",
        help=f"also with a bounded error, by as many entries of a row [{Bounded().slots}]",
    )
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit code.

    Raises:
        BadArgumentError: one of the arguments is wrong.
    """
    try:
        facts = _facts(arguments)
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        if name not in _OPTIONS:
            raise
        raise BadArgumentError(f"argument {_OPTIONS[name]}: {message}") from error
    print(json.dumps(facts, indent=1) if arguments.json else "\n".join(table(facts)))
    return 0


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the question and its answer as plain data."""
    whole, tokens, device = _head(arguments), arguments.tokens, arguments.device
    shard: Shard | None = arguments.shard
    head = whole if shard is None else shard.head(whole)
    shares = shard is not None and not shard.whole_rows
    if shares and arguments.bounded is not None:
        raise ValueError("bounded: not allowed with a part of the vocabulary")
    tflops, source = _rate(arguments, head.dtype)
    memory = arguments.gpu_memory
    if memory is None and device in machine.device_types():
        memory = machine.device_memory(device)

    def line(
        title: str, name: str, workspace: int | None = None, bounded: Bounded | None = None
    ) -> dict[str, Any]:
        options = {
            "device": device,
            "max_workspace_bytes": workspace,
            "activation_bytes": arguments.activation_bytes,
            "bounded": bounded,
            "sums_dhidden": shares,
        }

        def estimate(tokens: int) -> MemoryEstimate:
            found = estimate_memory(name, head, tokens, **options)
            return found if shard is None else shard.add(found, whole)

        kept = what_is_kept(name, head, tokens, **options)
        of_backward = name == "two_pass" or bounded is not None
        gemms = kept.gemms if of_backward else _GEMMS[name] - head.frozen
        if of_backward and bounded is None and kept.what != "nothing":
            title += f", keeps {kept.what}"
        largest = None
        if memory is not None:
            largest = _largest(
                lambda n: estimate(n).total,
                lambda n: what_is_kept(name, head, n, **options).what != "nothing",
                max(0, memory - arguments.reserved),
            )
        found, flop = estimate(tokens), gemms * 2.0 * tokens * head.size
        return {
            "title": title,
            "implementation": name,
            **{f"{key}_bytes": size for key, size in asdict(found).items()},
            "total_bytes": found.total,
            "gemms": gemms,
            "keeps": kept.what if of_backward else None,
            "seconds": flop / (tflops * 1e12) if tflops else None,
            "largest_micro_batch_tokens": largest,
        }

    tile = arguments.max_workspace
    ours = {name: f"ours, {name}" for name in ("one_pass", "two_pass")}
    default = default_schedule(head, tokens, device=device)
    ours[default] += " (the default)"
    return {
        "model": _name(arguments.model),
        "head": {
            key: str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else x
            for key, x in asdict(whole).items()
        },
        "shard": None if shard is None else _of_shard(shard, whole, tokens),
        "tokens": tokens,
        "device": device,
        "memory_bytes": memory,
        "reserved_bytes": arguments.reserved,
        "activation_bytes": arguments.activation_bytes,
        "slots": arguments.bounded,
        "default": default,
        "tflops": tflops,
        "tflops_source": source,
        "implementations": [
            *([] if shares else [line(title, name) for name, title in _OTHERS.items()]),
            *(line(title, name) for name, title in ours.items()),
            *(
                [line(f"ours, one_pass, tile of {in_units(tile)}", "one_pass", tile)]
                if tile
                else []
            ),
            *(
                line(f"ours, {name}, {title}", name, bounded=bounded)
                for title, bounded in _bounded(arguments.bounded, head).items()
                for name in ours
            ),
        ],
    }


def _of_shard(shard: Shard, whole: HeadShape, tokens: int) -> dict[str, Any]:
    return {
        "by": shard.title,
        "ranks": shard.ranks,
        "sent_bytes": shard.sent(whole, tokens),
        "notes": shard.notes(whole),
    }


def _bounded(slots: int | None, head: HeadShape) -> dict[str, Bounded]:
    """Return the bounded backwards that are asked for, by title."""
    if slots is None:
        return {}
    found = {"bounded": Bounded(slots=slots)}
    if not head.frozen:
        found["bounded, exact_weight=False"] = Bounded(slots=slots, exact_weight=False)
    return found


def _largest(total: Callable[[int], int], keeps: Callable[[int], bool], free: int) -> int:
    """Return how many tokens fit, each of which takes more than a byte.

    Beyond a budget nothing is kept, so more tokens than that may take less.
    """
    numbers = range(1, free + 1)
    keeping = bisect_left(numbers, True, key=lambda n: not keeps(n))
    if keeping < free and total(keeping + 1) <= free:
        return bisect_right(numbers, free, lo=keeping, key=total)
    return bisect_right(numbers, free, hi=keeping or None, key=total)


def _head(arguments: argparse.Namespace) -> HeadShape:
    sizes = (arguments.hidden, arguments.vocab)
    if arguments.model is not None and sizes != (None, None):
        raise ValueError("model: not allowed with --hidden or --vocab")
    if arguments.model is None and None in sizes:
        raise ValueError("model: expected it, or both --hidden and --vocab")
    dtype, softcap = torch.bfloat16, False
    if arguments.model is not None:
        config = read_config(arguments.model)
        text = config.get_text_config()
        sizes = (text.hidden_size, text.vocab_size)
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or dtype
        softcap = getattr(text, "final_logit_softcapping", None) is not None
    dtype = DTYPES.get(arguments.dtype, dtype)
    return HeadShape(
        hidden=sizes[0],
        vocabulary=sizes[1],
        dtype=dtype,
        weight_dtype=DTYPES.get(arguments.weight_dtype, dtype),
        frozen=arguments.frozen_head,
        softcap=softcap,
    )


def _name(model: str | None) -> str | None:
    """Return the folder's name."""
    if model is None:
        return None
    path = Path(model).expanduser().resolve()
    return (path.parent if path.is_file() else path).name


def _rate(arguments: argparse.Namespace, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the TFLOP/s that GEMMs reach, None if unknown, and where the number comes from."""
    row, column = None, 1 if dtype == torch.float32 else 0
    if arguments.gpu is not None:
        if arguments.tflops is not None:
            raise ValueError("gpu: not allowed with --tflops")
        row = find_gpu(arguments.gpu)
        if row is None or arguments.device == "cpu":
            raise ValueError(
                f"gpu: expected one of {_NAMES}, with --device cuda; got {arguments.gpu!r}"
            )
    if arguments.tflops is not None:
        return arguments.tflops, "--tflops"
    if arguments.device == "cpu":
        isa, threads = cpu.isas()[0] if cpu.unavailable() is None else "", torch.get_num_threads()
        rate = _MEASURED_THREADS.get(isa, _SOME_THREAD)[column]
        source = f"measured on another CPU with {isa}" if isa in _MEASURED_THREADS else "a guess"
        return rate * threads, f"{source}, for {threads} threads"
    if row is None and torch.cuda.is_available():
        row = find_gpu(torch.cuda.get_device_name())
    if row is None:
        return None, "not known: --gpu or --tflops says it"
    name, _, *rates = row
    peak = f"{rates[column]:g} TFLOP/s in the data sheet of {name}"
    return rates[column] * _REACHED, f"a guess, {_REACHED:.0%} of the {peak}"


def find_gpu(name: str) -> tuple[str, str, float, float] | None:
    """Return the row of ``GPUS`` for a device's name; None when it is not in the table."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return next((row for row in GPUS if re.search(row[1], plain)), None)
