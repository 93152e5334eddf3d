"""What can be read off a trainer under the names of TRL's."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import TrainerCallback

from grpo_trainer import GRPOTrainer
from grpo_trainer.rewards import think_format_reward
from grpo_trainer.trl_names import TrainerAttributes
from tests.support.trainer import BackgroundEngine, lengths_reward

# what a callback may set, and another value of each
SET = {
    "beta": 0.3, "entropy_coef": 0.01, "epsilon_low": 0.1, "epsilon_high": 0.4, "min_p": 0.1,
    "off_policy_mask_threshold": 3.0, "repetition_penalty": 1.1, "temperature": 0.5, "top_k": 5,
    "top_entropy_quantile": 0.5, "top_p": 0.9,
}  # fmt: skip
OF_SAMPLING = ("min_p", "repetition_penalty", "temperature", "top_k", "top_p")


class SetAfter(TrainerCallback):
    """Sets attributes of its trainer after a step."""

    def __init__(self, step: int, values: dict[str, object]) -> None:
        self.step = step
        self.values = values
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        for name, value in self.values.items() if state.global_step == self.step else ():
            setattr(self.trainer, name, value)


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


def test_all_can_be_read_and_settings_of_the_run_not_set(make_trainer):
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
    for name in values.keys() - SET.keys():
        with pytest.raises(AttributeError):
            setattr(trainer, name, values[name])


@pytest.fixture
def train_with(make_trainer, tmp_path):
    """Train, setting attributes after a step; return the trainer and what each batch went by."""

    def run(step, values, resume=None, **changes):
        callback, seen = SetAfter(step, values), []

        class Watched(GRPOTrainer):
            def _compute_loss(self, model, inputs):
                sampling, loss = self.rollouts.sampling, self.loss_config
                seen.append((sampling.temperature, loss.temperature, loss.beta))
                return super()._compute_loss(model, inputs)

        settings = {"output_dir": str(tmp_path / "run"), "beta": 0.1, "max_steps": 4}
        trainer = make_trainer(callbacks=[callback], kind=Watched, **settings | changes)
        callback.trainer = trainer
        trainer.train(resume_from_checkpoint=resume)
        return trainer, seen

    return run


def test_a_callback_sets_them_between_steps(train_with):
    trainer, seen = train_with(2, SET)
    assert {name: getattr(trainer, name) for name in SET} == SET
    assert seen == [(1.0, 1.0, 0.1)] * 2 + [(0.5, 0.5, 0.3)] * 2
    loss, sampling = trainer.loss_config, trainer.rollouts.sampling
    assert (loss.entropy_coef, loss.surrogate.epsilon, loss.surrogate.epsilon_high) == (
        0.01, 0.1, 0.4,
    )  # fmt: skip
    assert all(getattr(sampling, name) == SET[name] for name in OF_SAMPLING)
    assert trainer.args.beta == 0.1  # what the run began with


def test_completions_are_trained_on_by_the_values_they_were_drawn_by(train_with):
    _, seen = train_with(1, {"temperature": 0.5}, num_iterations=2)
    assert [each[:2] for each in seen] == [(1.0, 1.0)] * 2 + [(0.5, 0.5)] * 2


@pytest.mark.parametrize("iterations", [1, 3])
def test_a_resumed_run_goes_by_what_was_set(train_with, tmp_path, iterations):
    """With 3 iterations the checkpoint lies between the setting and its effect."""
    values = {"temperature": 0.5, "beta": 0.3}
    changes = {"num_iterations": iterations, "save_steps": 2, "save_strategy": "steps"}
    straight, seen = train_with(2, values, **changes, output_dir=str(tmp_path / "straight"))
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    resumed, rest = train_with(0, {}, checkpoint, **changes, output_dir=str(tmp_path / "straight"))
    assert rest == seen[2:] and resumed.beta == 0.3
    for name, weight in straight.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value", "changes", "message"),
    [
        ("temperature", 0, {}, "temperature: expected .* got 0"),
        ("top_p", 2.0, {}, "top_p: expected .* got 2.0"),
        ("beta", -1.0, {}, "beta: expected .* got -1.0"),
        ("beta", 0.1, {"beta": 0.0}, "beta: expected 0 in a run that began with it"),
        (
            "entropy_coef", 0.1, {"use_adaptive_entropy": True},
            "entropy_coef: expected no other value with use_adaptive_entropy, got 0.1",
        ),
    ],
)  # fmt: skip
def test_values_that_cannot_be_set(make_trainer, name, value, changes, message):
    trainer = make_trainer(**{"beta": 0.1} | changes)
    before = getattr(trainer, name)
    with pytest.raises(ValueError, match=message):
        setattr(trainer, name, value)
    assert getattr(trainer, name) == before


def test_sampling_stays_with_overlap(make_trainer, tokenizer):
    trainer = make_trainer(engine=BackgroundEngine(tokenizer), generation_batches_ahead=1)
    with pytest.raises(ValueError, match="top_p: .* with generation_batches_ahead, .* got 0.9"):
        trainer.top_p = 0.9
    trainer.epsilon_low = 0.1
    assert trainer.epsilon_low == 0.1
