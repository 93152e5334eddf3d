"""The README's Python blocks run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_kernels.losses import LOSSES
from grpo_trainer.demo.policy import write_policy

README = (Path(__file__).parent.parent / "README.md").read_text()


def python_block(mentioning: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (block,) = [block for block in blocks if mentioning in block]
    return block


def test_loss_in_an_own_loop() -> None:
    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    input_ids = torch.randint(0, 50, (4, 9))
    names: dict[str, Any] = {
        "model": model,
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "prompt_length": 4,
        "completion_ids": input_ids[:, 4:],
        "completion_mask": torch.ones(4, 5),
        "advantages": torch.randn(4),
        "old_logprobs": -torch.rand(4, 5),
        "ref_logprobs": -torch.rand(4, 5),
    }
    exec(python_block("FusedLinearGRPOLoss("), names)
    assert names["loss"].isfinite()
    assert names["metrics"]["kl"].isfinite()
    assert all(p.grad is not None for p in model.parameters())


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_policy(tmp_path / "path" / "to" / "model", seed=0)
    rows = [{"prompt": f"{n:03d}="} for n in range(100, 116)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    block = python_block("GRPOTrainer(").replace(
        'output_dir="out"',
        'output_dir="out", max_steps=1, max_completion_length=4, use_cpu=True, report_to="none"',
    )
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["trainer"].state.global_step == 1


def test_table_of_losses_is_the_registry() -> None:
    table = README.partition("## Which losses")[2].partition("\nAny of them")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row[:20])}
    assert listed - {"loss_type"} == set(LOSSES)
