"""``grpo-kernels plan --train``: whether a run fits, and settings with which it does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from grpo_kernels.tools import machine
from grpo_kernels.tools.chart import bars
from grpo_kernels.tools.gpus import gpu_named
from grpo_kernels.tools.hub import loaded_from, name_of, read_config
from grpo_kernels.tools.memory import ENGINE_WEIGHTS, ENGINES, Engine, Run, moments
from grpo_kernels.tools.model import model_of
from grpo_kernels.tools.search import Answer, answer
from grpo_kernels.tools.text import count, in_units, share
from grpo_kernels.tools.training import WAYS, training

_PLACES = {
    "none": "generation not counted",
    "colocate": "with colocated vLLM",
    "server": "with vLLM on another GPU",
    "transformers": "with generation by transformers",
}
_NEVER = 1 << 20  # line width in characters, so that lines never break
# options for the table of heads; with --train the run decides them
_OF_THE_HEAD = (
    "hidden",
    "vocab",
    "dtype",
    "weight_dtype",
    "frozen_head",
    "shard",
    "reserved",
    "max_workspace",
    "tflops",
    "activation_bytes",
    "bounded",
    "teacher",
)
_OF_COLOCATED = ["engine_share", "engine_weights", "engine_sleeps"]


def add_run_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the options of a whole run."""
    add = plan.add_argument_group("a whole run: find settings with which it fits").add_argument
    add("--train", choices=WAYS, help="what to train; without it, only the head is planned")
    add("--lora-rank", type=count, help="rank of lora and qlora, on all linear layers [16]")
    add(
        "--longest",
        type=count,
        help="tokens of the longest sequence, for attention masks [4096]",
    )
    add("--engine", choices=ENGINES, help="what generates [none: nothing on this GPU]")
    add("--engine-share", type=share, help="vllm_gpu_memory_utilization [0.3, or what it needs]")
    add("--engine-weights", choices=ENGINE_WEIGHTS, help="weights of a colocated vLLM [bf16]")
    add("--engine-sleeps", action="store_true", help="vllm_enable_sleep_mode is on")
    add("--reference", action="store_true", help="add a reference model, for beta above 0")


def check_run_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError for head options next to run options, and for options without effect."""
    with_adapter = arguments.train in ("lora", "qlora")
    whole = arguments.train is not None
    colocated = arguments.engine == "colocate"
    _check_absent(arguments, ["lora_rank"], unless=with_adapter, needs="--train lora or qlora")
    _check_absent(arguments, ["longest", "engine", "reference"], unless=whole, needs="--train")
    _check_absent(arguments, _OF_COLOCATED, unless=colocated, needs="--engine colocate")
    if not whole:
        return
    for name in _OF_THE_HEAD:
        if getattr(arguments, name) not in (None, False, 0):
            raise ValueError(f"{name}: not allowed with --train, which decides it")
    if arguments.model is None:
        raise ValueError("model: expected a model with --train")
    if (arguments.longest or 0) > arguments.tokens:
        raise ValueError(
            f"longest: expected at most --tokens = {arguments.tokens} (a micro-batch holds whole "
            f"sequences); got {arguments.longest}"
        )
    if arguments.device != "cuda":
        raise ValueError(f"device: expected cuda with --train; got {arguments.device!r}")
    if arguments.gpu is not None and arguments.gpu_memory is not None:
        raise ValueError("gpu: not allowed with --gpu-memory and --train")


def _check_absent(
    arguments: argparse.Namespace, names: list[str], *, unless: bool, needs: str
) -> None:
    for name in names:
        if getattr(arguments, name) and not unless:
            raise ValueError(f"{name}: expected only with {needs}")


def run_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request and its answer as plain data."""
    run = Run(
        model=model_of(read_config(arguments.model)),
        memory=_memory(arguments),
        tokens=arguments.tokens,
        longest=arguments.longest or Run.longest,
        training=training(arguments.train, arguments.lora_rank or 16),
        engine=Engine(
            place=arguments.engine or "none",
            share=arguments.engine_share,
            weights=arguments.engine_weights or "bf16",
            sleeps=arguments.engine_sleeps,
        ),
        reference=arguments.reference,
    )
    if run.merges_into_rounded:
        raise ValueError(
            "train: expected full, bf16 or lora for a model with images and vLLM, which needs the "
            "adapter merged: it can't be merged into 4-bit weights; got 'qlora', which works with "
            "--engine transformers"
        )
    return facts_of(answer(run), arguments.model)


def _memory(arguments: argparse.Namespace) -> int:
    if arguments.gpu is not None:
        return gpu_named(arguments.gpu).gib << 30
    if arguments.gpu_memory is not None:
        return arguments.gpu_memory
    if "cuda" not in machine.device_types():
        raise ValueError(
            "gpu_memory: expected a size such as 24GiB, or --gpu: this machine has no GPU"
        )
    return machine.device_memory("cuda")


def facts_of(result: Answer, model: str) -> dict[str, Any]:
    """Return an answer as plain data."""
    run = result.run
    sizes = result.run.model
    settings = {"model_name_or_path": loaded_from(model)} | run.settings()
    return {
        "model": name_of(model),
        "parameters": sizes.parameters,
        "trained_parameters": run.training.trainable(sizes),
        "quantized": sizes.quantized,
        "tokens": run.tokens,
        "memory_bytes": run.memory,
        "train": result.asked.training.title,
        "engine": result.asked.engine.place,
        "fits": not result.missing,
        "missing_bytes": result.missing,
        "worst": min(moments(run), key=lambda moment: moment.free).name,
        "changes": [{"change": x.title, "costs": x.cost} for x in result.changes],
        "settings": settings,
        "two_pass_saves_bytes": _saved_by_two_passes(run),
        "moments": [
            {"name": x.name, "limit_bytes": x.limit, "parts_bytes": x.parts} for x in moments(run)
        ],
        "main_memory_bytes": run.host_bytes(),
        "cached_bytes_per_token": 2 * sizes.cached,
    }


def _saved_by_two_passes(run: Run) -> int:
    return max(0, run.head_bytes() - replace(run, two_pass=True).head_bytes())


def run_lines(facts: dict[str, Any]) -> list[str]:
    """Return the printed lines: whether the run fits, what to set, where the memory goes."""
    changes = [f"  * {x['change']} (costs: {x['costs']})" for x in facts["changes"]]
    return [
        f"{facts['model']}: {facts['parameters'] / 1e9:.3g} billion parameters; {facts['train']}, "
        f"{_PLACES[facts['engine']]}",
        f"{facts['tokens']:,} tokens per micro-batch, {in_units(facts['memory_bytes'])} of memory",
        "",
        _verdict(facts),
        *changes,
        "",
        *([*yaml_lines(facts["settings"]), ""] if facts["fits"] else ()),
        *_charts(facts),
        *_notes(facts),
        "Estimated by formulas: see docs/guides/limited-vram.md",
    ]


def _verdict(facts: dict[str, Any]) -> str:
    changes = len(facts["changes"])
    lacks = in_units(facts["missing_bytes"])
    if facts["fits"]:
        return "It fits as it is:" if not changes else f"It fits with {_numbered(changes)}:"
    near = f"with {_numbered(changes)}" if changes else "as it is"
    end = ":" if changes else "."
    return f"It does not fit. The closest, {near}, lacks {lacks} ({facts['worst']}){end}"


def _numbered(changes: int) -> str:
    return f"{changes} change{'s' if changes > 1 else ''}"


def yaml_lines(settings: dict[str, Any]) -> list[str]:
    """Return settings as lines of a run file."""
    import yaml  # a dependency of transformers

    def written(value: Any) -> str:
        line = yaml.safe_dump(value, default_flow_style=True, width=_NEVER)
        return line.removesuffix("...\n").rstrip()

    return [f"{name}: {written(value)}" for name, value in settings.items()]


def _charts(facts: dict[str, Any]) -> Iterator[str]:
    for moment in facts["moments"]:
        parts = moment["parts_bytes"]
        limit = moment["limit_bytes"]
        if moment["name"] == "vLLM's share" and sum(parts.values()) <= limit:
            continue
        yield f"{moment['name']}, {in_units(limit)}"
        yield from bars(parts, limit)
        yield ""


def _notes(facts: dict[str, Any]) -> Iterator[str]:
    """Yield notes: what is not counted, main memory, two passes, and cached tokens."""
    if facts["quantized"]:
        yield f"The files are quantized by {facts['quantized']}; this is for full precision."
    if facts["main_memory_bytes"]:
        yield f"Hidden states use {in_units(facts['main_memory_bytes'])} of pinned main memory."
    if saved := facts["two_pass_saves_bytes"]:
        yield f"schedule: two_pass saves {in_units(saved)} at the LM head, for one more GEMM."
    per_token = facts["cached_bytes_per_token"]
    first = facts["moments"][0]
    if facts["engine"] == "transformers":
        parts = first["parts_bytes"]
        gone = ("gradients", "activations", "attention masks", "LM head and loss")
        free = first["limit_bytes"] - sum(size for name, size in parts.items() if name not in gone)
        tokens = max(0, free) // per_token
        yield f"Room to generate {tokens:,} tokens at once, prompts included."
    for moment in facts["moments"]:
        cache = moment["parts_bytes"].get("engine KV cache")
        if cache is not None and facts["fits"]:
            yield f"The engine caches about {cache // per_token:,} tokens."
            return
