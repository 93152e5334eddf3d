"""Which runs fit on a GPU, from ``grpo-kernels plan``: for limited-vram.md and choosing.md."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from transformers import AutoConfig

from benchmarks import text
from grpo_kernels.tools.activations import ADAPTED, TRAINED
from grpo_kernels.tools.cli import main
from grpo_kernels.tools.memory import GIB, Engine, Run, largest
from grpo_kernels.tools.model import Model, model_of
from grpo_kernels.tools.plan_run import yaml_lines
from grpo_kernels.tools.training import training

POLICIES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("policies.yaml").read_text())
TRAININGS = {
    "full": training("full"),
    "full, 8-bit states": training("full").eight_bit(),
    "full, bf16": training("bf16"),
    "LoRA": training("lora"),
    "QLoRA": training("qlora"),
}
# rows of the tables, if they fit
SHOWN = {
    "Qwen3-1.7B": ("full", "full, 8-bit states", "full, bf16", "LoRA"),
    "gemma-3-1b": ("full", "full, bf16", "LoRA"),
    "Mistral-7B-v0.3": ("LoRA", "QLoRA"),
    "Llama-3.1-8B": ("full, bf16", "LoRA", "QLoRA"),
    "Qwen3-30B-A3B": ("LoRA",),
}
FEWEST = 1024  # tokens; runs with fewer are not shown
CHOSEN = 8192  # tokens that a recommended run must fit
# engines on the policy's GPU, best first
ENGINES = {
    "": Engine(place="colocate"),
    ", asleep": Engine(place="colocate", sleeps=True),
    ", asleep, fp8": Engine(place="colocate", sleeps=True, weights="fp8"),
}
# each recipe's arguments, by GiB
RECIPES = {
    16: "Qwen3-1.7B --train lora --tokens 8192 --engine colocate",
    24: "Llama-3.1-8B --train qlora --tokens 8192 --engine colocate",
    48: "Llama-3.1-8B --train lora --tokens 16384 --engine colocate",
    80: "Qwen3-1.7B --train full --tokens 32768 --engine colocate",
}
_OF_A_TASK = {"dataset_name": "prompts.jsonl", "reward_funcs": ["accuracy_reward"]}
_BY_TRL = {"eager": 28672, "trl": 114688}  # as TRL 1.15 published, on 79 GiB


@dataclass(frozen=True)
class Line:
    """A row of the tables: a run per column, each with as many tokens as fit."""

    model: str
    plain: Run
    offloaded: Run
    tiled: Run | None
    with_vllm: Run | None
    engine: str  # a key of ENGINES

    @property
    def runs(self) -> list[Run]:
        """All runs in the row."""
        return [
            x for x in (self.plain, self.offloaded, self.tiled, self.with_vllm) if x is not None
        ]


@cache
def model_named(name: str) -> Model:
    return model_of(AutoConfig.for_model(**POLICIES[name]["config"]))


def lines(gib: int) -> Iterator[Line]:
    """Yield the rows that fit on a GPU with ``gib`` GiB."""
    for name, ways in SHOWN.items():
        for way in ways:
            line = _line(name, way, gib)
            if line is not None:
                yield line


@cache
def _line(name: str, way: str, gib: int) -> Line | None:
    model = model_named(name)
    plain = Run(model=model, memory=gib * GIB, tokens=1, training=TRAININGS[way])
    filled = _filled(plain)
    offloaded = _filled(replace(plain, offload=True))
    if filled is None or offloaded is None:
        return None
    can_tile = all(layer.tiled for layer in model.layers)
    tiled = _filled(replace(plain, offload=True, tiled=True)) if can_tile else None
    engines = ((title, _filled(replace(plain, engine=one))) for title, one in ENGINES.items())
    title, with_vllm = next((pair for pair in engines if pair[1] is not None), ("", None))
    return Line(name, filled, offloaded, tiled, with_vllm, title)


def _filled(run: Run) -> Run | None:
    """Return the run with as many tokens as fit; None for fewer than FEWEST."""
    tokens = largest(run)
    return replace(run, tokens=tokens) if tokens >= FEWEST else None


def vram(gib: int) -> str:
    """Write which runs fit on a GPU with ``gib`` GiB, by model and training method."""
    rows = []
    for line in lines(gib):
        run, engine = line.plain, line.engine
        most = "no room" if line.with_vllm is None else f"{line.with_vllm.tokens:,}{engine}"
        heads = [replace(run, implementation=name) for name in (None, "two_pass", "trl")]
        rows.append({
            "model": f"`{line.model}`",
            "training": run.training.title,
            "states": _gib(_states(run)),
            "tokens": f"{run.tokens:,}",
            "offload": f"{line.offloaded.tokens:,}",
            "offload, tiles": "-" if line.tiled is None else f"{line.tiled.tokens:,}",
            "next to vLLM": most,
            "LM head, GiB: ours / `two_pass` / TRL": " / ".join(
                f"{head.head_bytes() / GIB:.1f}" for head in heads
            ),
        })  # fmt: skip
    return text.markdown(rows)


def vram_choices(*sizes: int) -> str:
    """Write the first way to train each model that fits into each GPU, best next to vLLM."""
    rows = []
    for name, ways in SHOWN.items():
        row = {"model": f"`{name}`"}
        for gib in sizes:
            found = [line for way in ways if (line := _line(name, way, gib))]
            row[f"{gib}-GiB GPU"] = _first_choice(found)
        rows.append(row)
    return text.markdown(rows)


def _first_choice(found: list[Line]) -> str:
    for line in found:
        if line.with_vllm is not None and line.with_vllm.tokens >= CHOSEN:
            return f"{line.plain.training.title}; colocated vLLM{line.engine}"
    for line in found:
        if line.plain.tokens >= CHOSEN:
            return f"{line.plain.training.title}; vLLM on another GPU"
    return "-"


def vram_longest() -> str:
    """Write the longest sequence of gemma-3-1b, trained in bf16, by head and by GPU."""
    kinds: dict[str, dict[str, Any]] = {
        "eager, full logits": {"implementation": "eager"},
        "TRL, chunked": {"implementation": "trl"},
        "ours": {},
        "ours, offload": {"offload": True},
        "ours, offload, tiles": {"offload": True, "tiled": True},
        "ours, offload, tiles, no masks": {"offload": True, "tiled": True},
    }
    rows = []
    for title, changes in kinds.items():
        row = {"LM head and loss": title}
        for gib in (24, 80):
            model = model_named("gemma-3-1b")
            attention = "flash_attention_2" if title.endswith("no masks") else model.attention
            run = Run(
                model=replace(model, attention=attention),
                memory=gib * GIB,
                tokens=1,
                training=training("bf16"),
                **changes,
            )
            row[f"{gib} GiB"] = f"{largest(run, one_sequence=True):,}"
        measured = _BY_TRL.get(changes.get("implementation", ""))
        rows.append(row | {"published by TRL, on 79 GiB": f"{measured:,}" if measured else ""})
    return text.markdown(rows)


def vram_rules() -> str:
    """Write the bytes that the planner counts, by training method."""
    rows = []
    for title, way in TRAININGS.items():
        settings = ", ".join(f"`{line}`" for line in yaml_lines(way.settings) if way.settings)
        rows.append({
            "training": title,
            "linear weight": f"{way.linear + way.cast:.4g}",
            "other weight": f"{way.weight:.4g}",
            "gradient": f"{way.trained:.4g}",
            "states": f"{way.moments:.4g}",
            "between layers": f"{way.state:.4g}",
            "settings": settings or "the defaults",
        })  # fmt: skip
    return text.markdown(rows)


def vram_layer() -> str:
    """Write the bytes of a layer's activations, by tensor."""
    return text.markdown([
        {
            "training": title,
            "hidden states": str(inside.hidden),
            "queries": str(inside.queries),
            "MLP": str(inside.inner),
            "each norm after two": str(inside.norm),
            "each expert": str(inside.routed),
        }
        for title, inside in (("full", TRAINED), ("LoRA, QLoRA", ADAPTED))
    ])  # fmt: skip


def vram_answer(gib: int) -> str:
    """Write a recipe's command and its output."""
    words = words_of(gib)
    return f"```bash\ngrpo-kernels {' '.join(words)}\n```\n\n```text\n{printed(words)}```"


def vram_recipe(gib: int) -> str:
    """Write a run file that fits, as printed by the planner."""
    return "```yaml\n" + "\n".join(yaml_lines(recipe(gib))) + "\n```"


def recipe(gib: int) -> dict[str, Any]:
    """Return a GPU's recipe: the planner's settings plus those of a task."""
    settings = yaml.safe_load(_block(printed(words_of(gib))))
    name = {"model_name_or_path": settings.pop("model_name_or_path")}
    return name | _OF_A_TASK | settings


def words_of(gib: int) -> list[str]:
    return f"plan --model path/to/{RECIPES[gib]} --gpu-memory {gib}GiB".split()


def _block(shown: str) -> str:
    """Return the run file from the planner's output."""
    blocks = (part for part in shown.split("\n\n") if part.startswith("model_name_or_path"))
    return next(blocks)


def printed(words: list[str]) -> str:
    """Return the output of ``grpo-kernels`` with one of POLICIES at path/to/NAME."""
    [model] = [Path(word) for word in words if word.startswith("path/to/")]
    config = AutoConfig.for_model(**POLICIES[model.name]["config"])
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(io.StringIO()) as shown:
        config.save_pretrained(model)
        assert main(words) == 0
    return shown.getvalue()


def _states(run: Run) -> int:
    way, model = run.training, run.model
    return way.weights(model) + way.gradients(model) + way.optimizer(model)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
