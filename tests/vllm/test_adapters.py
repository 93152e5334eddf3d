"""LoRA adapters that vLLM applies itself: its log-probabilities are the policy's after each update,
and only the adapter travels."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.engines import EngineContext, Sampler, Sampling, policy_weights
from grpo_trainer.vllm.engines import ColocatedVLLM, VLLMServer
from tests.support import left_behind
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

LORA = {"r": 4, "lora_alpha": 7, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# adapters that vLLM gets as they are
PLAIN = {
    "all": {},
    "few": {"target_modules": ["v_proj", "down_proj"], "use_rslora": True, "lora_dropout": 0.3},
    "patterns": {"rank_pattern": {"q_proj": 8, "o_proj": 1}, "alpha_pattern": {"k_proj": 3}},
}
MODES = ["colocated", "server"]


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    model = make_model(tokenizer, tied=True)
    takes = {"--enable-lora": "", "--max-lora-rank": 8}
    with serving(tmp_path_factory.mktemp("server"), model, tokenizer, takes) as server:
        yield server


@pytest.fixture
def tied() -> bool:
    return True  # whose head is a copy in vLLM


@pytest.fixture(params=MODES)
def settings(request) -> dict[str, object]:
    """Return the settings of the engine."""
    if request.param == "colocated":
        return {}
    return {"vllm_server_port": request.getfixturevalue("server").port}


@pytest.fixture
def make_sampler(make_args, tokenizer):
    """Make what samples by a policy as the trainer does."""
    made = []

    def make(policy, **changes) -> Sampler:
        args = make_args(**changes)
        context = EngineContext(
            policy=lambda: policy,
            processing_class=tokenizer,
            args=args,
            accelerator=Accelerator(cpu=args.use_cpu),
        )
        engine = (VLLMServer if args.vllm_mode == "server" else ColocatedVLLM)(context)
        sampling = Sampling(eos_token_ids=frozenset([tokenizer.eos_token_id]), max_tokens=8)
        made.append(Sampler(engine, context, sampling, step=lambda: 0, name="vllm"))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


def adapted(model, **changes):
    """Return ``model`` under an adapter that alters what it says."""
    torch.manual_seed(11)
    policy = get_peft_model(model, LoraConfig(**(LORA | changes))).eval()
    change(policy)
    return policy


def apart(sampler: Sampler, policy) -> float:
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    return difference(policy, prompts, sampler.generate(prompts))


def bytes_of(policy, adapter: bool) -> int:
    """Return the bytes of the factors, or else of the merged checkpoint."""
    if not adapter:
        return sum(value.nbytes for _, value in policy_weights(policy))
    return sum(value.nbytes for value in policy.parameters() if value.requires_grad)


@pytest.mark.parametrize("kind", PLAIN)
def test_parity(make_sampler, settings, policy, kind):
    policy = adapted(policy, **PLAIN[kind])
    sampler = make_sampler(policy, **settings)
    assert sampler.engine.takes_adapter
    for _ in range(3):
        assert apart(sampler, policy) < CLOSE
        assert sampler._sent == bytes_of(policy, adapter=True)
        change(policy)
    with policy.disable_adapter():  # it is what the completions come from
        assert apart(sampler, policy) > 0.1
    sampler.outdated()  # the base comes again
    assert apart(sampler, policy) < CLOSE


def test_no_key_of_another_adapter_is_reused(make_sampler, policy, monkeypatch):
    """Neither while the cache is full of them."""
    policy = adapted(policy)
    sampler = make_sampler(policy)
    monkeypatch.setattr(sampler.engine._llm, "reset_prefix_cache", lambda: True)
    for _ in range(3):
        assert apart(sampler, policy) < CLOSE
        change(policy)


def test_sleep(make_sampler, policy, monkeypatch):
    """The base has to come again for each generation, before its adapter; once memory is back."""
    policy, asked = adapted(policy), []
    sampler = make_sampler(policy)
    llm = sampler.engine._llm
    monkeypatch.setattr(llm, "sleep", lambda level: asked.append(f"sleep {level}"))
    monkeypatch.setattr(llm, "wake_up", lambda tags: asked.extend(tags))
    sampler.engine._sleep_level = 2
    for _ in range(2):
        assert apart(sampler, policy) < CLOSE
        sent = bytes_of(policy, adapter=False) + bytes_of(policy, adapter=True)
        assert sampler._sent == sent
        change(policy)
    assert asked == ["sleep 2", "weights", "kv_cache", "sleep 2"]


@pytest.mark.parametrize(
    ("lora", "engine", "reason"),
    [
        ({"use_dora": True}, {}, "no factor of plain LoRA"),
        ({"r": 9}, {"max_lora_rank": 8}, r"rank is 9, .* takes 8 at most"),
        ({"r": 513}, {}, r"rank is 513, .* takes 512 at most"),
        ({}, {"enable_lora": False}, "vllm_engine_kwargs has enable_lora=False"),
        ({}, {"lora_target_modules": ["q_proj"]}, "vllm_engine_kwargs has lora_target_modules"),
    ],
)
def test_what_is_merged(make_sampler, policy, caplog, lora, engine, reason):
    policy, changes = adapted(policy, **lora), {"vllm_engine_kwargs": ENGINE | engine}
    with pytest.raises(ValueError, match=f"vllm_lora_transfer: .*{reason}"):
        make_sampler(policy, vllm_lora_transfer="adapter", **changes)
    with caplog.at_level(logging.WARNING, "grpo_trainer"):
        sampler = make_sampler(policy, **changes)
    assert sum("vllm_lora_transfer: the adapter is merged" in text for text in caplog.messages) == 1
    for _ in range(2):
        assert apart(sampler, policy) < CLOSE
        assert sampler._sent == bytes_of(policy, adapter=False)
        change(policy)


# merged: rows of single tokens, and whole ends that stay tied
ENDS = {
    "tokens": {"trainable_token_indices": [5, 13]},
    "tokens of both ends": {"trainable_token_indices": {"embed_tokens": [5], "lm_head": [5, 0]}},
    "whole ends": {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.filterwarnings("ignore")  # peft's, where nothing is tied
@pytest.mark.parametrize(
    ("tied", "kind"),
    [
        (True, "tokens"), (False, "tokens"), (False, "tokens of both ends"),
        (True, "whole ends"), (False, "whole ends"),
    ],
)  # fmt: skip
def test_new_rows_and_tied_ends(make_sampler, tokenizer, caplog, tied, kind):
    policy = adapted(make_model(tokenizer, tied), **copy.deepcopy(ENDS[kind]))
    with caplog.at_level(logging.WARNING, "grpo_trainer"):
        sampler = make_sampler(policy)
    [said] = [text for text in caplog.messages if "the adapter is merged" in text]
    assert "is no factor of plain LoRA" in said and "embed_tokens" in said
    for _ in range(4):  # with the first weights, and after each of three updates
        assert apart(sampler, policy) < CLOSE
        assert sampler._sent == bytes_of(policy, adapter=False)
        change(policy)
    assert apart(sampler, policy) < CLOSE
    with policy.disable_adapter():
        assert apart(sampler, policy) > 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens(make_args, tokenizer, dataset, tied):
    """They are in the prompts, sampled by both, and trained."""
    model, tokenizer = make_model(tokenizer, tied), copy.deepcopy(tokenizer)
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
    assert len(trained) == (1 if tied else 2)
    assert all((now != old).any() for now, old in zip(trained, before, strict=True))
    assert worst_mismatch(trainer, steps=3) < CLOSE


def test_ends_that_differ(make_args, policy, tokenizer, dataset):
    lora = LoraConfig(**LORA, modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="on lm_head; ensure_weight_tying=True in the LoraConfig"):
        GRPOTrainer(
            policy, digits_reversal_reward, make_args(), dataset, processing_class=tokenizer,
            peft_config=lora,
        )  # fmt: skip


def test_a_server_that_takes_less(make_sampler, server, policy):
    policy, changes = adapted(policy, r=9), {"vllm_server_port": server.port}
    with pytest.raises(ValueError, match=r"rank is 9, .* takes 8 at most"):
        make_sampler(policy, vllm_lora_transfer="adapter", **changes)
    sampler = make_sampler(policy, **changes)
    assert not sampler.engine.takes_adapter and apart(sampler, policy) < CLOSE


RESUMED = {
    "adapter": {},
    "merged": {},
    "tokens": {"trainable_token_indices": [5, 13]},
    "whole ends": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_is_the_straight_run(
    make_args, settings, policy, tokenizer, dataset, kind, tmp_path
):
    transfer = kind if kind in ("adapter", "merged") else "auto"
    start = {name: value.clone() for name, value in policy.state_dict().items()}

    def run(**resume):
        model = type(policy)(policy.config)
        model.load_state_dict(start)
        args = make_args(
            **settings, vllm_lora_transfer=transfer, max_steps=4, save_strategy="steps",
            save_steps=2, learning_rate=0.1, generation_kwargs={"seed": 3},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, digits_reversal_reward, args, dataset, processing_class=tokenizer,
            peft_config=LoraConfig(**LORA, **copy.deepcopy(RESUMED[kind])),
        )  # fmt: skip
        trainer.train(**resume)
        trainer.rollouts.close()
        return trainer

    straight = run()
    sent = bytes_of(straight.model, adapter=transfer == "adapter")
    rows = [row for row in straight.state.log_history if "loss" in row]
    assert {row.get("weight_update_bytes", sent) for row in rows} == {sent}
    assert sum("weight_update_bytes" in row for row in rows) >= 3  # no update after the last batch
    if not settings:
        assert worst_mismatch(straight, steps=4) < CLOSE
    resumed = run(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    rows = left_behind.rows(straight.state.log_history)
    assert left_behind.rows(resumed.state.log_history) == rows
    own, other = (dict(one.model.state_dict()) for one in (straight, resumed))
    assert all(other[name].equal(value) for name, value in own.items())
