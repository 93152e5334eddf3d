"""What can be read off a trainer under the names of TRL's, and changed while a run goes on."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from transformers import TrainerCallback

from grpo_trainer import GRPOTrainer
from grpo_trainer.monitor import LogprobDoubt
from grpo_trainer.rewards import think_format_reward
from grpo_trainer.trl_names import TrlNames
from tests.support.trainer import BackgroundEngine, lengths_reward

# what can change, and another value of each
CHANGES = {
    "beta": 0.3, "entropy_coef": 0.01, "epsilon": 0.1, "epsilon_high": 0.4, "min_p": 0.1,
    "off_policy_mask_threshold": 3.0, "repetition_penalty": 1.1, "temperature": 0.5, "top_k": 5,
    "top_entropy_quantile": 0.5, "top_p": 0.9,
}  # fmt: skip
OF_SAMPLING = ("min_p", "repetition_penalty", "temperature", "top_k", "top_p")


class ChangeAfter(TrainerCallback):
    """Changes settings of its trainer after a step."""

    def __init__(self, step: int, values: dict[str, object]) -> None:
        self.step = step
        self.values = values
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer.change(**self.values)


def public(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if isinstance(value, property)]


@pytest.mark.parametrize("name", public(TrlNames))
def test_names_are_those_of_trl(name):
    trl = pytest.importorskip("trl")
    assert f"self.{name} = " in inspect.getsource(trl.GRPOTrainer.__init__)


def test_fields_of_the_configuration_can_be_read(make_trainer):
    trainer = make_trainer(
        [think_format_reward, lengths_reward],
        reward_weights=[1.0, 0.5],
        beta=0.1,
        epsilon_high=0.3,
        loss_type="gspo",
        temperature=0.7,
    )
    expected = {
        "beta": 0.1, "epsilon_low": 0.2, "epsilon_high": 0.3, "temperature": 0.7,
        "num_generations": 4, "max_completion_length": 4, "use_vllm": False, "loss_type": "gspo",
        "reward_weights": [1.0, 0.5], "environments": None, "tools": [],
        "reward_func_names": ["think_format_reward", "lengths_reward"],
        "reward_funcs": [think_format_reward, lengths_reward],
    }  # fmt: skip
    assert {name: getattr(trainer, name) for name in expected} == expected
    assert trainer.ref_model.training is False
    with pytest.raises(AttributeError, match="GRPOTrainer has no attribute 'num_generation'"):
        _ = trainer.num_generation


@pytest.mark.parametrize("name", [*CHANGES, "epsilon_low"])
def test_an_assignment_is_an_error(make_trainer, name):
    trainer, field = make_trainer(), name.removesuffix("_low")
    with pytest.raises(AttributeError, match=rf"{name}: expected trainer.change\({field}=0.5\)"):
        setattr(trainer, name, 0.5)


@pytest.fixture
def train_with(make_trainer, tmp_path):
    """Train, changing settings after a step; return the trainer and what each batch went by."""

    def run(step, values, resume=None, **changes):
        callback, seen = ChangeAfter(step, values), []

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


def test_settings_change_between_steps(train_with):
    trainer, seen = train_with(2, CHANGES)
    assert {name: getattr(trainer, name) for name in CHANGES} == CHANGES
    assert seen == [(1.0, 1.0, 0.1)] * 2 + [(0.5, 0.5, 0.3)] * 2
    loss, sampling = trainer.loss_config, trainer.rollouts.sampling
    assert (loss.entropy_coef, loss.surrogate.epsilon, loss.surrogate.epsilon_high) == (
        0.01, 0.1, 0.4,
    )  # fmt: skip
    assert all(getattr(sampling, name) == CHANGES[name] for name in OF_SAMPLING)
    assert trainer.args.beta == 0.1  # what the run began with


def test_completions_are_trained_on_by_the_values_they_were_sampled_by(train_with):
    _, seen = train_with(1, {"temperature": 0.5}, num_iterations=2)
    assert [each[:2] for each in seen] == [(1.0, 1.0)] * 2 + [(0.5, 0.5)] * 2


@pytest.mark.parametrize("iterations", [1, 3])
def test_a_resumed_run_goes_by_what_was_changed(train_with, tmp_path, iterations):
    """With 3 iterations the checkpoint lies between the change and its effect."""
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
        ("beta", 0.1, {"beta": 0.0}, "beta: expected 0, since the run started with 0"),
        ("num_generations", 8, {}, "num_generations: expected one of temperature, .* can change"),
        ("temprature", 1, {}, r"temprature: expected one of .* \(is it temperature\?\)"),
        (
            "entropy_coef", 0.1, {"use_adaptive_entropy": True},
            "entropy_coef: expected no change with use_adaptive_entropy, got 0.1",
        ),
    ],
)  # fmt: skip
def test_changes_that_cannot_be_made(make_trainer, name, value, changes, message):
    trainer = make_trainer(**{"beta": 0.1} | changes)
    before = vars(trainer.settings.args).copy()
    with pytest.raises(ValueError, match=message):
        trainer.change(top_k=3, **{name: value})
    assert vars(trainer.settings.args) == before


def test_sampling_stays_with_overlap(make_trainer, tokenizer):
    trainer = make_trainer(engine=BackgroundEngine(tokenizer), generation_batches_ahead=1)
    with pytest.raises(ValueError, match="top_p: .* with generation_batches_ahead, .* got 0.9"):
        trainer.change(top_p=0.9)
    trainer.change(epsilon=0.1)
    assert trainer.epsilon_low == 0.1


def test_a_warning_about_log_probabilities_follows_the_loss(make_trainer):
    trainer = make_trainer(vllm_importance_sampling_correction=False)
    [doubt] = [x for x in trainer.callback_handler.callbacks if isinstance(x, LogprobDoubt)]
    assert doubt._most_gain() == math.inf  # the loss reads none
    trainer.change(off_policy_mask_threshold=0.5)
    trainer._follow_settings()
    assert doubt._most_gain() == 0
