"""``grpo-kernels plan``: its arguments, its rates and its answer."""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from grpo_kernels.engine import Bounded, RunOptions
from grpo_kernels.tools import machine
from grpo_kernels.tools.activations import ADAPTED, TRAINED, activations
from grpo_kernels.tools.call import DTYPES, Call
from grpo_kernels.tools.estimate import growth, total
from grpo_kernels.tools.gpus import GPU_NAMES, find_gpu, gpu_named
from grpo_kernels.tools.hub import head_of, name_of, read_config
from grpo_kernels.tools.model import Model, model_of
from grpo_kernels.tools.plan_run import add_run_arguments, check_run_arguments, run_facts, run_lines
from grpo_kernels.tools.plan_table import table
from grpo_kernels.tools.text import byte_size, count, in_units, positive

_REACHED = 0.7  # of a data sheet's rate, by large GEMMs: a guess
# TFLOP/s of a thread in 16 bits and in fp32, by the instructions of the native kernels
_MEASURED_THREADS = {"amx": (0.9, 0.2)}  # a Xeon with two threads
_SOME_THREAD = (0.05, 0.05)  # a guess
_OF_HEAD = ("hidden", "vocabulary", "dtype", "weight_dtype", "frozen", "softcap")
_ROW_BYTES = 32  # of a row's statistics: logsumexp, entropy and score, and who has the target


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add those of the subcommand. What a message names is the ``dest`` of an option."""
    plan.add_argument("--model", help="folder with a config.json, that file, or a hub id")
    tokens = "tokens of a micro-batch; for the head only those with a loss"
    plan.add_argument("--tokens", type=count, required=True, help=tokens)
    add_run_arguments(plan)
    head = plan.add_argument_group("the head").add_argument
    head("--hidden", type=count, help="hidden size, in place of --model")
    head("--vocab", type=count, help="vocabulary size, in place of --model")
    head("--dtype", choices=DTYPES, help="of the hidden states [the config's, else bf16]")
    head("--weight-dtype", choices=DTYPES, help="of the weight, under autocast [--dtype]")
    head("--frozen-head", action="store_true", help="no gradient for it, as with LoRA")
    sharded = "over ranks that share the vocabulary, as tp=8, and say what one takes"
    head("--shard", type=_read_ranks, metavar="tp=RANKS", help=sharded)
    device = plan.add_argument_group("the device").add_argument
    device("--device", choices=("cuda", "cpu"), default="cuda", help="[cuda]")
    device("--gpu-memory", type=byte_size, help="as 24GiB [the present device's]")
    reserved = "for all else in training; with --model the body's activations are estimated"
    device("--reserved", type=byte_size, default=0, help=reserved)
    device("--max-workspace", type=byte_size, help="also one pass with such a tile, as 64MiB")
    device("--gpu", help=f"for the time, and with --train for the memory: {GPU_NAMES}")
    device("--tflops", type=positive, help="for the time: reached by GEMMs")
    backward = plan.add_argument_group("our backward").add_argument
    kept = "what two passes may keep for it, as 2GiB; 0: nothing [what a frozen head keeps]"
    backward("--activation-bytes", type=lambda x: 0 if x == "0" else byte_size(x), help=kept)
    slots = Bounded().slots
    entries = f"also with a bounded error, by as many entries of a row [{slots}]"
    backward("--bounded", type=count, nargs="?", const=slots, metavar="SLOTS", help=entries)
    of_teacher = "also the divergence from a teacher of that hidden size"
    plan.add_argument("--teacher", type=count, metavar="HIDDEN", help=of_teacher)
    plan.add_argument("--json", action="store_true", help="for programs")


def _read_ranks(text: str) -> int:
    name, _, ranks = text.partition("=")
    if name != "tp":
        raise argparse.ArgumentTypeError(f"expected tp=N, N ranks; got {text!r}")
    return count(ranks)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit code."""
    try:
        check_run_arguments(arguments)
        facts = _facts(arguments) if arguments.train is None else run_facts(arguments)
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        name = "max_workspace" if name == "max_workspace_bytes" else name
        if name not in vars(arguments):
            raise
        arguments.parser.error(f"argument --{name.replace('_', '-')}: {message}")
    lines = table if arguments.train is None else run_lines
    print(json.dumps(facts, indent=1) if arguments.json else "\n".join(lines(facts)))
    return 0


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the question and its answer as plain data."""
    whole, body = _asked(arguments)
    call, per_token = whole, None if body is None else _per_token(body, whole)
    ranks, shard, memory, device = arguments.shard, None, arguments.gpu_memory, call.device
    if ranks is not None:
        call = replace(call, vocabulary=-(-call.vocabulary // ranks), sums_dhidden=True)
        sums = 2 * (call.fp32_rows * (ranks - 1) // ranks)  # by rings, at least
        sent = {
            "of rows' statistics": call.tokens * _ROW_BYTES * (ranks - 1),
            "to sum the gradient of the hidden states in fp32": sums,
        }
        rows = call.vocabulary
        shard = {"by": "tensor parallelism", "ranks": ranks, "rows": rows, "sent_bytes": sent}
    tflops, source = _gemm_rate(device, call.dtype, arguments.gpu, arguments.tflops)
    if memory is None and device in machine.device_types():
        memory = machine.device_memory(device)
    free = None if memory is None else max(0, memory - arguments.reserved)
    head = {name: getattr(whole, name) for name in _OF_HEAD}
    for name in ("dtype", "weight_dtype"):
        head[name] = str(head[name]).removeprefix("torch.")
    calls = _calls(call, arguments.max_workspace, arguments.bounded, arguments.teacher)
    return {
        "model": arguments.model and name_of(arguments.model),
        "head": head,
        "shard": shard,
        "tokens": call.tokens,
        "device": device,
        "memory_bytes": memory,
        "reserved_bytes": arguments.reserved,
        "body_bytes_per_token": per_token,
        "activation_bytes": arguments.activation_bytes,
        "slots": arguments.bounded,
        "default": call.default,
        "tflops": tflops,
        "tflops_source": source,
        "implementations": [_line(title, one, tflops, free, per_token) for title, one in calls],
    }


def _asked(arguments: argparse.Namespace) -> tuple[Call, Model | None]:
    """Return the call for the whole head that is asked for, and the body if it is known."""
    sizes = {"hidden": arguments.hidden, "vocabulary": arguments.vocab}
    head: dict[str, Any] = {"dtype": torch.bfloat16, **sizes}
    body = None
    if arguments.model is not None:
        if any(sizes.values()):
            raise ValueError("model: not allowed with --hidden or --vocab")
        config = read_config(arguments.model)
        head = head_of(config)
        with suppress(ValueError):  # of a body that is none of attention
            body = model_of(config)
    elif None in sizes.values():
        raise ValueError("model: expected it, or both --hidden and --vocab")
    head["dtype"] = DTYPES.get(arguments.dtype, head["dtype"])
    call = Call(
        name="one_pass",
        **head,
        weight_dtype=DTYPES.get(arguments.weight_dtype, head["dtype"]),
        frozen=arguments.frozen_head,
        tokens=arguments.tokens,
        device=arguments.device,
        options=RunOptions(activation_bytes=arguments.activation_bytes),
    )
    return call, body


def _per_token(model: Model, call: Call) -> int:
    """Return the bytes of a token in the body whose last hidden states a call is given."""
    return activations(
        model,
        1,
        state=(call.weight_dtype or call.dtype).itemsize,
        inside=ADAPTED if call.frozen else TRAINED,
        width=call.dtype.itemsize,
    )


def _gemm_rate(
    device: str, dtype: torch.dtype, gpu: str | None, tflops: float | None
) -> tuple[float | None, str]:
    """Return the TFLOP/s that GEMMs reach, None if unknown, and where the number comes from."""
    column = 1 if dtype == torch.float32 else 0
    if gpu is not None and tflops is not None:
        raise ValueError("gpu: not allowed with --tflops")
    if gpu is not None and device == "cpu":
        raise ValueError(f"gpu: expected a name only with --device cuda; got {gpu!r}")
    row = None if gpu is None else gpu_named(gpu)
    if tflops is not None:
        return tflops, "--tflops"
    if device == "cpu":
        isa, threads = next(iter(machine.native_isas()), ""), torch.get_num_threads()
        rate = _MEASURED_THREADS.get(isa, _SOME_THREAD)[column]
        source = f"measured on another CPU with {isa}" if isa in _MEASURED_THREADS else "a guess"
        return rate * threads, f"{source}, for {threads} threads"
    if row is None and torch.cuda.is_available():
        row = find_gpu(torch.cuda.get_device_name())
    if row is None:
        return None, "not known: --gpu or --tflops says it"
    peak = row.tflops_fp32 if column else row.tflops
    sheet = f"the {peak:g} TFLOP/s in the data sheet of {row.name}"
    return peak * _REACHED, f"a guess, {_REACHED:.0%} of {sheet}"


def _calls(
    call: Call, tile: int | None, slots: int | None, teacher: int | None
) -> Iterator[tuple[str, Call]]:
    """Yield what is estimated, by title."""
    if slots is not None and call.sums_dhidden:
        raise ValueError("bounded: not allowed with a part of the vocabulary")
    if not call.sums_dhidden:
        yield "eager, full logits", replace(call, name="eager")
        yield "TRL 1.16, chunked head", replace(call, name="trl")
    ours = {name: replace(call, name=name) for name in ("one_pass", "two_pass")}
    for name, one in ours.items():
        keeps = f", keeps {one.keeps}" if one.keeps not in (None, "nothing") else ""
        yield f"ours, {name}" + (" (the default)" if name == call.default else "") + keeps, one
    if call.may_keep_exponentials:
        title = "ours, one_pass, keeps exponentials (the default on H100, H200 and B200)"
        yield title, replace(call, name="exponentials")
    if tile is not None:
        options = replace(call.options, max_workspace_bytes=tile)
        yield f"ours, one_pass, tile of {in_units(tile)}", replace(call, options=options)
    if teacher is not None:
        yield f"ours, divergence from a teacher of {teacher:,}", replace(call, teacher=teacher)
    if slots is not None:
        for how in ("", ", exact_weight=False")[: 2 - call.frozen]:
            options = replace(call.options, backward=Bounded(slots=slots, exact_weight=not how))
            for name, one in ours.items():
                yield f"ours, {name}, bounded{how}", replace(one, options=options)


def _line(
    title: str, call: Call, tflops: float | None, free: int | None, per_token: int | None
) -> dict[str, Any]:
    """Return the answer for one of them."""
    return {
        "title": title,
        "implementation": call.name,
        "inputs_bytes": call.inputs,
        "returned_bytes": call.returned,
        "extra_bytes": growth(call) - call.returned,
        "total_bytes": total(call),
        "gemms": call.gemms,
        "keeps": call.keeps,
        "seconds": call.flop / (tflops * 1e12) if tflops else None,
        "largest_micro_batch_tokens": None
        if free is None
        else _largest(call, free, per_token or 0),
    }


def _largest(call: Call, free: int, per_token: int) -> int:
    """Return how many tokens fit into bytes, with so many more for each of them.

    Beyond a budget nothing is kept, so more tokens than that may take less.
    """

    def at(tokens: int) -> Call:
        return replace(call, tokens=tokens)

    def needed(tokens: int) -> int:
        return total(at(tokens)) + tokens * per_token

    numbers = range(1, free + 1)  # a token takes more than a byte
    fitting = partial(bisect_right, numbers, free, key=needed)
    saving = bisect_left(numbers, True, key=lambda tokens: at(tokens).keeps in (None, "nothing"))
    most = fitting(lo=saving)
    return most if most > saving else fitting(hi=saving)
