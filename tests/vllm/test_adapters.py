"""LoRA adapters that vLLM applies itself, on a base in full precision or in 4 bits, and those that
are merged: its log-probabilities are the policy's after each update, and only the adapter travels.
"""

from __future__ import annotations

import copy
import logging

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.task import digits_reversal_reward
from tests.support import left_behind
from tests.vllm.vllm_helpers import (
    CLOSE,
    CLOSE_IN_BF16,
    ENGINE,
    LORA,
    NF4,
    TAKES_LORA,
    adapted,
    apart,
    bytes_of,
    change,
    difference,
    make_model,
    quantized,
    serving,
    worst_mismatch,
)

# adapters that vLLM gets as they are
PLAIN = {
    "all": {},
    "few": {"target_modules": ["v_proj", "down_proj"], "use_rslora": True, "lora_dropout": 0.3},
    "patterns": {"rank_pattern": {"q_proj": 8, "o_proj": 1}, "alpha_pattern": {"k_proj": 3}},
}
LOADERS = {"full precision": AutoModelForCausalLM.from_pretrained, "4 bits": quantized}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer, rounded):
    """Serve the base: it is not sent to be under an adapter in 4 bits, whose tests come first."""
    model = AutoModelForCausalLM.from_pretrained(rounded)
    with serving(tmp_path_factory.mktemp("server"), model, tokenizer, TAKES_LORA) as server:
        yield server


@pytest.fixture(params=["colocated", "server"])
def settings(request) -> dict[str, object]:
    """Return the settings of the engine."""
    if request.param == "colocated":
        return {}
    return {"vllm_server_port": request.getfixturevalue("server").port}


@pytest.mark.parametrize("base", reversed(LOADERS))
def test_parity(make_sampler, settings, rounded, base, caplog):
    for lora in PLAIN.values():
        policy = adapted(LOADERS[base](rounded), **lora)
        with caplog.at_level(logging.WARNING, "grpo_trainer"):
            sampler = make_sampler(policy, None if settings else base, **settings)
        assert sampler.engine.takes_adapter
        for _ in range(3):
            assert apart(sampler, policy) < CLOSE
            assert sampler._sent == bytes_of(policy, adapter=True)
            change(policy)
        with policy.disable_adapter():  # it is what the completions come from
            assert apart(sampler, policy) > 0.1
    sampler.outdated()  # a base that the policy has comes again
    assert apart(sampler, policy) < CLOSE
    assert not [text for text in caplog.messages if "correction" in text or "merg" in text]


def test_no_key_of_another_adapter_is_reused(make_sampler, rounded, monkeypatch):
    """Neither while the cache is full of them."""
    policy = adapted(AutoModelForCausalLM.from_pretrained(rounded))
    sampler = make_sampler(policy, "full precision")
    monkeypatch.setattr(sampler.engine._llm, "reset_prefix_cache", lambda: True)
    for _ in range(3):
        assert apart(sampler, policy) < CLOSE
        change(policy)


@pytest.mark.parametrize(("base", "level"), [("full precision", 2), ("4 bits", 1)])
def test_sleep(make_sampler, rounded, monkeypatch, base, level):
    """The base has to come again for each generation, before its adapter, once memory is back; one
    that the policy cannot send again is kept, in main memory."""
    policy, asked = adapted(LOADERS[base](rounded)), []
    sampler = make_sampler(policy, base)
    engine = sampler.engine
    monkeypatch.setattr(engine._llm, "sleep", lambda level: asked.append(f"sleep {level}"))
    monkeypatch.setattr(engine._llm, "wake_up", lambda tags: asked.extend(tags))
    monkeypatch.setattr(engine, "_sleep_level", level)
    monkeypatch.setattr(engine, "_asleep", set())
    sent = bytes_of(policy, adapter=True)
    sent += bytes_of(policy, adapter=False) if level == 2 else 0
    for changes in (False, True, False):
        if changes:
            change(policy)
        assert apart(sampler, policy) < CLOSE and sampler._sent == sent
    assert asked == [f"sleep {level}", *["weights", "kv_cache", f"sleep {level}"] * 2]


# merged: rows of single tokens, whole ends that stay tied, and what is no plain LoRA
MERGED = {
    "tokens": {"trainable_token_indices": [5, 13]},
    "tokens of both ends": {"trainable_token_indices": {"embed_tokens": [5], "lm_head": [5, 0]}},
    "whole ends": {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
    "dora": {"use_dora": True},
}


@pytest.mark.filterwarnings("ignore")  # peft's, where nothing is tied
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_merged(make_sampler, tokenizer, caplog, tied):
    for kind, lora in MERGED.items():
        if tied and kind == "tokens of both ends":
            continue
        policy = adapted(make_model(tokenizer, tied), **lora)
        sampler = make_sampler(policy, f"merged {tied}")
        for _ in range(3):  # with the first weights, and after each of two updates
            assert apart(sampler, policy) < CLOSE
            assert sampler._sent == bytes_of(policy, adapter=False)
            change(policy)
        with policy.disable_adapter():
            assert apart(sampler, policy) > 0.1
    [said] = [text for text in caplog.messages if "merging the adapter" in text]
    assert "is not a factor of plain LoRA" in said and "embed_tokens" in said  # of the first kind


NO_ADAPTERS = {"enable_lora": False, "lora_target_modules": ["q_proj"], "max_lora_rank": 8}


def test_an_engine_that_takes_no_adapter(make_sampler, policy, caplog):
    """It is an error where one is asked for, else the adapter is merged."""
    large = adapted(copy.deepcopy(policy), r=513)
    policy = adapted(policy, r=9)
    for lora, engine, reason in (
        (large, {}, r"rank is 513, .* configured for at most 512"),
        (policy, {"max_lora_rank": 8}, r"rank is 9, .* configured for at most 8"),
        (policy, {"lora_target_modules": ["q_proj"]}, "has lora_target_modules"),
        (policy, NO_ADAPTERS, "vllm_engine_kwargs has enable_lora=False"),
    ):
        changes = {"vllm_engine_kwargs": ENGINE | engine}
        with pytest.raises(ValueError, match=f"vllm_lora_transfer: .*{reason}"):
            make_sampler(lora, vllm_lora_transfer="adapter", **changes)
    sampler = make_sampler(policy, **changes)
    assert sum("vllm_lora_transfer: merging the adapter" in text for text in caplog.messages) == 1
    assert apart(sampler, policy) < CLOSE and sampler._sent == bytes_of(policy, adapter=False)


def test_new_tokens(make_args, tokenizer, dataset):
    """They are in the prompts, sampled by both, and trained."""
    model, tokenizer = make_model(tokenizer, tied=False), copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<plan>", "</plan>"])
    new = tokenizer.convert_tokens_to_ids(["<plan>", "</plan>"])
    model.resize_token_embeddings(len(tokenizer))
    rows = dataset.map(lambda row: {"prompt": f"<plan>{row['prompt']}</plan>"})
    both = {"embed_tokens": new, "lm_head": new}
    trainer = GRPOTrainer(
        model, digits_reversal_reward, make_args(learning_rate=0.1), rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA, trainable_token_indices=both),
    )  # fmt: skip
    trained = [x for name, x in trainer.model.named_parameters() if "tokens_delta" in name]
    before = [value.detach().clone() for value in trained]
    trainer.train()
    trainer.rollouts.close()
    assert len(trained) == 2
    assert all((now != old).any() for now, old in zip(trained, before, strict=True))
    assert worst_mismatch(trainer, steps=3) < CLOSE


def test_ends_that_differ(make_args, policy, tokenizer, dataset):
    lora = LoraConfig(**LORA, modules_to_save=["lm_head"])
    with pytest.raises(
        ValueError, match="on lm_head; to keep them tied, set ensure_weight_tying=True in the"
    ):
        GRPOTrainer(
            policy, digits_reversal_reward, make_args(), dataset, processing_class=tokenizer,
            peft_config=lora,
        )  # fmt: skip


# 4 bits: on the server's own base, which others replace
RESUMED = {
    "4 bits": {},
    "adapter": {},
    "merged": {},
    "tokens": {"trainable_token_indices": [5, 13]},
    "whole ends": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        *(("colocated", kind) for kind in ("4 bits", "adapter", "merged")),
        *(("server", kind) for kind in ("4 bits", "adapter", "tokens", "whole ends")),
    ],
    indirect=["settings"],
)
def test_a_resumed_run_is_the_straight_run(
    make_args, settings, rounded, tokenizer, dataset, kind, tmp_path
):
    transfer = kind if kind in ("adapter", "merged") else "auto"

    def run(**resume):
        args = make_args(
            **settings, vllm_lora_transfer=transfer, max_steps=4, save_strategy="steps",
            save_steps=2, learning_rate=0.1, generation_kwargs={"seed": 3},
        )  # fmt: skip
        trainer = GRPOTrainer(
            rounded, digits_reversal_reward, args, dataset, processing_class=tokenizer,
            peft_config=LoraConfig(**LORA, **copy.deepcopy(RESUMED[kind])),
            quantization_config=NF4 if kind == "4 bits" else None,
        )  # fmt: skip
        trainer.train(**resume)
        return trainer

    straight = run()
    sent = bytes_of(straight.model, adapter=kind in ("4 bits", "adapter"))
    rows = [row for row in straight.state.log_history if "loss" in row]
    assert {row.get("weight_update_bytes", sent) for row in rows} == {sent}
    assert sum("weight_update_bytes" in row for row in rows) >= 3  # no update after the last batch
    close = CLOSE_IN_BF16 if kind == "4 bits" else CLOSE
    assert worst_mismatch(straight, steps=4) < close
    prompts = [tokenizer("123=")["input_ids"]] * 4
    model, completions = straight.model.eval(), straight.rollouts.generate(prompts)
    assert difference(model, prompts, completions) < close
    with model.disable_adapter():
        assert difference(model, prompts, completions) > 0.1
    straight.rollouts.close()
    resumed = run(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    resumed.rollouts.close()
    rows = left_behind.rows(straight.state.log_history)
    assert left_behind.rows(resumed.state.log_history) == rows
    own, other = (dict(one.model.state_dict()) for one in (straight, resumed))
    assert all(other[name].equal(value) for name, value in own.items())


def test_a_server_that_takes_less(make_sampler, server, rounded):
    port = {"vllm_server_port": server.port}
    with pytest.raises(ValueError, match=r"use_vllm: .*rank is 9, .* configured for at most 8"):
        make_sampler(adapted(quantized(rounded), r=9), **port)
    policy = adapted(AutoModelForCausalLM.from_pretrained(rounded), r=9)
    with pytest.raises(
        ValueError, match=r"vllm_lora_transfer: .*rank is 9, .* configured for at most 8"
    ):
        make_sampler(policy, vllm_lora_transfer="adapter", **port)
    sampler = make_sampler(policy, **port)
    assert not sampler.engine.takes_adapter and apart(sampler, policy) < CLOSE
