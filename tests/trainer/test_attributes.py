"""What can be read off a trainer under the names of TRL's."""

from __future__ import annotations

import inspect

import pytest
from transformers import Qwen3ForSequenceClassification

from grpo_trainer.attributes import TrainerAttributes
from grpo_trainer.rewards import get_soft_overlong_punishment, think_format_reward


def public(kind: type) -> list[str]:
    return [
        name
        for name, value in vars(kind).items()
        if isinstance(value, property) and not name.startswith("_")
    ]


# vllm_client is the name that trainers before TRL 1.0 had
@pytest.mark.parametrize("name", sorted({*public(TrainerAttributes)} - {"vllm_client"}))
def test_names_are_those_of_trl(name):
    trl = pytest.importorskip("trl")
    assert f"self.{name} = " in inspect.getsource(trl.GRPOTrainer.__init__)


def test_all_can_be_read_and_none_set(make_trainer):
    trainer = make_trainer(beta=0.1, epsilon_high=0.3, loss_type="gspo", temperature=0.7)
    values = {name: getattr(trainer, name) for name in public(TrainerAttributes)}
    expected = {
        "beta": 0.1, "epsilon_low": 0.2, "epsilon_high": 0.3, "temperature": 0.7,
        "importance_sampling_level": "sequence", "num_generations": 4, "num_generations_eval": 4,
        "max_completion_length": 4, "use_vllm": False, "entropy_coef": 0.0,
        "reward_func_names": ["digits_reversal_reward"], "reward_processing_classes": [None],
        "eos_token_ids": [trainer.processing_class.eos_token_id], "loss_type": "gspo",
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert values["ref_model"].training is False
    for name in values:
        with pytest.raises(AttributeError):
            setattr(trainer, name, values[name])


def test_rewards(make_trainer, policy, tokenizer):
    judge = Qwen3ForSequenceClassification(
        policy.config.__class__(**{**policy.config.to_dict(), "num_labels": 1})
    )
    punishment = get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
    trainer = make_trainer(
        [think_format_reward, judge, punishment],
        reward_weights=[1.0, 0.5, 0.25],
        reward_processing_classes=[None, tokenizer, None],
    )
    assert trainer.reward_funcs == [think_format_reward, judge, punishment]
    assert trainer.reward_funcs[2].__name__ == "soft_overlong_punishment_reward"
    assert trainer.reward_func_names[0] == "think_format_reward"
    assert trainer.reward_processing_classes == [None, tokenizer, None]
    assert trainer.reward_weights.tolist() == [1.0, 0.5, 0.25]
