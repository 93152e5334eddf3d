"""QLoRA with vLLM, whose base is not the policy's, and weights that vLLM quantizes itself."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_trainer import GRPOTrainer
from grpo_trainer.cli.train import build_trainer
from grpo_trainer.demo.task import digits_reversal_reward
from tests.support import left_behind
from tests.vllm.test_adapters import LORA, apart, make_sampler
from tests.vllm.vllm_helpers import (
    CLOSE,
    ENGINE,
    PROMPTS,
    change,
    difference,
    make_model,
    serving,
    worst_mismatch,
)

__all__ = ["make_sampler"]  # a fixture

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
CLOSE_IN_BF16 = 0.03  # nats, of an adapter that the policy computes in bf16
MODES = ["colocated", "server"]
TAKES = {"--enable-lora": "", "--max-lora-rank": 8}


@pytest.fixture
def tied() -> bool:
    return True  # whose head is a copy in vLLM


@pytest.fixture(scope="module")
def original(tmp_path_factory, tokenizer) -> str:
    """Return a folder of weights that 4 bits round."""
    folder = tmp_path_factory.mktemp("original")
    make_model(tokenizer, tied=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rounded(original, tmp_path_factory, tokenizer) -> str:
    """Return a folder of weights in fp32 that are exact in 4 bits."""
    folder = str(tmp_path_factory.mktemp("rounded"))
    model = AutoModelForCausalLM.from_pretrained(original)
    for name, layer in quantized(original).named_modules():
        if isinstance(layer, Linear4bit):
            model.get_submodule(name).weight.data = dequantized(layer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, layer in quantized(folder).named_modules():
        if isinstance(layer, Linear4bit):
            assert dequantized(layer).equal(model.get_submodule(name).weight)
    return folder


@pytest.fixture(scope="module")
def server(rounded, tmp_path_factory, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(rounded)
    with serving(tmp_path_factory.mktemp("server"), model, tokenizer, TAKES) as server:
        yield server


@pytest.fixture(params=MODES)
def settings(request) -> dict[str, object]:
    """Return the settings of the engine."""
    if request.param == "colocated":
        return {}
    return {"vllm_server_port": request.getfixturevalue("server").port}


def quantized(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4)


def dequantized(layer: Linear4bit) -> torch.Tensor:
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def adapted(model, **changes):
    """Return ``model`` under an adapter that alters what it says."""
    torch.manual_seed(11)
    policy = get_peft_model(model, LoraConfig(**(LORA | changes))).eval()
    change(policy)
    return policy


def adapter_bytes(policy) -> int:
    return sum(value.nbytes for value in policy.parameters() if value.requires_grad)


def test_parity(make_sampler, settings, rounded):
    """Over three updates, on a base that vLLM has as the policy has it."""
    policy = adapted(quantized(rounded))
    sampler = make_sampler(policy, **settings)
    for _ in range(3):
        assert apart(sampler, policy) < CLOSE
        assert sampler._sent == adapter_bytes(policy)
        change(policy)
    with policy.disable_adapter():
        assert apart(sampler, policy) > 0.1
    sampler.outdated()
    assert apart(sampler, policy) < CLOSE and sampler._sent == adapter_bytes(policy)


def test_the_base_is_that_of_the_folder(make_sampler, original):
    """vLLM's log-probabilities are those of the adapter on weights that are not rounded."""
    policy = adapted(quantized(original))
    sampler = make_sampler(policy)
    exact = get_peft_model(AutoModelForCausalLM.from_pretrained(original), LoraConfig(**LORA))
    for _ in range(2):
        change(policy)
        factors = {name: value for name, value in policy.state_dict().items() if "lora_" in name}
        assert not exact.load_state_dict(factors, strict=False).unexpected_keys
        prompts = [prompt for prompt in PROMPTS for _ in range(4)]
        completions = sampler.generate(prompts)
        assert difference(exact.eval(), prompts, completions) < CLOSE
        assert difference(policy, prompts, completions) > 0.1  # what 4 bits round


def make_trainer(make_args, tokenizer, dataset, folder, lora=LORA, **changes) -> GRPOTrainer:
    settings = {"learning_rate": 0.1, "generation_kwargs": {"seed": 3}} | changes
    return GRPOTrainer(
        folder, digits_reversal_reward, make_args(**settings), dataset,
        processing_class=tokenizer, quantization_config=NF4, peft_config=LoraConfig(**lora),
    )  # fmt: skip


def test_a_resumed_run_is_the_straight_run(
    make_args, settings, tokenizer, dataset, rounded, tmp_path
):
    changes = settings | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def run(**resume):
        trainer = make_trainer(make_args, tokenizer, dataset, rounded, **changes)
        trainer.train(**resume)
        return trainer

    straight = run()
    assert worst_mismatch(straight, steps=4) < CLOSE_IN_BF16
    sent = adapter_bytes(straight.model)
    rows = [row for row in straight.state.log_history if "loss" in row]
    assert {row.get("weight_update_bytes", sent) for row in rows} == {sent}
    prompts = [tokenizer("123=")["input_ids"]] * 4
    model, completions = straight.model.eval(), straight.rollouts.generate(prompts)
    assert difference(model, prompts, completions) < CLOSE_IN_BF16
    with model.disable_adapter():
        assert difference(model, prompts, completions) > 0.1
    straight.rollouts.close()
    resumed = run(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    resumed.rollouts.close()
    rows = left_behind.rows(straight.state.log_history)
    assert left_behind.rows(resumed.state.log_history) == rows
    own, other = (dict(one.model.state_dict()) for one in (straight, resumed))
    assert all(other[name].equal(value) for name, value in own.items())
