"""vLLM in this process: its log-probabilities are the policy's, before and after updates."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.engines import Sampling, policy_weights
from tests.vllm.vllm_helpers import (
    CLOSE,
    ENGINE,
    GROUPS,
    PROMPTS,
    change,
    difference,
    worst_mismatch,
)

ON_GPU = torch.cuda.is_available()


def sampling(tokenizer, **changes) -> Sampling:
    settings = {"eos_token_ids": frozenset([tokenizer.eos_token_id]), "max_tokens": 8}
    return Sampling(**(settings | changes))


@pytest.mark.parametrize("packed", [True, False])  # how a CPU holds weights, and how a GPU does
@pytest.mark.parametrize("tied", [False, True])
def test_parity(make_sampler, policy, tokenizer, tied, packed, monkeypatch):
    if not packed:
        monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    torch.manual_seed(5)
    engine = make_sampler(policy, str(tied) if packed else None).engine
    temperatures = (1.0, 0.7)

    def apart() -> list[float]:
        drawn = [
            (engine.generate(GROUPS, sampling(tokenizer, temperature=t)), t) for t in temperatures
        ]
        return [difference(policy, GROUPS, found, t) for found, t in drawn]

    engine.update_weights(lambda: policy_weights(policy))
    assert max(apart()) < CLOSE
    change(policy)
    assert min(apart()) > 0.1
    # the weights without a new cache: keys and values of the old ones answer
    engine._llm.collective_rpc(
        "reload_weights", kwargs={"weights_iterator": policy_weights(policy)}
    )
    assert min(apart()) > 0.1
    engine.update_weights(lambda: policy_weights(policy))
    assert max(apart()) < CLOSE


def test_weights_are_rounded_without_a_warning_for_each(make_sampler, policy, tokenizer, caplog):
    engine = make_sampler(policy, vllm_engine_kwargs=ENGINE | {"dtype": "bfloat16"}).engine
    logger = logging.getLogger("vllm")  # does not propagate
    logger.addHandler(caplog.handler)
    engine.update_weights(lambda: policy_weights(policy))
    logger.removeHandler(caplog.handler)
    assert "Attempted to load weight" not in caplog.text
    completions = engine.generate(PROMPTS, sampling(tokenizer))
    assert CLOSE < difference(policy, PROMPTS, completions, 1.0) < 0.3


def test_what_is_sampled(make_sampler, policy, tokenizer):
    engine = make_sampler(policy, "True").engine
    engine.update_weights(lambda: policy_weights(policy))
    eos = tokenizer.eos_token_id
    group = PROMPTS[:1] * 16
    ids = engine.generate(group, sampling(tokenizer)).token_ids
    assert len({tuple(row) for row in ids}) > 8
    for ends in ({eos}, {eos, tokenizer.convert_tokens_to_ids("7")}):
        hot = sampling(tokenizer, temperature=2.0, eos_token_ids=frozenset(ends))
        ids = engine.generate(PROMPTS[:1] * 128, hot).token_ids
        assert {row[-1] for row in ids} > ends  # each is kept, and the last
        assert not any(ends & set(row[:-1]) for row in ids)
        assert all(len(row) == 8 for row in ids if row[-1] not in ends)

    seeded = sampling(tokenizer, engine_options={"seed": 5})
    first, second = (engine.generate(group, seeded).token_ids for _ in range(2))
    assert first == second and len({tuple(row) for row in first}) > 8

    digits = sampling(tokenizer, structured_outputs_regex="[0-9]{3}")
    texts = tokenizer.batch_decode(engine.generate(group, digits).token_ids)
    assert all(text[:3].isdigit() and text[3:] == tokenizer.eos_token for text in texts)

    with pytest.raises(ValueError, match="generation_kwargs: .*sead"):
        engine.generate(group, sampling(tokenizer, engine_options={"sead": 5}))


def test_arguments_that_vllm_does_not_have(make_sampler, policy):
    said = r"vllm_engine_kwargs: .* got 'quantisation' \(is it quantization\?\)"
    with pytest.raises(ValueError, match=said):
        make_sampler(policy, vllm_engine_kwargs=ENGINE | {"quantisation": "fp8_per_channel"})


def test_order_of_waking(make_sampler, policy, monkeypatch):
    """The cache gets its memory when the weights have theirs; on a CPU both have it always."""
    rollouts, asked = make_sampler(policy, "True"), []
    engine = rollouts.engine
    monkeypatch.setattr(engine._llm, "sleep", lambda level: asked.append(f"sleep {level}"))
    monkeypatch.setattr(engine._llm, "wake_up", lambda tags: asked.extend(tags))
    monkeypatch.setattr(engine, "_sleep_level", 2)
    monkeypatch.setattr(engine, "_asleep", set())
    for changes in (True, False):
        if changes:
            change(policy)
        assert difference(policy, PROMPTS, rollouts.generate(PROMPTS)) < CLOSE
    assert asked == ["sleep 2", "weights", "kv_cache", "sleep 2"]


@pytest.mark.skipif(ON_GPU, reason="there is a GPU to sleep on")
def test_sleep_needs_a_gpu(make_sampler, policy):
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode: expected False without a GPU"):
        make_sampler(policy, vllm_enable_sleep_mode=True)


@pytest.mark.parametrize(("tied", "filters"), [(False, {}), (True, {"top_k": 5, "top_p": 0.9})])
def test_training(make_args, policy, tokenizer, dataset, filters):
    args = make_args(
        temperature=0.7, steps_per_generation=2, gradient_accumulation_steps=1, max_steps=6,
        use_sampling_mask=bool(filters), **filters,
    )  # fmt: skip
    trainer = GRPOTrainer(policy, digits_reversal_reward, args, dataset, processing_class=tokenizer)
    trainer.train()
    # in every step, also the second one on a generation batch
    assert worst_mismatch(trainer, steps=6) < CLOSE
    prompts = [tokenizer("123=")["input_ids"]] * 4
    found = trainer.rollouts.generate(prompts)
    assert difference(policy.eval(), prompts, found, 0.7, **filters) < CLOSE
    trainer.rollouts.close()


def make_mixture(tokenizer) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=128, initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, mlp_only_layers=[1],
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


@pytest.fixture
def train(make_args, tokenizer, dataset):
    def run(**changes) -> dict[str, float]:
        """Return what the first step logs, with vLLM in bf16."""
        engine = ENGINE | {"dtype": "bfloat16"}
        args = make_args(max_steps=1, vllm_engine_kwargs=engine, **changes)
        trainer = GRPOTrainer(
            make_mixture(tokenizer),
            lambda completions, **kwargs: [float(i % 2) for i, _ in enumerate(completions)],
            args,
            dataset,
            processing_class=tokenizer,
        )
        trainer.train()
        trainer.rollouts.close()
        return next(row for row in trainer.state.log_history if "loss" in row)

    return run


@pytest.mark.skipif(ON_GPU, reason="vLLM reports them on a GPU")
def test_on_a_cpu_vllm_reports_no_experts(train):
    """It reports by its second model runner, which needs Triton."""
    with pytest.raises(ValueError, match="Model Runner V2"):
        train(use_rollout_routing_replay=True)


@pytest.mark.skipif(not ON_GPU, reason="vLLM reports them on a GPU only")
def test_with_replayed_experts_engine_and_policy_differ_less(train):
    own, replayed = (train(use_rollout_routing_replay=replays) for replays in (False, True))
    assert replayed["sampling/routing_difference"] < 0.3
    name = "sampling/sampling_logp_difference/mean"
    assert replayed[name] <= own[name]
