"""QLoRA with vLLM, whose base is not the policy's, and weights that vLLM quantizes itself."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import nn
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


def test_sleep(make_sampler, rounded, monkeypatch):
    """A base that the policy cannot send again is kept, in main memory."""
    policy, asked = adapted(quantized(rounded)), []
    sampler = make_sampler(policy)
    llm = sampler.engine._llm
    monkeypatch.setattr(llm, "sleep", lambda level: asked.append(f"sleep {level}"))
    monkeypatch.setattr(llm, "wake_up", lambda tags: asked.extend(tags))
    sampler.engine._sleep_level = 1
    for changes in (False, True, False):
        if changes:
            change(policy)
        assert apart(sampler, policy) < CLOSE
        assert sampler._sent == adapter_bytes(policy)
    assert asked == ["sleep 1", *["weights", "kv_cache", "sleep 1"] * 2]


NO_FACTOR = "no factor of plain LoRA"


@pytest.mark.parametrize(
    ("lora", "changes", "message"),
    [
        ({}, {"vllm_lora_transfer": "merged"}, "vllm_lora_transfer: expected auto or adapter"),
        ({"use_dora": True}, {}, f"use_vllm: expected a LoRA adapter .*{NO_FACTOR}"),
        ({"modules_to_save": ["norm"]}, {}, f"use_vllm: .*{NO_FACTOR}"),
        ({"use_dora": True}, {"vllm_lora_transfer": "adapter"}, "vllm_lora_transfer: .*no factor"),
        ({"r": 9}, {"vllm_engine_kwargs": ENGINE | {"max_lora_rank": 8}}, "is 9, .* 8 at most"),
        ({}, {"vllm_engine_kwargs": ENGINE | {"enable_lora": False}}, "has enable_lora=False"),
        ({"init_lora_weights": "olora"}, {}, "init_lora_weights, since .* got 'olora'"),
    ],
)  # fmt: skip
def test_what_cannot_work(make_args, tokenizer, dataset, rounded, lora, changes, message):
    """It is an error before training, and where that is possible before vLLM is started."""
    with pytest.raises(ValueError, match=message):
        make_trainer(make_args, tokenizer, dataset, rounded, LORA | lora, **changes)


def test_a_base_that_is_nowhere(make_sampler, rounded, original, tmp_path):
    policy = adapted(quantized(rounded))
    config = policy.get_base_model().config
    for config._name_or_path in ("", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=r"model: expected one that was loaded from a folder"):
            make_sampler(policy)
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


def test_servers_that_take_less(make_sampler, server, rounded, tmp_path, tokenizer):
    port = {"vllm_server_port": server.port}
    with pytest.raises(ValueError, match=r"use_vllm: .*rank is 9, .* takes 8 at most"):
        make_sampler(adapted(quantized(rounded), r=9), **port)
    model = AutoModelForCausalLM.from_pretrained(rounded)
    refused = pytest.raises(ValueError, match="use_vllm: .*started without --enable-lora")
    with serving(tmp_path, model, tokenizer) as plain, refused:
        make_sampler(adapted(quantized(rounded)), vllm_server_port=plain.port)


@pytest.mark.parametrize("correction", [True, False])
def test_a_correction_that_is_off(make_sampler, rounded, correction, caplog):
    changes = {"vllm_importance_sampling_correction": correction}
    with caplog.at_level(logging.WARNING, "grpo_trainer"):
        make_sampler(adapted(quantized(rounded)), **changes)
    said = [record.message for record in caplog.records if record.name.startswith("grpo_trainer")]
    if correction:
        assert not said
    else:
        [warning] = said
        assert "vllm_importance_sampling_correction: off" in warning
        assert "set it to True" in warning


FP8 = {"vllm_engine_kwargs": ENGINE | {"quantization": "fp8_per_channel", "dtype": "bfloat16"}}


def test_weights_that_vllm_quantizes(make_sampler, policy):
    """Each update is quantized again, to a scale per channel."""
    sampler = make_sampler(policy, **FP8)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    for _ in range(4):
        completions = sampler.generate(prompts)
        vllms = dict(sampler.engine._llm.apply_model(_weights)[0])
        for name, (weight, scale) in vllms.items():
            expected, of_channel = _in_fp8(policy.get_submodule(name).weight)
            torch.testing.assert_close(scale, of_channel, rtol=1e-6, atol=0)
            assert weight.float().equal(expected.float())
        assert len(vllms) == 4
        assert difference(policy, prompts, completions) < 1.0
        change(policy)
        assert difference(policy, prompts, completions) > 2.0


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


@pytest.mark.parametrize("altered", [False, True])
def test_an_adapter_on_weights_that_vllm_quantizes(make_sampler, original, altered):
    """It gets the base once, also one that is no longer that of the folder; then the adapter."""
    model = AutoModelForCausalLM.from_pretrained(original)
    if altered:
        for _ in range(6):
            change(model)
    policy = adapted(model)
    sampler = make_sampler(policy, **FP8)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    for _ in range(3):
        completions = sampler.generate(prompts)
        assert sampler._sent == adapter_bytes(policy)
        assert difference(policy, prompts, completions) < 1.0
        for _ in range(6):
            change(policy)
        assert difference(policy, prompts, completions) > 2.0


@pytest.mark.parametrize("method", ["fp8", "awq", "compressed-tensors", "torchao", "mxfp8"])
def test_methods_that_updates_cannot_go_through(make_sampler, policy, method):
    engine = ENGINE | {"quantization": method, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match="expected one of fp8_per_tensor, .*got '" + method):
        make_sampler(policy, vllm_engine_kwargs=engine)
    merged = {"vllm_lora_transfer": "merged", "vllm_engine_kwargs": engine}
    with pytest.raises(ValueError, match=r"vllm_engine_kwargs\['quantization'\]: .*"):
        make_sampler(adapted(policy), **merged)
