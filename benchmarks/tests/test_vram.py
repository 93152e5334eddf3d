"""The tables of what fits: they are the planner's, and their formulas are those of real models."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.footprint import POLICIES, RANK, WAYS, Policy
from benchmarks.results import ROOT
from benchmarks.vram import (
    FEWEST,
    GIB,
    SLACK,
    STEP,
    VLLM,
    cells,
    largest,
    plan_words,
    printed,
    vram,
    vram_plan,
)
from grpo_kernels import LossConfig, TokenBatch
from grpo_kernels.tools.text import in_units
from grpo_trainer import GRPOConfig
from grpo_trainer.cli.arguments import RunArguments
from tests.support.documents import blocks, python_block, section
from tests.tools.test_plan import LiveBytes

GUIDE = (ROOT / "docs/guides/limited-vram.md").read_text()

GPUS = (24, 80)
LINES = [(gib, name, title) for gib in GPUS for name in POLICIES for title in WAYS]
SMALL = Policy("small", 4, 256, 1024, 512, 128, 0, False, 512)


def made(policy: Policy) -> Any:
    """Return the model of transformers with a policy's sizes."""
    of_2 = policy.name.startswith("Qwen2.5")
    kind, config = (Qwen2ForCausalLM, Qwen2Config) if of_2 else (Qwen3ForCausalLM, Qwen3Config)
    size = 64 if of_2 or policy is SMALL else 128
    settings = dict(
        vocab_size=policy.vocabulary,
        hidden_size=policy.hidden,
        intermediate_size=policy.inner,
        num_hidden_layers=policy.layers,
        num_attention_heads=policy.queries // size,
        num_key_value_heads=policy.keys // size,
        tie_word_embeddings=policy.tied,
    )
    return kind(config(**settings, **({} if of_2 else {"head_dim": size})))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_parameters_are_those_of_the_model(policy: Policy) -> None:
    with torch.device("meta"):
        model = made(policy)
    assert policy.parameters == sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize(("gib", "name", "title"), LINES)
def test_a_line_is_what_plan_prints_and_it_fits(gib: int, name: str, title: str) -> None:
    policy, way = POLICIES[name], WAYS[title]
    line, tokens = cells(policy, title, gib), largest(policy, way, gib)
    assert line[0] == in_units(way.states(policy))
    if not tokens:
        assert line[1].startswith("does not fit")
        tokens = FEWEST
    words = plan_words(policy, way, tokens, gib)
    facts = json.loads(printed([*words, "--json"]))
    [ours] = [x for x in facts["implementations"] if x["implementation"] == facts["default"]]
    assert facts["memory_bytes"] == gib * GIB
    if line[1].startswith("does not fit"):
        assert ours["total_bytes"] + facts["reserved_bytes"] > gib * GIB
        return
    assert ours["total_bytes"] + facts["reserved_bytes"] <= gib * GIB
    assert ours["largest_micro_batch_tokens"] >= tokens
    [shown] = [x for x in printed(words).splitlines() if "(the default)" in x]
    assert line[4] in shown
    beside = int(line[2].split()[0].replace(",", "")) if line[2][0].isdigit() else 0
    assert beside < tokens
    more = plan_words(policy, way, tokens + STEP, gib)
    facts = json.loads(printed([*more, "--json"]))
    [ours] = [x for x in facts["implementations"] if x["implementation"] == facts["default"]]
    assert ours["largest_micro_batch_tokens"] < tokens + STEP


@pytest.mark.parametrize("title", ["full", "full, bf16", "LoRA"])
def test_activations_are_bounded_as_the_page_says(title: str) -> None:
    way = WAYS[title]
    model = made(SMALL)
    if not way.cast:
        model = model.bfloat16()
    if way.adapted:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=RANK, lora_dropout=0.05, target_modules="all-linear")
        model = peft.get_peft_model(model, config)
        model.enable_input_require_grads()
    body = model.get_base_model().model if way.adapted else model.model
    model.train()
    body.gradient_checkpointing_enable()

    def body_of(tokens: int) -> int:
        """Return the growth in a forward and backward."""
        ids = torch.randint(0, SMALL.vocabulary, (1, tokens))
        there = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        with LiveBytes(*there) as live:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = body(input_ids=ids, use_cache=False).last_hidden_state
            hidden.backward(torch.ones_like(hidden))
        return live.growth

    body_of(2)  # the gradients of parameters are there from now on
    few, many = 512, 1024
    measured = (body_of(many) - body_of(few)) / (many - few)
    assert 0.6 * way.per_token(SMALL) < measured <= way.per_token(SMALL), measured


def test_a_block_is_what_its_command_prints() -> None:
    shown = vram_plan("Qwen3-8B", "LoRA", 24)
    planned, _ = commands(shown)
    assert printed(planned[1:]) in shown
    assert vram(24).count("\n") == 1 + len(POLICIES) * len(WAYS)


def commands(text: str) -> list[list[str]]:
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line]


def test_the_guides_commands_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(SMALL).config.save_pretrained("path/to/model")
    planned = [words[1:] for words in commands(GUIDE) if words[0] == "grpo-kernels"]
    assert len(planned) == 3
    for words in planned:
        answer = "budget " if "--model" in words else "fits "
        assert printed(words).splitlines()[-1].startswith(answer)


def test_the_guides_loss_runs() -> None:
    ids = torch.randint(0, 50, (4, 5))
    names = {
        "hidden": torch.randn(4, 5, 16, requires_grad=True),
        "weight": torch.randn(50, 16, requires_grad=True),
        "batch": TokenBatch.from_padded(ids, torch.tensor([1.0, -1.0, 0.5, 0.0])),
        "config": LossConfig(),
    }
    exec(python_block(GUIDE, '"max_workspace_bytes"'), names)
    names["loss"].backward()
    assert names["hidden"].grad.any()


def test_the_guides_settings_exist() -> None:
    known = {item.name for kind in (GRPOConfig, RunArguments) for item in fields(kind)}
    [settings] = (yaml.safe_load(block) for block in blocks(GUIDE, "yaml"))
    assert set(settings) <= known
    rows = re.findall(r"^\| (`.*?) \|", section(GUIDE, "Settings that save memory"), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)} - {"zero3"}
    assert len(rows) == 14
    assert named - known == {"accelerate_config"}


def test_the_guides_assumptions_are_those_of_the_code() -> None:
    assert f"slack       = {in_units(SLACK)}" in GUIDE
    assert f"multiples of {STEP}, at least {FEWEST}" in GUIDE
    assert GRPOConfig.vllm_gpu_memory_utilization == VLLM
    assert f"vllm_gpu_memory_utilization: {VLLM}" in GUIDE
    assert f"rank {RANK} " in GUIDE
