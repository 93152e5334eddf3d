"""Which names are logged when, that they reach the trackers, and that rewards without a value do
not count."""

from __future__ import annotations

import copy
import math
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pyarrow import parquet

from grpo_kernels.losses import Metrics
from grpo_trainer.engines import Completions, RolloutEngine
from grpo_trainer.experience import compute_advantages, rollout_metrics
from grpo_trainer.monitor import is_own_metric, phase
from tests.support.trainer import CannedEngine

SAMPLING = {
    "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/max",
    "sampling/mismatch_kl_k3", "entropy/sequence_min", "entropy/sequence_max",
}  # fmt: skip


class Reporting(CannedEngine, RolloutEngine):
    """Tells log-probabilities."""

    def generate(self, prompt_ids, *args, **kwargs):
        ids = super().generate(prompt_ids).token_ids
        return Completions(ids, [[-2.0] * len(row) for row in ids])

    def update_weights(self, weights):
        for _ in weights():
            pass


def bytes_of(model) -> int:
    """Return the bytes of a checkpoint, in which a tied head has a name of its own."""
    return sum(value.nbytes for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"num_iterations": 2}, {"clip_ratio/region_mean", "profiling/old"}),
        ({"beta": 0.1, "loss_type": "cispo"}, {"cispo_clip_ratio", "kl", "profiling/ref"}),
        ({"loss_type": "vespo", "use_adaptive_entropy": True}, {"policy_loss", "entropy_coef"}),
        (
            {"backward": "sparse", "backward_tolerance": 0.1},
            {"backward_error", "backward_error_bound"},
        ),
    ],
    ids=["iterations", "kl", "entropy", "bounded"],
)
def test_names_that_trl_does_not_log(make_trainer, tokenizer, changes, more):
    settings = {"max_steps": 2, "logging_steps": 2, "vllm_importance_sampling_mode": "token_mask"}
    trainer = make_trainer(engine=Reporting(tokenizer), **settings | changes)
    trainer.train()
    [row] = [row for row in trainer.state.log_history if "loss" in row]
    assert SAMPLING | more <= set(row)
    rows = trainer.state.log_history
    assert [name for row in rows for name in row if not is_own_metric(name)] == []
    assert ("kl" in row) == ("kl" in more) and ("profiling/old" in row) == ("profiling/old" in more)
    assert row["weight_update_bytes"] == bytes_of(trainer.model)
    total = sum(value for name, value in row.items() if name.startswith("profiling/"))
    assert row["step_time"] == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("steps", [7, 3])
def test_the_last_row_has_what_came_after_the_one_before(make_trainer, steps):
    def reward(completions, trainer_state, **kwargs):
        return [float(trainer_state.global_step)] * len(completions)

    settings = {"max_steps": steps, "logging_steps": 5, "log_completions": True}
    trainer = make_trainer(reward, engine=CannedEngine(), **settings, num_completions_to_print=0)
    trainer.train()
    rows = trainer.state.log_history
    assert [row["step"] for row in rows] == ([5, 7] if steps == 7 else [3])
    taken = range(5, 7) if steps == 7 else range(3)
    last = rows[-1]
    assert last["reward"] == last["rewards/reward/mean"] == sum(taken) / len(taken)
    assert {"loss", "entropy", "step_time", "train_loss", "train_runtime"} <= set(last)
    folder = Path(trainer.args.output_dir) / "completions"
    tables = [parquet.read_table(path).to_pydict() for path in sorted(folder.iterdir())]
    assert [sorted(set(table["reward"])) for table in tables] == [
        *([[0.0, 1.0, 2.0, 3.0, 4.0]] if steps == 7 else []),
        list(map(float, taken)),
    ]


def test_a_run_that_goes_on_from_its_end_logs_nothing_twice(make_trainer, policy):
    def run(steps, **resume):
        settings = {"logging_steps": 2, "log_completions": True, "num_completions_to_print": 0}
        settings |= {"save_strategy": "steps", "lr_scheduler_type": "constant"}
        model = copy.deepcopy(policy)
        trainer = make_trainer(model=model, engine=CannedEngine(), max_steps=steps, **settings)
        trainer.train(**resume)
        return trainer

    run(3)
    longer = run(5, resume_from_checkpoint=True)
    assert [row["step"] for row in longer.state.log_history] == [2, 4, 5]
    folder = Path(longer.args.output_dir) / "completions"
    rows = {path.stem[-1]: parquet.read_metadata(path).num_rows for path in folder.iterdir()}
    assert rows == {"2": 8, "3": 4, "4": 4, "5": 4}


def test_a_run_after_one_that_failed_starts_with_an_empty_log(make_trainer):
    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 1 and not failed:
            failed.append(True)
            raise KeyboardInterrupt
        return [float(trainer_state.global_step)] * len(completions)

    failed: list[bool] = []
    trainer = make_trainer(reward, max_steps=2, logging_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 0.5


@pytest.mark.parametrize("name", ["kl", "rewards/mine/mean", "eval_mine"])
def test_the_trainers_names_are_taken(make_trainer, name):
    def reward(completions, log_metric, **kwargs):
        log_metric(name, 7.0)
        return [0.0] * len(completions)

    message = f"log_metric: expected a new name, got '{name}', which the trainer logs"
    with pytest.raises(RuntimeError, match=message):
        make_trainer(reward, max_steps=1).train()


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
    assert not any("profiling" in name or "step_time" in name for name in evaluation)
    assert evaluation["eval_num_tokens"] == row["num_tokens"] > 0  # those trained on, as in TRL
    assert evaluation["eval_calls"] == pytest.approx(
        sum(range(3, len(calls) + 1)) / (len(calls) - 2)
    )


def test_lengths_of_several_generation_batches():
    """Extremes and means are those of all completions, not means of the batches'."""
    compared = compute_advantages(torch.zeros(2, 1), torch.ones(1), 2)
    batches = [
        rollout_metrics(
            ["r"], torch.zeros(2, 1), compared, torch.tensor(lengths), torch.tensor(cut)
        )
        for lengths, cut in (([1.0, 5.0], [0.0, 1.0]), ([3.0, 4.0], [1.0, 1.0]))
    ]
    merged = Metrics.merge(batches)
    found = {name: float(merged[f"completions/{name}_length"]) for name in ("min", "max", "mean")}
    assert found == {"min": 1, "max": 5, "mean": 13 / 4}
    assert all(merged[f"completions/{name}_terminated_length"] == 1 for name in found)


def test_the_rate_of_completions(make_trainer, monkeypatch):
    """Tokens of a generation batch over the seconds since that before; the first has no rate."""
    clock = SimpleNamespace(perf_counter=partial(next, count(10.0, 2.5)))
    monkeypatch.setattr("grpo_trainer.trainer.time", clock)
    tokens = []

    def counting(completion_ids, **kwargs):
        tokens.append(sum(map(len, completion_ids)))
        return [0.0] * len(completion_ids)

    trainer = make_trainer(counting, engine=CannedEngine(), max_steps=4, steps_per_generation=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    rates = [row.get("completions/tokens_per_second") for row in rows]
    assert rates == [None, None, pytest.approx(tokens[1] / 2.5), None]


def test_seconds_are_counted_once(make_trainer):
    """Not as the phase around it, too; and on average over the steps."""

    def slow(completions, **kwargs):
        with phase("sync"):
            time.sleep(0.4)
        return [0.0] * len(completions)

    trainer = make_trainer(slow, max_steps=2, logging_steps=2)
    start = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - start  # by the clock of the phases
    row = trainer.state.log_history[0]
    assert 0.4 <= row["profiling/sync"] < row["step_time"] <= whole / 2


def test_tensorboard_gets_them(make_trainer, tmp_path, monkeypatch):
    module = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(module).EventAccumulator(str(tmp_path / "events"))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = make_trainer(report_to="tensorboard", eval_strategy="steps", eval_steps=2)
    trainer.train()
    names = set(events.Reload().Tags()["scalars"])
    assert {"train/reward", "train/profiling/generate", "eval/reward", "eval/entropy"} <= names
    logged = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert [item.value for item in events.Scalars("train/reward")] == pytest.approx(logged)
