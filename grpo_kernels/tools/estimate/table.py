"""The answer of ``grpo-kernels plan`` as text."""

from __future__ import annotations

from typing import Any

from grpo_kernels.tools.text import aligned, duration, in_units


def table(facts: dict[str, Any]) -> list[str]:
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
