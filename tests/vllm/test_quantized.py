"""QLoRA with vLLM, whose base is not the policy's, and weights that vLLM quantizes itself."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_trainer import GRPOTrainer
from grpo_trainer.cli.train import build_trainer
from grpo_trainer.demo.task import digits_reversal_reward
from tests.vllm.vllm_helpers import (
    CLOSE,
    CLOSE_IN_BF16,
    ENGINE,
    GROUPS,
    LORA,
    NF4,
    PROMPTS,
    adapted,
    apart,
    bytes_of,
    change,
    difference,
    quantized,
    worst_mismatch,
)


def test_the_base_is_that_of_the_folder(make_sampler, original):
    """vLLM's log-probabilities are those of the adapter on weights that are not rounded."""
    policy = adapted(quantized(original))
    sampler = make_sampler(policy)
    exact = get_peft_model(AutoModelForCausalLM.from_pretrained(original), LoraConfig(**LORA))
    for _ in range(2):
        change(policy)
        factors = {name: value for name, value in policy.state_dict().items() if "lora_" in name}
        assert not exact.load_state_dict(factors, strict=False).unexpected_keys
        completions = sampler.generate(GROUPS)
        assert difference(exact.eval(), GROUPS, completions) < CLOSE
        assert difference(policy, GROUPS, completions) > 0.1  # what 4 bits round


def make_trainer(make_args, tokenizer, dataset, folder, lora=LORA, **changes) -> GRPOTrainer:
    settings = {"learning_rate": 0.1, "generation_kwargs": {"seed": 3}} | changes
    return GRPOTrainer(
        folder, digits_reversal_reward, make_args(**settings), dataset,
        processing_class=tokenizer, quantization_config=NF4, peft_config=LoraConfig(**lora),
    )  # fmt: skip


def test_by_the_command_line(rounded, dataset, tmp_path):
    """It loads the model twice: into 4 bits, and into vLLM."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in dataset))
    words = {
        "--model_name_or_path": rounded, "--dataset_name": prompts,
        "--reward_funcs": "grpo_trainer.demo.task.digits_reversal_reward",
        "--load_in_4bit": "true", "--use_peft": "true", "--lora_target_modules": "all-linear",
        "--lora_dropout": 0,
        "--use_vllm": "true", "--vllm_engine_kwargs": json.dumps(ENGINE),
        "--vllm_gpu_memory_utilization": 0.1, "--output_dir": tmp_path / "out", "--max_steps": 3,
        "--per_device_train_batch_size": 8, "--num_generations": 4, "--max_completion_length": 6,
        "--learning_rate": 0.1, "--logging_steps": 1, "--use_cpu": "true", "--report_to": "none",
    }  # fmt: skip
    trainer = build_trainer([str(word) for pair in words.items() for word in pair])
    trainer.train()
    assert worst_mismatch(trainer, steps=3) < CLOSE_IN_BF16
    trainer.rollouts.close()


def test_the_revision_of_the_base(make_args, tokenizer, dataset, rounded, tmp_path, monkeypatch):
    """vLLM loads the one that the policy was loaded with, and the adapter says which."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--tests--tiny"
    commits = {"main": "a" * 40, "v1": "b" * 40}
    for name, commit in commits.items():
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / name).write_text(commit)
        files = place / "snapshots" / commit
        model = AutoModelForCausalLM.from_pretrained(rounded)
        if name == "main":
            change(model)
        model.save_pretrained(files)
        tokenizer.save_pretrained(files)
    init = {"revision": "v1"}
    trainer = make_trainer(make_args, tokenizer, dataset, "tests/tiny", model_init_kwargs=init)
    completions = trainer.rollouts.generate(PROMPTS)
    assert difference(trainer.model.eval(), PROMPTS, completions) < CLOSE_IN_BF16
    assert trainer.model.peft_config["default"].revision == "v1"
    trainer.rollouts.close()


@pytest.mark.parametrize(
    ("lora", "changes", "message"),
    [
        ({"use_dora": True}, {}, "use_vllm: expected a LoRA adapter .*not a factor of plain LoRA"),
        ({"r": 9}, {"vllm_engine_kwargs": ENGINE | {"max_lora_rank": 8}}, "is 9, .* at most 8"),
        ({}, {"vllm_engine_kwargs": ENGINE | {"enable_lora": False}}, "has enable_lora=False"),
        ({"init_lora_weights": "olora"}, {}, "init_lora_weights, since .* got 'olora'"),
    ],
)  # fmt: skip
def test_what_cannot_work(make_args, tokenizer, dataset, rounded, lora, changes, message):
    """It is an error before training, and where that is possible before vLLM is started."""
    with pytest.raises(ValueError, match=message):
        make_trainer(make_args, tokenizer, dataset, rounded, LORA | lora, **changes)


def test_a_base_that_is_nowhere(make_sampler, rounded, tmp_path, caplog):
    policy = adapted(quantized(rounded))
    config = policy.get_base_model().config
    off = {"vllm_importance_sampling_correction": False}
    for config._name_or_path in ("", str(tmp_path / "nowhere")):
        with pytest.raises(
            ValueError, match=r"model: expected a model that was loaded from a folder"
        ):
            make_sampler(policy, **off)
        assert "vllm_importance_sampling_correction: off" in caplog.messages[-1]
    named = {"vllm_engine_kwargs": ENGINE | {"model": rounded}}
    assert apart(make_sampler(policy, **named), policy) < CLOSE
    full = AutoModelForCausalLM.from_pretrained(rounded)
    with pytest.raises(ValueError, match=r"vllm_engine_kwargs\['model'\]: expected none"):
        make_sampler(full, **named)


def test_a_base_that_vllm_cannot_load(make_sampler, original, tokenizer, tmp_path):
    """Files in 4 bits, in a format that vLLM 0.32 does not have."""
    quantized(original).save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    policy = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))
    with pytest.raises(ValueError, match=r"use_vllm: expected a base that vLLM can load.*packed"):
        make_sampler(policy)


FP8 = {"vllm_engine_kwargs": ENGINE | {"quantization": "fp8_per_channel", "dtype": "bfloat16"}}


def test_weights_that_vllm_quantizes(make_sampler, policy):
    """Each update is quantized again, to a scale per channel."""
    sampler = make_sampler(policy, **FP8)
    for _ in range(4):
        completions = sampler.generate(GROUPS)
        vllms = dict(sampler.engine._llm.apply_model(_weights)[0])
        for name, (weight, scale) in vllms.items():
            expected, of_channel = _in_fp8(policy.get_submodule(name).weight)
            torch.testing.assert_close(scale, of_channel, rtol=1e-6, atol=0)
            assert weight.float().equal(expected.float())
        assert len(vllms) == 4
        assert difference(policy, GROUPS, completions) < 1.0
        change(policy)
        assert difference(policy, GROUPS, completions) > 2.0


def _weights(model: nn.Module) -> list[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return what vLLM has of the layers that it does not fuse with others: (N, K), (N, 1)."""
    return [
        (name, (layer.weight.t().clone(), layer.weight_scale.clone()))
        for name, layer in model.named_modules()
        if name.endswith(("o_proj", "down_proj"))
    ]


def _in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in 8 bits and the scales of its rows."""
    kind, weight = torch.float8_e4m3fn, weight.detach().bfloat16().float()
    scale = weight.abs().amax(-1, keepdim=True) / torch.finfo(kind).max
    return (weight / scale).to(kind), scale


def test_an_adapter_on_weights_that_vllm_quantizes(make_sampler, original):
    """It gets the base once, which is no longer that of the folder; then the adapter."""
    model = AutoModelForCausalLM.from_pretrained(original)
    for _ in range(6):
        change(model)
    policy = adapted(model)
    sampler = make_sampler(policy, **FP8)
    for _ in range(3):
        completions = sampler.generate(GROUPS)
        assert sampler._sent == bytes_of(policy, adapter=True)
        assert difference(policy, GROUPS, completions) < 1.0
        for _ in range(6):
            change(policy)
        assert difference(policy, GROUPS, completions) > 2.0


@pytest.mark.parametrize("method", ["fp8", "awq", "compressed-tensors", "torchao", "mxfp8"])
def test_methods_that_updates_cannot_go_through(make_sampler, policy, method):
    engine = ENGINE | {"quantization": method, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match="expected one of fp8_per_tensor, .*got '" + method):
        make_sampler(policy, vllm_engine_kwargs=engine)
    merged = {"vllm_lora_transfer": "merged", "vllm_engine_kwargs": engine}
    with pytest.raises(ValueError, match=r"vllm_engine_kwargs\['quantization'\]: .*"):
        make_sampler(adapted(policy), **merged)
