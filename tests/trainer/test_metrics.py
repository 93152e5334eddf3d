"""Which names are logged when, that they reach the trackers, and that rewards without a value do
not count."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from trainer_helpers import CannedEngine

from grpo_trainer.config_checks import get_available_reporting_integrations
from grpo_trainer.rollout import Completions

ALWAYS = {
    "num_tokens", "step_time", "reward", "reward_std", "frac_reward_zero_std", "entropy", "loss",
    "entropy/sequence_min", "entropy/sequence_max",
    "rewards/digits_reversal_reward/mean", "rewards/digits_reversal_reward/std",
    "completions/clipped_ratio",
    *(f"completions/{kind}_length" for kind in ("mean", "min", "max")),
    *(f"completions/{kind}_terminated_length" for kind in ("mean", "min", "max")),
    "profiling/generate", "profiling/score", "profiling/sync", "profiling/loss",
}  # fmt: skip
CLIP = {
    "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max",
    "clip_ratio/region_mean",
}  # fmt: skip
SAMPLING = {
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max", "sampling/mismatch_kl_k3",
}  # fmt: skip


class Reporting(CannedEngine):
    """Tells log-probabilities."""

    def generate(self, prompt_ids, *args):
        ids = super().generate(prompt_ids).token_ids
        return Completions(ids, [[-2.0] * len(row) for row in ids])

    def update_weights(self, weights):
        for _ in weights():
            pass


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"loss_type": "dapo", "num_iterations": 2}, CLIP | {"profiling/old"}),
        ({"loss_type": "grpo", "beta": 0.1}, CLIP | {"kl", "profiling/ref"}),
        ({"loss_type": "cispo"}, {"cispo_clip_ratio"}),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
            {"vespo/phi_seq_mean"},
        ),
        ({"entropy_coef": 0.1}, CLIP | {"policy_loss"}),
        ({"use_adaptive_entropy": True}, {"policy_loss", "entropy_coef"}),
    ],
    ids=lambda value: value.get("loss_type", next(iter(value))) if isinstance(value, dict) else "",
)
def test_names(make_trainer, changes, more):
    trainer = make_trainer(max_steps=2, logging_steps=2, max_completion_length=6, **changes)
    trainer._collector._rollouts._engine = Reporting(trainer.processing_class)
    trainer.train()
    [row] = [row for row in trainer.state.log_history if "loss" in row]
    assert ALWAYS | SAMPLING | more <= set(row)
    assert ("kl" in row) == ("kl" in more) and ("profiling/old" in row) == ("profiling/old" in more)
    low, mean, high = (row[n] for n in ("entropy/sequence_min", "entropy", "entropy/sequence_max"))
    assert low < mean < high


def test_missing_rewards_do_not_count(make_trainer):
    """Means are over the completions that have a reward, over the window that is logged."""
    calls = []

    def sometimes(completions, log_metric, **kwargs):
        calls.append(len(completions))
        log_metric("calls", len(calls))
        return [None, float(len(calls)), None, 3.0]

    trainer = make_trainer(sometimes, max_steps=2, logging_steps=2)
    trainer.train()
    [row] = [row for row in trainer.state.log_history if "loss" in row]
    assert row["rewards/sometimes/mean"] == pytest.approx((1 + 3 + 2 + 3) / 4)
    assert row["reward_std"] == pytest.approx((math.sqrt(2) + math.sqrt(0.5)) / 2)
    assert row["calls"] == 1.5
    evaluation = trainer.evaluate()
    assert evaluation["eval_calls"] == pytest.approx(
        sum(range(3, len(calls) + 1)) / (len(calls) - 2)
    )


def test_tensorboard_gets_them(make_trainer, tmp_path, monkeypatch):
    if "tensorboard" not in get_available_reporting_integrations():
        pytest.skip("tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = make_trainer(report_to="tensorboard", eval_strategy="steps", eval_steps=2)
    trainer.train()
    [folder] = {path.parent for path in Path(tmp_path / "events").rglob("events.*")}
    events = EventAccumulator(str(folder)).Reload()
    names = set(events.Tags()["scalars"])
    assert {"train/reward", "train/profiling/generate", "eval/reward", "eval/entropy"} <= names
    logged = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert [item.value for item in events.Scalars("train/reward")] == pytest.approx(logged)
