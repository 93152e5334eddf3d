"""vLLM in this process: its log-probabilities are the policy's, before and after updates."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.engines import EngineContext, Sampler, Sampling, policy_weights
from grpo_trainer.policy import WHOLE
from tests.vllm.vllm_helpers import CLOSE, ENGINE, PROMPTS, change, difference, worst_mismatch


@pytest.fixture
def make_engine(make_args, policy, tokenizer):
    from grpo_trainer.vllm.engines import ColocatedVLLM

    made = []

    def make(model=policy, **changes) -> ColocatedVLLM:
        args = make_args(**changes)
        accelerator = Accelerator(cpu=args.use_cpu)
        context = EngineContext(
            policy=lambda: model, processing_class=tokenizer, args=args, accelerator=accelerator
        )
        made.append(ColocatedVLLM(context))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def sampling(tokenizer, **changes) -> Sampling:
    settings = {"eos_token_ids": frozenset([tokenizer.eos_token_id]), "max_tokens": 8}
    return Sampling(**(settings | changes))


@pytest.mark.parametrize("packed", [True, False])  # how a CPU holds weights, and how a GPU does
def test_parity(make_engine, policy, tokenizer, packed, monkeypatch):
    if not packed:
        monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    torch.manual_seed(5)
    engine = make_engine()
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    temperatures = (1.0, 0.7)

    def apart() -> list[float]:
        drawn = [
            (engine.generate(prompts, sampling(tokenizer, temperature=t)), t) for t in temperatures
        ]
        return [difference(policy, prompts, found, t) for found, t in drawn]

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


def test_weights_are_rounded_without_a_warning_for_each(make_engine, policy, tokenizer, caplog):
    engine = make_engine(vllm_engine_kwargs=ENGINE | {"dtype": "bfloat16"})
    logger = logging.getLogger("vllm")  # does not propagate
    logger.addHandler(caplog.handler)
    engine.update_weights(lambda: policy_weights(policy))
    logger.removeHandler(caplog.handler)
    assert "Attempted to load weight" not in caplog.text
    completions = engine.generate(PROMPTS, sampling(tokenizer))
    assert CLOSE < difference(policy, PROMPTS, completions, 1.0) < 0.3


@pytest.mark.parametrize("tied", [True], indirect=True)
def test_what_is_sampled(make_engine, policy, tokenizer):
    engine = make_engine()
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


def test_arguments_that_vllm_does_not_have(make_engine):
    said = r"vllm_engine_kwargs: .* got 'quantisation' \(is it quantization\?\)"
    with pytest.raises(ValueError, match=said):
        make_engine(vllm_engine_kwargs=ENGINE | {"quantisation": "fp8_per_channel"})


@pytest.mark.parametrize("tied", [True], indirect=True)
def test_order_of_waking(make_engine, policy, tokenizer, monkeypatch):
    """The cache gets its memory when the weights have theirs; on a CPU both have it always."""
    engine, asked = make_engine(), []
    monkeypatch.setattr(engine._llm, "sleep", lambda level: asked.append(f"sleep {level}"))
    monkeypatch.setattr(engine._llm, "wake_up", lambda tags: asked.extend(tags))
    args = SimpleNamespace(use_rollout_routing_replay=False)
    context = SimpleNamespace(policy=lambda: policy, placement=WHOLE, vocab_size=None, args=args)
    rollouts = Sampler(engine, context, sampling(tokenizer), step=lambda: 0, name="vllm")
    engine._sleep_level = 2
    for changes in (True, False):
        if changes:
            change(policy)
        found = rollouts.generate(PROMPTS)
        assert difference(policy, PROMPTS, found) < CLOSE
    assert asked == ["sleep 2", "weights", "kv_cache", "sleep 2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to sleep on")
def test_sleep_needs_a_gpu(make_engine):
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode: expected False without a GPU"):
        make_engine(vllm_enable_sleep_mode=True)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}])
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
