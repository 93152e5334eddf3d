"""``grpo-kernels plan``: its arguments, the GEMM rates and the answer."""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
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

_REACHED = 0.7  # share of a data sheet's rate that large GEMMs reach: a guess
_OF_HEAD = ("hidden", "vocabulary", "dtype", "weight_dtype", "frozen", "softcap")
_ROW_BYTES = 32  # a row's statistics: logsumexp, entropy, score, and the rank that has the target


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand. Messages name an option by its ``dest``."""
    plan.add_argument("--model", help="folder with a config.json, path to that file, or a hub id")
    plan.add_argument(
        "--tokens",
        type=count,
        required=True,
        help="tokens per micro-batch; without --train, only tokens that carry a loss",
    )
    add_run_arguments(plan)
    _add_head(plan.add_argument_group("the head").add_argument)
    _add_device(plan.add_argument_group("the device").add_argument)
    _add_backward(plan.add_argument_group("the backward").add_argument)
    plan.add_argument(
        "--teacher",
        type=count,
        metavar="HIDDEN",
        help="also plan the divergence from a teacher with this hidden size",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")


def _add_head(add: Callable[..., Any]) -> None:
    add("--hidden", type=count, help="hidden size, instead of --model")
    add("--vocab", type=count, help="vocabulary size, instead of --model")
    add("--dtype", choices=DTYPES, help="dtype of the hidden states [the config's, else bf16]")
    add("--weight-dtype", choices=DTYPES, help="dtype of the weight, under autocast [--dtype]")
    add("--frozen-head", action="store_true", help="the head gets no gradient, as with LoRA")
    add(
        "--shard",
        type=_read_ranks,
        metavar="tp=RANKS",
        help="split the vocabulary over ranks, such as tp=8, and plan for one of them",
    )


def _add_device(add: Callable[..., Any]) -> None:
    add("--device", choices=("cuda", "cpu"), default="cuda", help="[cuda]")
    add("--gpu-memory", type=byte_size, help="memory of the device, such as 24GiB [this device's]")
    add(
        "--reserved",
        type=byte_size,
        default=0,
        help="memory for everything but the head; with --model, activations are estimated",
    )
    add("--max-workspace", type=byte_size, help="also plan one pass with this tile, such as 64MiB")
    add("--gpu", help=f"GPU, for the time, and with --train for the memory: {GPU_NAMES}")
    add("--tflops", type=positive, help="rate that GEMMs reach, for the time")


def _add_backward(add: Callable[..., Any]) -> None:
    add(
        "--activation-bytes",
        type=lambda text: 0 if text == "0" else byte_size(text),
        help="memory that two passes may keep for the backward, such as 2GiB; 0: none "
        "[what a frozen head keeps]",
    )
    slots = Bounded().slots
    add(
        "--bounded",
        type=count,
        nargs="?",
        const=slots,
        metavar="SLOTS",
        help=f"also plan a sparse backward with SLOTS entries per row [{slots}]",
    )


def _read_ranks(text: str) -> int:
    name, _, ranks = text.partition("=")
    if name != "tp":
        raise argparse.ArgumentTypeError(f"expected tp=N for N ranks; got {text!r}")
    return count(ranks)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit code."""
    facts_of, lines_of = (_facts, table) if arguments.train is None else (run_facts, run_lines)
    try:
        check_run_arguments(arguments)
        facts = facts_of(arguments)
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        name = "max_workspace" if name == "max_workspace_bytes" else name
        if name not in vars(arguments):
            raise
        arguments.parser.error(f"argument --{name.replace('_', '-')}: {message}")
    print(json.dumps(facts, indent=1) if arguments.json else "\n".join(lines_of(facts)))
    return 0


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request and its answer as plain data."""
    whole, body = _asked(arguments)
    call = whole
    shard = None
    if arguments.shard is not None:
        vocabulary = -(-whole.vocabulary // arguments.shard)
        call = replace(whole, vocabulary=vocabulary, sums_dhidden=True)
        shard = _shard(call, arguments.shard)
    tflops, source = _gemm_rate(call, arguments.gpu, arguments.tflops)
    memory = arguments.gpu_memory
    if memory is None and call.device in machine.device_types():
        memory = machine.device_memory(call.device)
    free = None if memory is None else max(0, memory - arguments.reserved)
    per_token = None if body is None else _per_token(body, whole)
    head = {name: getattr(whole, name) for name in _OF_HEAD}
    for name in ("dtype", "weight_dtype"):
        head[name] = str(head[name]).removeprefix("torch.")
    return {
        "model": arguments.model and name_of(arguments.model),
        "head": head,
        "shard": shard,
        "tokens": call.tokens,
        "device": call.device,
        "memory_bytes": memory,
        "reserved_bytes": arguments.reserved,
        "body_bytes_per_token": per_token,
        "activation_bytes": arguments.activation_bytes,
        "slots": arguments.bounded,
        "default": call.default,
        "tflops": tflops,
        "tflops_source": source,
        "implementations": [
            _line(title, one, tflops, free=free, per_token=per_token or 0)
            for title, one in _calls(call, arguments)
        ],
    }


def _shard(call: Call, ranks: int) -> dict[str, Any]:
    """Return what one rank sends to the others in a call, at least (by ring algorithms)."""
    sums = 2 * (call.fp32_rows * (ranks - 1) // ranks)
    sent = {
        "of rows' statistics": call.tokens * _ROW_BYTES * (ranks - 1),
        "to sum the gradient of the hidden states in fp32": sums,
    }
    return {
        "by": "tensor parallelism",
        "ranks": ranks,
        "rows": call.vocabulary,
        "sent_bytes": sent,
    }


def _asked(arguments: argparse.Namespace) -> tuple[Call, Model | None]:
    """Return the requested call for the whole head, and the body if it is known."""
    sizes = {"hidden": arguments.hidden, "vocabulary": arguments.vocab}
    head: dict[str, Any] = {"dtype": torch.bfloat16, **sizes}
    body = None
    if arguments.model is not None:
        if any(sizes.values()):
            raise ValueError("model: not allowed with --hidden or --vocab")
        config = read_config(arguments.model)
        head = head_of(config)
        with suppress(ValueError):  # a body without attention has no estimate
            body = model_of(config)
    elif None in sizes.values():
        raise ValueError("model: expected a model, or both --hidden and --vocab")
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
    """Return the bytes of activations per token in the body below the head."""
    return activations(
        model,
        1,
        state=(call.weight_dtype or call.dtype).itemsize,
        inside=ADAPTED if call.frozen else TRAINED,
        width=call.dtype.itemsize,
    )


def _gemm_rate(call: Call, gpu: str | None, tflops: float | None) -> tuple[float | None, str]:
    """Return the TFLOP/s that GEMMs reach (None if unknown), and the source of the number."""
    if gpu is not None and tflops is not None:
        raise ValueError("gpu: not allowed with --tflops")
    if gpu is not None and call.device == "cpu":
        raise ValueError(f"gpu: expected a name only with --device cuda; got {gpu!r}")
    if tflops is not None:
        return tflops, "--tflops"
    if call.device == "cpu":
        return _cpu_rate(call)
    sheet = None if gpu is None else gpu_named(gpu)
    if sheet is None and torch.cuda.is_available():
        sheet = find_gpu(torch.cuda.get_device_name())
    if sheet is None:
        return None, "unknown: pass --gpu or --tflops"
    peak = sheet.tflops if call.is_narrow else sheet.tflops_fp32
    source = f"a guess, {_REACHED:.0%} of the {peak:g} TFLOP/s in the data sheet of {sheet.name}"
    return peak * _REACHED, source


def _cpu_rate(call: Call) -> tuple[float, str]:
    threads = torch.get_num_threads()
    rate, source = 0.05, "a guess"
    if "amx" in machine.native_isas()[:1]:  # measured: a Xeon with two threads
        rate = 0.9 if call.is_narrow else 0.2
        source = "measured on another CPU with amx"
    return rate * threads, f"{source}, for {threads} threads"


def _calls(call: Call, arguments: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    """Yield the calls to estimate, with their titles."""
    tile = arguments.max_workspace
    slots = arguments.bounded
    teacher = arguments.teacher
    if slots is not None and call.sums_dhidden:
        raise ValueError("bounded: not allowed with --shard")
    if not call.sums_dhidden:
        yield "eager, full logits", replace(call, name="eager")
        yield "TRL 1.16, chunked head", replace(call, name="trl")
    ours = [replace(call, name=name) for name in ("one_pass", "two_pass")]
    for one in ours:
        default = " (the default)" if one.name == call.default else ""
        keeps = "" if one.keeps in (None, "nothing") else f", keeps {one.keeps}"
        yield f"ours, {one.name}{default}{keeps}", one
    if call.may_keep_exponentials:
        title = "ours, one_pass, keeps exponentials (the default on H100, H200 and B200)"
        yield title, replace(call, name="exponentials")
    if tile is not None:
        options = replace(call.options, max_workspace_bytes=tile)
        yield f"ours, one_pass, {in_units(tile)} tile", replace(call, options=options)
    if teacher is not None:
        yield f"ours, divergence, teacher size {teacher:,}", replace(call, teacher=teacher)
    if slots is None:
        return
    for exact in (True,) if call.frozen else (True, False):
        options = replace(call.options, backward=Bounded(slots=slots, exact_weight=exact))
        how = "" if exact else ", exact_weight=False"
        for one in ours:
            yield f"ours, {one.name}, bounded{how}", replace(one, options=options)


def _line(
    title: str,
    call: Call,
    tflops: float | None,
    *,
    free: int | None,
    per_token: int,
) -> dict[str, Any]:
    """Return the answer for one call."""
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
        "largest_micro_batch_tokens": None if free is None else _largest(call, free, per_token),
    }


def _largest(call: Call, free: int, per_token: int) -> int:
    """Return how many tokens fit into ``free`` bytes, with ``per_token`` activation bytes each.

    Above ``activation_bytes`` nothing is kept, so more tokens may need less memory.
    """

    def at(tokens: int) -> Call:
        return replace(call, tokens=tokens)

    def needed(tokens: int) -> int:
        return total(at(tokens)) + tokens * per_token

    numbers = range(1, free + 1)  # a token needs more than a byte
    fitting = partial(bisect_right, numbers, free, key=needed)
    saving = bisect_left(numbers, True, key=lambda tokens: at(tokens).keeps in (None, "nothing"))
    most = fitting(lo=saving)
    return most if most > saving else fitting(hi=saving)
