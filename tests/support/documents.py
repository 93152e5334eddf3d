"""README and the pages of docs, wherever in them something stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def block(text: str, language: str, mentioning: str) -> str:
    """Return the one block of code that has these words."""
    (found,) = [block for block in blocks(text, language) if mentioning in block]
    return found


def python_block(text: str, mentioning: str) -> str:
    return block(text, "python", mentioning)


def with_settings(code: str, settings: str) -> str:
    """Return code with other settings in place of its ``output_dir``."""
    made, found = re.subn(r'output_dir="out-[\w-]+"', settings, code)
    assert found == 1, code
    return made


def run_block(
    text: str, mentioning: str, settings: str | None = None, **names: Any
) -> dict[str, Any]:
    """Run the one block of Python that has these words; return the names that it has then."""
    source = python_block(text, mentioning)
    exec(source if settings is None else with_settings(source, settings), names)
    return names


def section(text: str, title: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    marks, _, rest = re.split(rf"^(#+) ({re.escape(title)})$", text, maxsplit=1, flags=re.M)[1:]
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, maxsplit=1, flags=re.M)[0]


def code(text: str) -> set[str]:
    """Return the words that stand between backticks."""
    return set(re.findall(r"`(\w+)`", text))


B, P, L, V, D = 4, 4, 5, 50, 16  # completions, tokens of a prompt and of a completion, sizes


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def batch_names() -> dict[str, Any]:
    """Return a model and a batch of completions by the names that the pages have for them."""
    ids = torch.randint(0, V, (B, P + L), generator=torch.Generator().manual_seed(0))
    model = make_model(0)
    with torch.no_grad():
        logits = model(ids).logits[:, P - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, ids[:, P:, None])[..., 0]
    return {
        "torch": torch,
        "model": model,
        "reference": make_model(1),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "prompt_length": P,
        "completion_ids": ids[:, P:],
        "completion_mask": (torch.arange(L) < torch.tensor([5, 3, 4, 5])[:, None]).long(),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0]),
        "old_logprobs": own + 0.3 * torch.randn(B, L),
    }
