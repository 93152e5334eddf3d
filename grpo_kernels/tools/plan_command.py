"""``grpo-kernels plan``: its arguments, its rates and its answer."""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.engine import Bounded, RunOptions
from grpo_kernels.tools import machine
from grpo_kernels.tools.estimate import Call
from grpo_kernels.tools.head_shape import DTYPES, SHARDS, HeadShape, Share, read_shard, whole
from grpo_kernels.tools.hub import read_config
from grpo_kernels.tools.text import aligned, byte_size, count, duration, in_units, positive

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
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
_OF_SHARE = ("by", "ranks", "sent_bytes", "notes")


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add those of the subcommand."""
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
        default=whole,
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
    device.add_argument("--gpu", help=f"for the time [the present device]: {machine.GPU_NAMES}")
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


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit code."""
    try:
        facts = _facts(arguments)
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        if name not in _OPTIONS:
            raise
        arguments.parser.error(f"argument {_OPTIONS[name]}: {message}")
    print(json.dumps(facts, indent=1) if arguments.json else "\n".join(_table(facts)))
    return 0


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the question and its answer as plain data."""
    head, tokens, device = _head(arguments), arguments.tokens, arguments.device
    share: Share = arguments.shard(head, tokens)
    call = Call(
        name="one_pass",
        head=share.head,
        tokens=tokens,
        device=device,
        options=RunOptions(activation_bytes=arguments.activation_bytes),
        **share.of_call,
    )
    tflops, source = machine.gemm_rate(device, head.dtype, arguments.gpu, arguments.tflops)
    memory = arguments.gpu_memory
    if memory is None and device in machine.device_types():
        memory = machine.device_memory(device)
    free = None if memory is None else max(0, memory - arguments.reserved)
    return {
        "model": _name(arguments.model),
        "head": {key: _DTYPE_NAMES.get(value, value) for key, value in asdict(head).items()},
        "shard": {key: getattr(share, key) for key in _OF_SHARE} if share.by else None,
        "tokens": tokens,
        "device": device,
        "memory_bytes": memory,
        "reserved_bytes": arguments.reserved,
        "activation_bytes": arguments.activation_bytes,
        "slots": arguments.bounded,
        "default": call.default,
        "tflops": tflops,
        "tflops_source": source,
        "implementations": [
            _line(title, one, tflops, free) for title, one in _calls(arguments, call)
        ],
    }


def _calls(arguments: argparse.Namespace, call: Call) -> Iterator[tuple[str, Call]]:
    """Yield what is estimated, by title."""
    tile, slots, whole_rows = arguments.max_workspace, arguments.bounded, not call.sums_dhidden
    if slots is not None and not whole_rows:
        raise ValueError("bounded: not allowed with a part of the vocabulary")
    if whole_rows:
        yield "eager, full logits", replace(call, name="eager")
        yield "TRL 1.16, chunked head", replace(call, name="trl")
    ours = {name: replace(call, name=name) for name in ("one_pass", "two_pass")}
    for name, one in ours.items():
        yield f"ours, {name}" + (" (the default)" if name == call.default else ""), one
    if tile is not None:
        yield f"ours, one_pass, tile of {in_units(tile)}", call.with_(max_workspace_bytes=tile)
    if slots is not None:
        for how in ("", ", exact_weight=False")[: 2 - call.head.frozen]:
            bounded = Bounded(slots=slots, exact_weight=not how)
            for name, one in ours.items():
                yield f"ours, {name}, bounded{how}", one.with_(backward=bounded)


def _line(title: str, call: Call, tflops: float | None, free: int | None) -> dict[str, Any]:
    """Return the answer for one of them."""
    memory, keeps = call.memory, call.saving
    bounded = call.options.bounded is not None
    if call.name == "two_pass" and not bounded and keeps.nbytes:
        title += f", keeps {keeps.kind}"
    flop = keeps.gemms * 2.0 * call.tokens * call.head.size
    return {
        "title": title,
        "implementation": call.name,
        **{f"{key}_bytes": size for key, size in asdict(memory).items()},
        "total_bytes": memory.total,
        "gemms": keeps.gemms,
        "keeps": keeps.kind if call.name == "two_pass" or bounded else None,
        "seconds": flop / (tflops * 1e12) if tflops else None,
        "largest_micro_batch_tokens": None if free is None else _largest(call, free),
    }


def _largest(call: Call, free: int) -> int:
    """Return how many tokens fit into bytes, each of which takes more than one.

    Beyond a budget nothing is kept, so more tokens than that may take less.
    """

    def keeps_nothing(tokens: int) -> bool:
        return not replace(call, tokens=tokens).saving.nbytes

    def total(tokens: int) -> int:
        return replace(call, tokens=tokens).memory.total

    numbers = range(1, free + 1)
    saving = bisect_left(numbers, True, key=keeps_nothing)
    most = bisect_right(numbers, free, lo=saving, key=total)
    return most if most > saving else bisect_right(numbers, free, hi=saving, key=total)


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


def _table(facts: dict[str, Any]) -> list[str]:
    """Return the lines that say what was asked, the table, and what its columns are."""
    head, shard = facts["head"], facts["shard"]
    by = f", one of {shard['ranks']} ranks with {shard['by']}" if shard else ""
    notes = _notes(facts)
    titles = {"shards": "shards", "inputs": "inputs", "returned": "gradients", "extra": "extra"}
    titles = {name: title for name, title in titles.items() if title in notes} | {"total": "peak"}
    rows = [["", *titles.values(), "GEMMs", "time", "largest micro-batch"]]
    for line in facts["implementations"]:
        seconds, most = line["seconds"], line["largest_micro_batch_tokens"]
        time = "-" if seconds is None else duration(seconds)
        largest = "-" if most is None else f"{most:,} tokens" if most else "not one token"
        sizes = (in_units(line[f"{name}_bytes"]) for name in titles)
        rows.append([line["title"], *sizes, str(line["gemms"]), time, largest])
    return [
        f"{facts['model'] or 'A head'}: hidden size {head['hidden']:,}, vocabulary "
        f"{head['vocabulary']:,}{', softcap' if head['softcap'] else ''}; hidden states "
        f"{head['dtype']}, weight {head['weight_dtype']}{', frozen' if head['frozen'] else ''}",
        f"{facts['tokens']:,} tokens on {facts['device']}{by}",
        "An estimate from formulas, of the loss's forward and backward at the head.",
        "",
        *aligned(rows),
        "",
        *(f"{name:<11}{note}" for name, note in notes.items()),
    ]


def _notes(facts: dict[str, Any]) -> dict[str, str]:
    """Return what the columns are, by their titles, and what else there is to say."""
    memory, reserved, shard = facts["memory_bytes"], facts["reserved_bytes"], facts["shard"]
    largest = "--gpu-memory 24GiB: the largest micro-batch that fits"
    if memory is not None:
        taken = f"{in_units(reserved)} reserved" if reserved else "nothing reserved (--reserved)"
        largest = f"peak, and {taken} for all else in training, in {in_units(memory)}"
    rate = f"{facts['tflops']:.3g} TFLOP/s, " if facts["tflops"] else ""
    trained = "the hidden states: the head is frozen" if facts["head"]["frozen"] else "both"
    notes = shard["notes"] if shard else {"inputs": "hidden states and head weight"}
    notes = {
        **notes,
        "gradients": f"of {trained}",
        "extra": "what else is alive at the peak",
        "peak": "all of it, without the CUDA context and the libraries' workspaces",
        "time": f"of the GEMMs over the head alone; {rate}{facts['tflops_source']}",
    }
    notes["which"] = _which(facts)
    if facts["slots"] is not None:
        sparse = "beside the GEMM it takes sparse products, and rows that need more entries"
        notes["bounded"] = sparse
    notes["largest"] = largest
    if shard:
        sent = (f"{in_units(size)} {what}" for what, size in shard["sent_bytes"].items())
        notes["sent"] = "by a rank in a call: " + f"\n{'':<11}and ".join(sent)
    return notes


def _which(facts: dict[str, Any]) -> str:
    """Say when to take the schedule that is not the default."""
    default, others = facts["default"], ("one_pass", "two_pass")
    other = others[default == others[0]]
    lines = {line["implementation"]: line for line in reversed(facts["implementations"])}
    size = lines[other]["total_bytes"] - lines[default]["total_bytes"]
    gemms = lines[other]["gemms"] - lines[default]["gemms"]
    memory = f"{in_units(abs(size))} {'more' if size > 0 else 'less'}"
    if gemms < 0:  # and yet it is not the default
        return f"schedule={other!r} takes {memory}, and longer: it adds to an fp32 sum by chunk"
    work = ("no", "one", "two")[gemms] + " GEMM more"
    if size >= 0:
        return f"the default: schedule={other!r} takes {memory} and {work}"
    return f"the default for speed; schedule={other!r} takes {memory}, for {work}"
