"""The tables of what fits: they are the planner's, and their formulas are those of real models."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from docs.tables.vram import (
    POLICIES,
    RECIPES,
    lines,
    model_named,
    printed,
    recipe,
    vram,
    vram_longest,
    words_of,
)
from grpo_kernels import LossConfig, TokenBatch
from grpo_kernels.tools import cli
from grpo_kernels.tools.activations import TILE, activations, masks
from grpo_kernels.tools.memory import DEFAULT_SHARE, ENGINE_SLACK, GIB, SLACK, STEP, Run, missing
from grpo_kernels.tools.model import model_of
from grpo_kernels.tools.text import in_units
from grpo_kernels.tools.training import training
from grpo_trainer import GRPOConfig
from grpo_trainer.cli.arguments import RunArguments
from grpo_trainer.cli.train import build_trainer, parse
from grpo_trainer.demo.policy import make_tokenizer
from tests.support.documents import ROOT, blocks, python_block, section
from tests.tools.test_plan import LiveBytes

GUIDE = (ROOT / "docs/guides/limited-vram.md").read_text()
GPUS = (24, 80)

SIZES = dict(
    hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=16, vocab_size=512,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=256, intermediate_size=256)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"num_attention_heads": 4},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 64},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "mixtral": EXPERTS | {"num_local_experts": 8},
    "gpt_oss": EXPERTS | {"num_local_experts": 8},
}


def small_config(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))


@pytest.mark.parametrize("name", POLICIES)
def test_parameters_are_as_many_as_the_models_cards_say(name: str) -> None:
    assert round(model_named(name).parameters / 1e9, 1) == POLICIES[name]["billions"]


def fused(*args: Any, softcap: float | None = None, **settings: Any) -> Any:
    """Attend without scores, as on a GPU; some models have only eager attention on a CPU."""
    return sdpa_attention_forward(*args, **settings)


# torch's experts in bf16 take what is there on a GPU; in fp32 they are computed in another way
CASES = [
    (family, way)
    for family in FAMILIES
    for way in ("full", "bf16", "lora")
    if way != "full" or family not in ("mixtral", "gpt_oss")
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_activations_are_bounded_as_the_page_says(family: str, name: str) -> None:
    way, config = training(name), small_config(family)
    sizes = model_of(config)
    AttentionInterface.register("fused", fused)
    attention = "sdpa" if sizes.attention is None else "fused"
    dtype = torch.float32 if way.cast else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if way.rank:
        peft = pytest.importorskip("peft")
        modules = list(sizes.adapted) or "all-linear"
        adapter = peft.LoraConfig(r=way.rank, lora_dropout=0.05, target_modules=modules)
        model = peft.get_peft_model(model, adapter)
        model.enable_input_require_grads()
    body = model.get_base_model().model if way.rank else model.model
    model.train()
    body.gradient_checkpointing_enable()

    def body_of(tokens: int) -> int:
        """Return the growth in a forward and backward of one sequence."""
        ids = torch.randint(0, config.vocab_size, (1, tokens))
        there = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        with LiveBytes(*there) as live:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = body(input_ids=ids, use_cache=False).last_hidden_state
            hidden.backward(torch.ones_like(hidden))
        return live.growth

    def planned(tokens: int) -> int:
        taken = activations(sizes, tokens, state=way.state, inside=way.inside)
        return taken + masks(sizes, tokens, tokens)

    body_of(2)  # the gradients of parameters are there from now on
    few, many = 256, 512
    measured, most = body_of(many) - body_of(few), planned(many) - planned(few)
    assert 0.6 * most < measured <= most, measured / most


@pytest.mark.parametrize("gib", GPUS)
def test_a_line_is_what_fits_and_no_more(gib: int) -> None:
    shown = vram(gib)
    for line in lines(gib):
        for run in line.runs:
            assert f"{run.tokens:,}" in shown
            assert run.memory == gib * GIB and not missing(run)
            assert missing(replace(run, tokens=run.tokens + STEP))
    assert shown.count("\n") == 1 + len(list(lines(gib)))


def test_full_training_of_a_small_model_is_among_what_fits_24_gib() -> None:
    assert re.search(r"`Qwen3-1.7B` \| full, bf16 \| [\d.]+ GiB \| \d+,", vram(24))


def test_the_longest_sequence_is_longer_with_each_line() -> None:
    _, _, eager, trl, *ours = vram_longest().splitlines()
    columns = zip(
        *(re.findall(r"(\d+,\d+) ", line)[:2] for line in (eager, trl, *ours)), strict=True
    )
    for column in columns:
        tokens = [int(cell.replace(",", "")) for cell in column]
        assert tokens == sorted(tokens)


def run_file(folder: Path, settings: dict[str, Any], family: str) -> list[str]:
    """Write a run of a small model with settings; return the arguments of grpo-train."""
    tokenizer = make_tokenizer()
    config = small_config(family, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text('{"prompt": "1="}\n{"prompt": "2="}\n')
    own = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "prompts.jsonl"),
        "reward_funcs": ["think_format_reward"],
        "output_dir": str(folder / "out"),
        "use_cpu": True,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings | own))
    return ["--config", str(folder / "run.yaml")]


def of_the_tables() -> list[tuple[str, Run]]:
    """Return the runs of the tables, one for each set of settings, whatever its tokens."""
    runs = {}
    for gib in GPUS:
        for line in lines(gib):
            for run in line.runs:
                settings = run.settings() | {"max_tokens_per_micro_batch": 0}
                runs.setdefault((line.model, json.dumps(settings)), run)
    return [(model, run) for (model, _), run in runs.items()]


@pytest.mark.parametrize(("model", "run"), of_the_tables())
def test_the_trainer_takes_every_run_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, run: Run
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)  # offload needs a GPU
    settings, family = run.settings(), POLICIES[model]["config"]["model_type"]
    _, args = parse(run_file(tmp_path, settings, family))
    assert args.max_tokens_per_micro_batch == run.tokens
    # vLLM is not here; what it adds is checked with the arguments
    without_vllm = {name: value for name, value in settings.items() if "vllm" not in name}
    trainer = build_trainer(run_file(tmp_path, without_vllm, family))
    trainable = sum(x.numel() for x in trainer.model.parameters() if x.requires_grad)
    small = model_of(small_config(family, vocab_size=len(make_tokenizer())))
    assert trainable == run.training.trainable(small)


@pytest.mark.parametrize("gib", RECIPES)
def test_a_recipe_is_accepted_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)  # offload needs a GPU
    settings = recipe(gib)
    assert yaml.safe_dump(settings)
    shown = [yaml.safe_load(block) for block in blocks(GUIDE, "yaml")]
    assert settings in shown and len(settings) <= 14
    _, args = parse(run_file(tmp_path, settings, "qwen3"))
    assert args.use_vllm and args.max_tokens_per_micro_batch
    facts = json.loads(printed([*words_of(gib), "--json"]))
    assert facts["fits"] and facts["memory_bytes"] == gib * GIB
    assert facts["settings"].items() <= settings.items() and not facts["missing_bytes"]


def commands(text: str) -> list[list[str]]:
    rows = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(row) for row in rows if row]


def test_the_guides_commands_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, head = [words for words in commands(GUIDE) if words[0] == "grpo-kernels"]
    assert printed(answer[1:]).strip() in GUIDE and "It fits" in printed(answer[1:])
    monkeypatch.chdir(tmp_path)
    small_config("qwen3").save_pretrained("path/to/model")
    assert cli.main(head[1:]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("budget ")


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
    for block in blocks(GUIDE, "yaml"):
        assert set(yaml.safe_load(block)) <= known
    rows = re.findall(r"^\| (`.*?) \|", section(GUIDE, "Settings that save memory"), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)} - {"zero3"}
    assert len(rows) == 12
    assert named - known == {"accelerate_config"}


def test_the_guides_assumptions_are_those_of_the_code() -> None:
    own = f"{in_units(SLACK)}, and {in_units(ENGINE_SLACK)} in vLLM's share"
    assert f"slack                        {own}" in GUIDE
    assert f"mlp_tile_tokens: {TILE}" in GUIDE
    assert GRPOConfig.vllm_gpu_memory_utilization == DEFAULT_SHARE
    assert f"which gets {DEFAULT_SHARE} of the GPU" in GUIDE
    assert f"sequences of up to {Run.longest:,} tokens" in GUIDE
