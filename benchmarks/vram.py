"""What fits into a GPU, by ``grpo-kernels plan``: the blocks of docs/guides/limited-vram.md."""

from __future__ import annotations

import io
import json
import math
import textwrap
from bisect import bisect_left
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from benchmarks import text
from benchmarks.footprint import POLICIES, WAYS, Policy, Way
from grpo_kernels.tools.call import Call
from grpo_kernels.tools.cli import main
from grpo_kernels.tools.estimate import total
from grpo_kernels.tools.text import byte_size, in_units

GIB = 1 << 30
SLACK = 2 * GIB  # the CUDA context, workspaces of libraries, what the allocator cannot use
STEP, FEWEST, MOST = 256, 1024, 1 << 20  # tokens of a micro-batch: their multiples, from, to
VLLM = 0.3  # the trainer's vllm_gpu_memory_utilization
_TITLES = ["model", "training", "states", "micro-batch", "beside vLLM", "activations"]
_HEADS = ["head: ours", "two passes", "TRL", "eager"]


def vram(gib: int) -> str:
    """Write what fits into a GPU of so many GiB, by model and way to train."""
    rows = [[*_TITLES, *_HEADS]]
    for policy in POLICIES.values():
        rows += [[f"`{policy.name}`", title, *cells(policy, title, gib)] for title in WAYS]
    return text.markdown(rows)


def vram_plan(name: str, title: str, gib: int) -> str:
    """Write the commands of a line of the table, and what the planner's prints."""
    policy, way = POLICIES[name], WAYS[title]
    tokens = largest(policy, way, gib)
    words = plan_words(policy, way, tokens, gib)
    train = f"--config run.yaml {way.settings} --max_tokens_per_micro_batch {tokens}"
    lines = [
        textwrap.fill(line, 100, break_on_hyphens=False).replace("\n", " \\\n    ")
        for line in (f"grpo-kernels {' '.join(words)}", f"grpo-train {train}")
    ]
    return "```bash\n{}\n{}\n```\n\n```text\n{}```".format(*lines, printed(words))


def cells(policy: Policy, title: str, gib: int) -> list[str]:
    """Return a line of the table, after its title."""
    way, states = WAYS[title], in_units(WAYS[title].states(policy))
    tokens = largest(policy, way, gib)
    if not tokens:
        gpus = f"; FSDP2: at least {fewest_gpus(policy, way, gib)} GPUs" if way.cast else ""
        return [states, f"does not fit{gpus}", *[""] * 6]
    room = VLLM * gib * GIB > 2 * policy.parameters + SLACK  # for its weights in bf16
    beside = largest(policy, way, gib, VLLM) if room else 0
    facts = json.loads(printed([*plan_words(policy, way, tokens, gib), "--json"]))
    peaks = {x["implementation"]: in_units(x["total_bytes"]) for x in facts["implementations"]}
    return [
        states,
        f"{tokens:,} tokens",
        f"{beside:,} tokens" if beside else "no room",
        in_units(tokens * way.per_token(policy)),
        *(peaks[name] for name in (facts["default"], "two_pass", "trl", "eager")),
    ]


def printed(words: list[str]) -> str:
    """Return what ``grpo-kernels`` prints for arguments."""
    with redirect_stdout(io.StringIO()) as shown:
        assert main(words) == 0
    return shown.getvalue()


def plan_words(policy: Policy, way: Way, tokens: int, gib: int) -> list[str]:
    """Return the arguments that ask the planner for a line."""
    words = f"plan --hidden {policy.hidden} --vocab {policy.vocabulary} --tokens {tokens}"
    words += f" --gpu-memory {gib}GiB --reserved {_reserved(policy, way, tokens)}"
    words += " --frozen-head" * way.adapted + " --weight-dtype fp32" * bool(way.cast)
    return words.split()


def _reserved(policy: Policy, way: Way, tokens: int) -> str:
    taken = SLACK + way.states(policy) + tokens * way.per_token(policy)
    return f"{math.ceil(100 * taken / GIB) / 100:.2f}GiB"


def largest(policy: Policy, way: Way, gib: int, share: float = 0.0) -> int:
    """Return the most tokens that fit beside a share of the memory; 0 for less than ``FEWEST``."""

    def exceeds(tokens: int) -> bool:
        reserved = byte_size(_reserved(policy, way, tokens))
        return reserved + _head(policy, way, tokens) > (1 - share) * gib * GIB

    numbers = range(FEWEST, MOST, STEP)
    found = bisect_left(numbers, True, key=exceeds)
    return numbers[found - 1] if found else 0


def _head(policy: Policy, way: Way, tokens: int, cast: bool = True) -> int:
    """Return the planner's peak of our default."""
    call = Call(
        name="one_pass",
        hidden=policy.hidden,
        vocabulary=policy.vocabulary,
        tokens=tokens,
        weight_dtype=torch.float32 if way.cast and cast else None,
        frozen=way.adapted,
    )
    return total(replace(call, name=call.default))


def fewest_gpus(policy: Policy, way: Way, gib: int) -> int:
    """Return how many GPUs hold all states in shards, beside the smallest micro-batch of each."""
    whole = _head(policy, way, FEWEST, cast=False) + FEWEST * way.per_token(policy) + SLACK
    head = policy.head * (way.head + way.gradient)
    shards = way.states(policy) + head - policy.body * way.cast  # autocast copies a layer at a time
    return math.ceil(shards / (gib * GIB - whole))
