"""Rollout engines: what they are asked, when they get weights, what becomes of their answers."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3ForCausalLM

from grpo_trainer import GRPOTrainer
from grpo_trainer.rollout import Completions, Rollouts, Sampling, register_rollout_engine
from grpo_trainer.rollout.base import runs
from grpo_trainer.rollout.registry import ENGINES
from grpo_trainer.rollout.sampling import vllm_params
from tests.support.trainer import BackgroundEngine


@pytest.fixture
def copied(policy) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(policy.config).eval()  # with weights of its own


@pytest.fixture
def train(make_trainer):
    def run(engine, **changes) -> GRPOTrainer:
        trainer = make_trainer(engine=engine, **changes)
        trainer.train()
        return trainer

    return run


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if "reward" in row]


def test_sampling_of_a_config(make_args, tokenizer):
    args = make_args(
        temperature=0.7,
        top_k=5,
        generation_kwargs={"eos_token_id": [4, 5], "top_p": 0.5, "num_beams": 1},
    )
    sampling = Sampling.from_config(args, tokenizer)
    assert sampling == Sampling(
        eos_token_ids=frozenset([4, 5]),
        max_tokens=4,
        temperature=0.7,
        top_p=0.5,
        top_k=5,
        engine_options={"num_beams": 1},
    )


def test_sampling_in_vllms_words(make_args, tokenizer):
    args = make_args(use_vllm=True, generation_kwargs={"stop_token_ids": [4], "seed": 3})
    params = vllm_params(Sampling.from_config(args, tokenizer))
    assert params["stop_token_ids"] == [tokenizer.eos_token_id, 4] and params["seed"] == 3
    args = make_args(use_vllm=True, generation_kwargs={"logprobs": 3})
    with pytest.raises(ValueError, match="generation_kwargs: expected none of logprobs"):
        vllm_params(Sampling.from_config(args, tokenizer))


@pytest.mark.parametrize(
    ("generation", "config", "kwargs", "ends"),
    [
        ([4, 5], 1, {}, {1, 4, 5}),
        (4, 1, {}, {1, 4}),
        (None, [6, 7], {}, {1, 6, 7}),
        ([4], 6, {}, {1, 4}),  # the generation config speaks first
        (None, None, {}, {1}),
        ([-1, 4, 99], 1, {}, {1, 4}),  # such ids are never drawn
        ([4, 5], 1, {"stop_token_ids": [7]}, {1, 4, 5, 7}),
        ([4, 5], 1, {"eos_token_id": 6}, {6}),
        ([4, 5], 1, {"eos_token_id": [6], "stop_token_ids": [7]}, {6, 7}),
    ],
)
def test_ends_of_a_completion(
    make_args, policy, tokenizer, caplog, generation, config, kwargs, ends
):
    policy.generation_config.eos_token_id, policy.config.eos_token_id = generation, config
    args = make_args(generation_kwargs=kwargs)  # which transformers' engines take
    sampling = Sampling.from_config(args, tokenizer, policy)
    assert sampling.eos_token_ids == ends and not sampling.engine_options
    assert vllm_params(sampling)["stop_token_ids"] == sorted(ends)
    strange = generation == [-1, 4, 99]
    assert ("[-1, 99] end nothing, the model has 14 tokens" in caplog.text) == strange


@pytest.mark.parametrize("name", ["eos_token_id", "stop_token_ids"])
@pytest.mark.parametrize("ids", [-1, [14], "1", [True], [[1]]])
def test_ends_that_are_no_tokens(make_args, policy, tokenizer, name, ids):
    args = make_args(generation_kwargs={name: ids})
    with pytest.raises(ValueError, match=rf"generation_kwargs\['{name}'\]: expected ids of tokens"):
        Sampling.from_config(args, tokenizer, policy)


@pytest.mark.parametrize("continuous", [False, True])
def test_completions_end_with_whatever_the_model_names(make_trainer, policy, tokenizer, continuous):
    other = tokenizer.convert_tokens_to_ids("7")
    ends = {tokenizer.eos_token_id, other}  # the first also fills up
    policy.generation_config.eos_token_id = [other]
    seen = []

    def reward(completion_ids, completions, **kwargs):
        seen.extend(zip(completion_ids, completions, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    settings = {"transformers_continuous_batching_config": {"num_blocks": 64}} if continuous else {}
    trainer = make_trainer(
        reward, per_device_train_batch_size=64, max_completion_length=6, max_steps=1,
        mask_truncated_completions=True, use_transformers_continuous_batching=continuous,
        **settings,
    )  # fmt: skip
    trainer.train()
    assert {ids[-1] for ids, _ in seen} > ends  # all ways to end occur, the limit too
    assert not any(ends & set(ids[:-1]) for ids, _ in seen)
    assert all(text == tokenizer.decode(ids).removesuffix("<eos>") for ids, text in seen)
    cut = [ids[-1] not in ends for ids, _ in seen]
    assert logged(trainer, "completions/clipped_ratio") == [pytest.approx(sum(cut) / 64)]
    [batch] = trainer._buffer
    assert (batch.target < 0).all(1).tolist() == cut
    assert batch.num_items == sum(len(ids) for ids, _ in seen if ids[-1] in ends)


def test_a_group_is_one_request():
    a, b = [1, 2], [3]
    assert runs([a, a, b, a, b, b]) == [(a, 2), (b, 1), (a, 1), (b, 2)]
    assert runs([]) == []


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_weights_are_sent_when_they_changed(train, tokenizer, optim):
    engine = BackgroundEngine(tokenizer)
    trainer = train(engine, optim=optim, max_steps=3)
    assert engine.calls == ["update", "generate"] * 3
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert engine.calls[6] == "update" and "update" not in engine.calls[7:]
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(0.5)  # as loading a checkpoint does
    trainer.evaluate(trainer.train_dataset.select(range(1)))
    assert engine.calls[-2:] == ["update", "generate"]


def test_one_generation_for_several_steps_sends_once(train, tokenizer):
    engine = BackgroundEngine(tokenizer)
    train(engine, steps_per_generation=2, num_iterations=2, max_steps=4)
    assert engine.calls == ["update", "generate"]


def test_a_sleeping_engine_gets_weights_anew(policy, tokenizer, make_args):
    engine = BackgroundEngine(tokenizer)
    sampling = Sampling.from_config(make_args(), tokenizer)
    rollouts = Rollouts(engine, lambda: policy, sampling, step=lambda: 0, sleeps=True)
    for _ in range(2):
        rollouts.generate([[3, 4]])
    assert engine.calls == ["wake", "update", "generate", "sleep"] * 2
    rollouts.close()
    assert engine.calls[-1] == "close"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (([[1]],), "expected 2 completions of one token or more, got 1"),
        (([[1], []],), "got 2 with 1 empty ones"),
        (([[1], [2]], [[0.0], [0.0, 0.0]]), "one log-probability per token, got 3 for 2"),
    ],
)
def test_answers_are_checked(make_trainer, tokenizer, monkeypatch, answer, message):
    engine = BackgroundEngine(tokenizer)
    monkeypatch.setattr(engine, "generate", lambda *args: Completions(*answer))
    with pytest.raises(ValueError, match=message):
        make_trainer(engine=engine).rollouts.generate([[1], [2]])


def test_logprobs_of_the_engine_are_those_of_the_policy(train, tokenizer, copied):
    """So they stand at the right tokens, and the weights arrive in every step."""
    engine = BackgroundEngine(tokenizer, copied)
    trainer = train(engine, temperature=0.7, max_steps=3)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx(
        [1.0] * 3, abs=1e-4
    )


@pytest.mark.parametrize(
    "changes, weight",
    [
        ({"vllm_importance_sampling_mode": "token_truncate"}, 2.0),
        ({"vllm_importance_sampling_mode": "token_mask"}, 0.0),
        ({"vllm_importance_sampling_mode": "sequence_truncate"}, 2.0),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, 0.0),
        ({"vllm_importance_sampling_correction": False}, 1.0),
    ],
)
def test_correction(train, tokenizer, copied, changes, weight):
    """A token is e times as likely under the policy as under the engine."""
    settings = {"max_steps": 1, "vllm_importance_sampling_clip_max": 2.0} | changes
    engine = BackgroundEngine(tokenizer, copied)
    engine.noise = -1.0
    trainer = train(engine, **settings)
    [difference] = logged(trainer, "sampling/sampling_logp_difference/mean")
    assert difference == pytest.approx(1.0, abs=1e-4)
    if "vllm_importance_sampling_mode" in changes:
        [ratio] = logged(trainer, "sampling/importance_sampling_ratio/mean")
        assert ratio == pytest.approx(weight, abs=1e-4)
    [norm] = logged(trainer, "grad_norm")
    assert (norm == 0) == (weight == 0)


def test_engines_without_logprobs_are_not_corrected(train, tokenizer):
    trainer = train(BackgroundEngine(tokenizer), max_steps=1)
    assert not any("sampling/" in name for row in trainer.state.log_history for name in row)


def test_an_engine_of_another_package(make_trainer, tokenizer, monkeypatch):
    monkeypatch.setattr("grpo_trainer.rollout.registry.ENGINES", dict(ENGINES))
    made = []

    def factory(context):
        made.append(BackgroundEngine(context.tokenizer))
        return made[0]

    with pytest.raises(ValueError, match="rollout_engine: expected one of transformers, .*'mine'"):
        make_trainer(rollout_engine="mine")
    register_rollout_engine("mine", factory)
    with pytest.raises(ValueError, match="'mine', which is registered"):
        register_rollout_engine("mine", factory)
    make_trainer(rollout_engine="mine", generation_kwargs={"own_option": 1}).train()
    assert made[0].calls == ["update", "generate"] * 2
    assert made[0].sampling.engine_options == {"own_option": 1}


def test_an_engine_is_given_once(train, tokenizer):
    with pytest.raises(ValueError, match="got one beside the vllm_colocate of args"):
        train(BackgroundEngine(tokenizer), use_vllm=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vllm_mode": "remote"}, "vllm_mode: expected one of colocate, server; got 'remote'"),
        ({"vllm_server_port": 70000}, "vllm_server_port: expected a number >= 1 and <= 65535"),
        ({"vllm_server_timeout": 0}, "vllm_server_timeout: expected a number > 0, got 0"),
        ({"vllm_weight_transfer": "pickle"}, "vllm_weight_transfer: expected one of auto, file"),
        ({"vllm_gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization: expected"),
        (
            {"vllm_mode": "server", "vllm_server_base_url": "10.0.0.1:8000"},
            "vllm_server_base_url: expected http://host:port, got '10.0.0.1:8000'",
        ),
        (
            {"vllm_mode": "server", "vllm_enable_sleep_mode": True},
            "vllm_enable_sleep_mode: expected only with vllm_mode='colocate'",
        ),
        ({"vllm_server_port": 9000}, "vllm_server_port: expected only with vllm_mode='server'"),
        ({"cache_implementation": "static"}, "cache_implementation: expected None with use_vllm"),
        ({"rollout_engine": "mine"}, "use_vllm, rollout_engine: expected at most one of them"),
        (
            {"transformers_continuous_batching_config": {"num_blocks": 64}},
            "config: expected only with use_transformers_continuous_batching",
        ),
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode: expected one of token_truncate"),
        (
            {"vllm_importance_sampling_clip_min": 4.0},
            "vllm_importance_sampling_clip_min: expected a number below",
        ),
        (
            {"vllm_importance_sampling_mode": "mask"},
            "sampling_mode: expected one of token_truncate",
        ),
        ({"generation_kwargs": {"max_tokens": 5}}, "expected the field max_completion_length"),
    ],
)
def test_wrong_settings(make_args, changes, message):
    with pytest.raises(ValueError, match=message):
        make_args(use_vllm=True, **changes)


def test_settings_without_effect_are_reported(make_args):
    with pytest.warns(UserWarning, match="vllm_mode|vllm_server_port: no effect without use_vllm"):
        make_args(vllm_server_port=9000)


def test_old_names(make_args):
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_clip_max"):
        args = make_args(vllm_importance_sampling_cap=2.0)
    assert args.vllm_importance_sampling_clip_max == 2.0


def test_continuous_batching(make_trainer):
    def make(settings, **changes) -> GRPOTrainer:
        return make_trainer(
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config=settings,
            **changes,
        )

    trainer = make({"num_blocks": 64, "max_batch_tokens": 64}, temperature=0.7, max_steps=3)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    with pytest.raises(ValueError, match="transformers_continuous_batching_config: .*'blocks'"):
        make({"blocks": 64})


def test_a_server_that_is_not_there(make_trainer):
    settings = {"vllm_mode": "server", "vllm_server_port": 1, "vllm_server_timeout": 0.1}
    with pytest.raises(RuntimeError, match="http://127.0.0.1:1/health: no connection"):
        make_trainer(use_vllm=True, **settings)


def test_vllm_is_not_installed(make_trainer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(ValueError, match="use_vllm: expected vllm to be installed"):
        make_trainer(use_vllm=True)
