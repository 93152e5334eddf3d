"""The output of ``grpo-kernels plan``: a table, and notes on its columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_kernels.tools.text import aligned, in_units


def table(facts: dict[str, Any]) -> list[str]:
    """Return the lines of the request, the table and the notes."""
    head = facts["head"]
    shard = facts["shard"]
    rows = [["", "inputs", "gradients", "extra", "peak", "GEMMs", "time", "largest micro-batch"]]
    for line in facts["implementations"]:
        seconds = line["seconds"]
        most = line["largest_micro_batch_tokens"]
        time = "-"
        if seconds is not None:
            time = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        sizes = (
            in_units(line[f"{name}_bytes"]) for name in ("inputs", "returned", "extra", "total")
        )
        rows.append([line["title"], *sizes, str(line["gemms"]), time, _largest(facts, most)])
    by = f", one of {shard['ranks']} ranks with {shard['by']}" if shard else ""
    return [
        f"{facts['model'] or 'A head'}: hidden size {head['hidden']:,}, vocabulary "
        f"{head['vocabulary']:,}{', softcap' if head['softcap'] else ''}; hidden states "
        f"{head['dtype']}, weight {head['weight_dtype']}{', frozen' if head['frozen'] else ''}",
        f"{facts['tokens']:,} tokens on {facts['device']}{by}",
        "Estimated by formulas, for the forward and backward of the loss at the head.",
        "",
        *aligned(rows),
        "",
        *(f"{name:<11}{note}" for name, note in _notes(facts)),
    ]


def _largest(facts: dict[str, Any], most: int | None) -> str:
    """Say how many tokens fit: at most the requested ones if their activations are reserved."""
    if most is None:
        return "-"
    if most >= facts["tokens"] and not facts["body_bytes_per_token"]:
        return "fits"
    return f"{most:,} tokens" if most else "not one token"


def _notes(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield notes on the columns, by their titles, and the conclusions."""
    memory = facts["memory_bytes"]
    reserved = facts["reserved_bytes"]
    shard = facts["shard"]
    part = f"{shard['rows']:,} rows of the " if shard else ""
    yield "inputs", f"hidden states and {part}head weight"
    frozen = facts["head"]["frozen"]
    yield "gradients", f"of {'the hidden states: the head is frozen' if frozen else 'both'}"
    yield "extra", "other memory in use at the peak"
    yield "peak", "the sum, without the CUDA context and the libraries' workspaces"
    rate = f"{facts['tflops']:.3g} TFLOP/s, " if facts["tflops"] else ""
    yield "time", f"of the head's GEMMs only; {rate}{facts['tflops_source']}"
    if facts["slots"] is not None:
        entries = "memory if every row exceeds its entries, time if none does;"
        yield "bounded", f"{entries} without the sparse products"
    largest = "pass --gpu-memory, such as 24GiB, to see the largest micro-batch that fits"
    per_token = facts["body_bytes_per_token"]
    tokens = facts["tokens"]
    if memory is not None:
        taken = f"{in_units(reserved)} reserved" if reserved else "nothing reserved (--reserved)"
        body = f", and {in_units(per_token)} of activations per token" if per_token else ""
        largest = f"peak, with {taken} for the rest of training{body}, within {in_units(memory)}"
    yield "largest", largest
    if per_token:
        whole = "pass --train full, bf16, lora or qlora to see if it fits, and what to set"
        yield "whole run", whole
    ours = next(x for x in facts["implementations"] if x["implementation"] == facts["default"])
    most = ours["largest_micro_batch_tokens"]
    provided = "" if per_token else ", if --reserved includes their activations"
    if most and (per_token or most < tokens):
        other = f"; {tokens:,} tokens do not fit" if most < tokens else ""
        yield "budget", f"set the trainer's max_tokens_per_micro_batch = {most}{provided}{other}"
    elif most:
        yield "fits", f"{tokens:,} tokens{provided}"
    if shard:
        sent = (f"{in_units(size)} {what}" for what, size in shard["sent_bytes"].items())
        yield "sent", "by each rank in a call: " + f"\n{'':<11}and ".join(sent)
