"""The guides to other loops and trainers: their blocks run, both halves of a diff do the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.support.documents import ROOT, blocks

B, P, L, V, D = 4, 4, 5, 50, 16


def page(name: str) -> str:
    return (ROOT / "docs" / "guides" / f"{name}.md").read_text()


def halves(diff: str) -> tuple[str, str]:
    """Return the code before and after a diff."""
    lines = diff.splitlines()
    return tuple("\n".join(x[1:] for x in lines if x[:1] in sign) for sign in (" -", " +"))  # type: ignore[return-value]


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@pytest.fixture
def names() -> dict[str, Any]:
    """Return what the blocks of a loop of one's own take as given."""
    ids = torch.randint(0, V, (B, P + L), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([5, 3, 4, 5])
    mask = (torch.arange(L) < lengths[:, None]).long()
    model = make_model(0)
    with torch.no_grad():
        logits = model(ids).logits[:, P - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, ids[:, P:, None])[..., 0]
    moved = 0.3 * torch.randn(B, L, generator=torch.Generator().manual_seed(1))
    return {
        "torch": torch,
        "model": model,
        "reference": make_model(1),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "prompt_length": P,
        "completion_ids": ids[:, P:],
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.3]),
        "old_logprobs": own + moved,
    }


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the gradients, and take them from the model."""
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def run(code: str, names: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    exec(code, names)
    return names["loss"].detach(), gradients(names["model"])


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_loop_of_ones_own(
    names: dict[str, Any], group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the page from top to bottom: the loss stays that of the eager loop."""
    text = page("plain-loop")
    (diff,) = blocks(text, "diff")
    before, after = halves(diff)
    eager = run(before, names)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= eager[1].keys()
    torch.testing.assert_close(run(after, names), eager)
    assert names["metrics"]["clip_ratio/region_mean"] > 0
    old, new = names["old_logprobs"], blocks(text, "python")
    sampled, reference, packed, plan, accumulated, check, processes = _by_words(
        new,
        "old_logprobs = linear", "ref_logprobs = linear", "next_token_targets(", "print(explain(",
        "split(2)", "assert_close", "DistributedDataParallel(",
    )  # fmt: skip
    exec(sampled, names)
    exec(check, names)
    torch.testing.assert_close(names["old_logprobs"], names["theirs"])
    names["old_logprobs"] = old
    exec(reference, names)
    assert (names["ref_logprobs"] - names["theirs"]).abs().mean() > 0.1
    exec(packed, names | _packed())
    exec(plan, names)
    assert "schedule" in capsys.readouterr().out
    for code in (accumulated, processes):
        loss, found = run(code, names)
        torch.testing.assert_close(found, eager[1])
    torch.testing.assert_close(loss, eager[0])


def _by_words(found: list[str], *words: str) -> list[str]:
    """Return the blocks, each of which has one of these words."""
    assert len(found) == len(words)
    [each] = zip(*[[code for code in found if word in code] for word in words], strict=True)
    return list(each)


def _packed() -> dict[str, Any]:
    ids = torch.randint(0, V, (10,))
    return {
        "packed_ids": ids,
        "cu_seqlens": torch.tensor([0, 4, 10]),
        "packed_mask": torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 1]),
        "packed_advantages": torch.tensor([1.0, -1.0]),
        "packed_old": -torch.rand(10),
        "run_packed": lambda ids, cu_seqlens: torch.nn.Embedding(V, D)(ids),
    }
