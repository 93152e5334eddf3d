"""The comparison of training steps: real trainers, equal work, and no time without a check."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.check import why_wrong
from benchmarks.training.batch import compare, make_reference
from benchmarks.training.measure import Contestant, measure_training
from benchmarks.training.providers import OURS, PROVIDERS, TRL
from benchmarks.training.task import FULL, FULL_GPU, QUICK, choose, make_model

TINY = dataclasses.replace(
    QUICK, hidden=32, intermediate=64, vocabulary=512, prompt_tokens=4, completion_tokens=6
)


def wrong_inputs(batch):
    return OURS.inputs(dataclasses.replace(batch, advantages=1.2 * batch.advantages))


def raising(job):
    raise RuntimeError("broken on purpose")


def raising_later(job):
    trainer = OURS.build(job)
    collect = trainer._collector.train

    def failing(*arguments):
        if trainer.state.global_step == 1:
            raise RuntimeError("broken in the second step")
        return collect(*arguments)

    trainer._collector.train = failing
    return trainer


def dawdling(job):
    """Run the job with shorter completions, so that its steps have less work."""
    return OURS.build(
        dataclasses.replace(job, config=dataclasses.replace(job.config, completion_tokens=5))
    )


BROKEN = {
    "wrong": (dataclasses.replace(OURS, inputs=wrong_inputs), "error of loss 2.0e-01, gradient 2"),
    "raising": (dataclasses.replace(OURS, build=raising), "RuntimeError: broken on purpose"),
    "late": (dataclasses.replace(OURS, build=raising_later), "broken in the second step"),
    "short": (dataclasses.replace(OURS, build=dawdling), "completions of [5.0] tokens; expected 6"),
}
MISSING = dataclasses.replace(OURS, requires=("no-such-package",))


@pytest.fixture(scope="module")
def entry():
    changed = {name: provider for name, (provider, _) in BROKEN.items()} | {"missing": MISSING}
    named = [dataclasses.replace(provider, name=name) for name, provider in changed.items()]
    return measure_training(TINY, "cpu", rounds=1, providers=[*PROVIDERS, *named])


def row_of(entry, name: str):
    return next(row for row in entry.rows if row.provider == name)


def test_the_work_is_said(entry):
    assert entry.tokens == 8 * 6 and entry.dtype == "fp32"


@pytest.mark.parametrize("provider", (OURS, TRL), ids=lambda provider: provider.name)
def test_rows_are_complete_and_losses_agree(entry, provider):
    row = row_of(entry, provider.name)
    if row.absent:
        pytest.skip(row.absent)
    assert row.failure is None
    assert row.errors["loss"] < 1e-5 and row.errors["gradient"] < 1e-5
    (seconds,), phases = row.seconds, row.phases
    assert phases["generate"][0] > 0 and phases["train"][0] > 0
    assert seconds == pytest.approx(phases["generate"][0] + phases["train"][0])
    assert len(row.loss) == 1
    # the same samples, rewards and update: the trainers do the same work
    assert row.grad_norm == pytest.approx(row_of(entry, "ours").grad_norm, rel=1e-4)


@pytest.mark.parametrize("name", ("ours-liger", "trl-liger"))
def test_a_gpu_provider_says_so_on_a_cpu(entry, name):
    row = row_of(entry, name)
    assert row.absent.endswith(("needs a GPU", "liger-kernel")) and row.seconds == []


@pytest.mark.parametrize("name", BROKEN)
def test_the_failure_stands_in_place_of_a_time(entry, name):
    row = row_of(entry, name)
    assert row.seconds == [] and row.phases == {"generate": [], "train": []}
    assert row.absent is None and BROKEN[name][1] in row.failure


def test_what_is_not_installed_is_named(entry):
    row = row_of(entry, "missing")
    assert row.absent == "needs no-such-package"
    assert row.failure is None and row.seconds == []


def test_a_nan_or_a_missing_gradient_fails():
    exact = make_reference(TINY, "cpu")
    model, loss = make_model(TINY), torch.tensor(exact.loss)
    assert "gradient 1.0e+00" in why_wrong(compare(model, loss, exact), "fp32")
    assert "loss nan" in why_wrong(compare(model, loss * float("nan"), exact), "fp32")


def test_patches_stay_with_their_trainer():
    from transformers.models.qwen2 import modeling_qwen2

    seen, own = [], modeling_qwen2.apply_rotary_pos_emb

    def note(contestant):
        seen.append(modeling_qwen2.apply_rotary_pos_emb)
        modeling_qwen2.apply_rotary_pos_emb = len

    first, second = (Contestant(OURS, "cpu") for _ in range(2))
    for each in (first, second, first):
        each.attempt(note)
    assert seen == [own, own, len] and modeling_qwen2.apply_rotary_pos_emb is own


def test_no_round_begins_after_the_deadline():
    entry = measure_training(TINY, "cpu", rounds=3, providers=[OURS], deadline=0.0)
    assert len(row_of(entry, "ours").seconds) == 1


def test_shapes():
    assert choose("cpu", full=False) == choose("cuda", full=False) == QUICK
    assert choose("cpu", full=True) == FULL and choose("cuda", full=True) == FULL_GPU
    with pytest.raises(ValueError, match="micro_batches: expected a divisor of the 8"):
        dataclasses.replace(QUICK, micro_batches=3)
