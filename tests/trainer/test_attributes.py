"""What can be read off a trainer under the names of TRL's."""

from __future__ import annotations

import inspect

import pytest

from grpo_trainer.rewards import think_format_reward
from grpo_trainer.trl_names import TrainerAttributes
from tests.support.trainer import lengths_reward


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
    trainer = make_trainer(
        [think_format_reward, lengths_reward],
        reward_weights=[1.0, 0.5],
        beta=0.1,
        epsilon_high=0.3,
        loss_type="gspo",
        temperature=0.7,
    )
    values = {name: getattr(trainer, name) for name in public(TrainerAttributes)}
    expected = {
        "beta": 0.1, "epsilon_low": 0.2, "epsilon_high": 0.3, "temperature": 0.7,
        "importance_sampling_level": "sequence", "num_generations": 4, "num_generations_eval": 4,
        "max_completion_length": 4, "use_vllm": False, "entropy_coef": 0.0,
        "reward_func_names": ["think_format_reward", "lengths_reward"],
        "reward_funcs": [think_format_reward, lengths_reward],
        "reward_processing_classes": [None, None],
        "eos_token_ids": [trainer.processing_class.eos_token_id], "loss_type": "gspo",
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert values["ref_model"].training is False
    assert values["reward_weights"].tolist() == [1.0, 0.5]
    for name in values:
        with pytest.raises(AttributeError):
            setattr(trainer, name, values[name])
