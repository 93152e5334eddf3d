"""Micro-batches of at most so many tokens: the loss, its gradient and the log are those of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_kernels.losses import AGGREGATIONS, LOSSES
from grpo_trainer import GRPOTrainer
from grpo_trainer.data import MicroBatch
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.experience.parts import computed_tokens, cut_rows, halved
from tests.support import tools
from tests.support.trainer import BackgroundEngine, lengths_reward, logged, parameters
from tests.trainer.features import agents, images, mixture, resumable, teacher

BUDGET = 24
# of how the batch is cut, and of rounding in fp32 tables
OF_CUT = ("frac_rows_skipped", "micro_batches/number", "micro_batches/padding")
OF_CUT += ("micro_batches/shared_tokens",)
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "weight_decay": 0.0}
WHOLE = {"per_device_train_batch_size": 8}
CUT = WHOLE | {"max_tokens_per_micro_batch": BUDGET}
TWO_MICRO_STEPS = CUT | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
PADDED = CUT | {"max_tokens_per_micro_batch": 16, "pad_to_multiple_of": 8}
OF_LOSS = {
    "trm": {"trm_threshold": 0.5},
    "vaco": {"vaco_threshold": 0.5},
    "cispo": {"epsilon_high": 5.0},
    "bnpo": {"use_adaptive_entropy": True, "entropy_target": 9.0},
}


def lengths_of(batch: MicroBatch) -> list[int]:
    lengths: list[int] = batch.attention_mask.sum(1).tolist()
    return lengths


def taken_by(batch: MicroBatch) -> int:
    """Return how many tokens a budget counts."""
    return batch.input_ids.numel() if batch.owners is None else batch.packed.numel()


def kept_of(batch: MicroBatch) -> int:
    """Return how many of these are no padding."""
    if batch.owners is None:
        return sum(lengths_of(batch))
    return int((batch.packed < batch.input_ids.numel()).sum())


def varied(row: int) -> str:
    return "7" * (1 + row * 5 % 8) + "="


def uneven(completion_ids, prompts, **kwargs):
    """Reward one group alike, so that it has no advantage."""
    values = zip(completion_ids, prompts, strict=True)
    return [1.0 if len(prompt) > 8 else len(ids) + ids[0] % 3 for ids, prompt in values]


def made(folder: Path, changes: dict[str, Any]) -> GRPOTrainer:
    """Return a trainer of a policy in fp64, whose engine reports log-probabilities of its own."""
    tokenizer = make_tokenizer()
    model = make_policy(tokenizer, seed=0).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    engine = BackgroundEngine(tokenizer, make_policy(tokenizer, seed=0).eval())
    engine.noise = 0.05
    usual = {
        "model": model, "rollout_engine": engine, "reward_funcs": uneven, "shuffle_dataset": False,
        "train_dataset": Dataset.from_list([{"prompt": varied(row)} for row in range(16)]),
        "max_steps": 2, "num_iterations": 2, "save_strategy": "no", "log_completions": False,
        "vllm_importance_sampling_mode": "token_mask", "packing": "padded", **SGD,
    }  # fmt: skip
    return resumable(usual | changes, folder)


def trained(folder: Path, changes: dict[str, Any]) -> tuple[GRPOTrainer, list[dict[str, float]]]:
    """Train, and return the trainer with what it logged of each step."""
    trainer = made(folder, changes)
    trainer.train()
    return trainer, [row for row in logged(trainer) if "loss" in row]


def assert_same(
    folder: Path, make: Callable[[], dict[str, Any]], *cuts: dict[str, Any], rtol: float = 1e-7
) -> None:
    """Compare runs that are cut with one that is not."""
    whole = made(folder / "whole", make() | WHOLE)
    start = parameters(whole.model)
    whole.train()
    assert len(whole._buffer.batches) == 1
    step = parameters(whole.model) - start
    assert step.norm() > 1e-3
    for number, cut in enumerate(cuts):
        pieces, found = trained(folder / f"cut {number}", make() | cut)
        assert len(pieces._buffer.batches) > 1
        rows = [length for batch in pieces._buffer.batches for length in lengths_of(batch)]
        assert sorted(rows) == sorted(lengths_of(whole._buffer.batches[0]))
        assert (start + step - parameters(pieces.model)).norm() < rtol * step.norm()
        assert_logs_are_alike(pieces, found, whole)
        computed = sum(taken_by(batch) for batch in pieces._buffer.batches)
        kept = sum(kept_of(batch) for batch in pieces._buffer.batches)
        assert found[0]["micro_batches/number"] == len(pieces._buffer.batches)
        assert found[0]["micro_batches/padding"] == pytest.approx(1 - kept / computed)
        if pieces.args.packing == "auto":
            assert kept < sum(rows)
            shared = found[0]["micro_batches/shared_tokens"]
            assert shared == pytest.approx(1 - kept / sum(rows))


def assert_logs_are_alike(
    pieces: GRPOTrainer, found: list[dict[str, float]], whole: GRPOTrainer
) -> None:
    expected = [row for row in logged(whole) if "loss" in row]
    assert len(found) == len(expected) == 2
    steps = pieces.args.gradient_accumulation_steps
    for row, one in zip(found, expected, strict=True):
        if "policy_loss" in one and not pieces.loss_config.aggregation.per_micro_batch:
            one["policy_loss"] /= steps  # as in TRL it is that of a micro-step
        assert row.keys() - set(OF_CUT) == one.keys() - set(OF_CUT)
        for name in one.keys() - set(OF_CUT):
            assert row[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name


def test_packed_rows_and_shared_prompts(tmp_path: Path) -> None:
    """Positions enter in fp32, at other places of the packed rows."""
    cuts = (CUT, TWO_MICRO_STEPS)
    assert_same(tmp_path, lambda: {"packing": "auto", "beta": 0.1}, *cuts, rtol=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss(tmp_path: Path, loss_type: str) -> None:
    settings = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.1}
    assert_same(tmp_path, lambda: settings | OF_LOSS.get(loss_type, {}), TWO_MICRO_STEPS)


@pytest.mark.parametrize("excludes", (False, True))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation(tmp_path: Path, aggregation: str, excludes: bool) -> None:
    if excludes and AGGREGATIONS[aggregation].counts_tokens:
        return  # an error with any micro-batches
    settings = {"loss_aggregation": aggregation, "exclude_zero_variance": excludes}
    cuts = (CUT,) if excludes else (CUT, PADDED)
    terms = {"loss_type": "grpo", "entropy_coef": 0.1} if excludes else {"loss_type": "grpo"}
    assert_same(tmp_path, lambda: settings | terms, *cuts)


@pytest.mark.parametrize("aggregation", ("prompt_mean", "sequence_mean"))
def test_a_prompt_without_variance_counts_in_no_mean(tmp_path: Path, aggregation: str) -> None:
    """One of two prompts: without it the update is twice as large."""
    settings = {"loss_aggregation": aggregation, "max_steps": 1, "num_iterations": 1} | WHOLE
    start, *ends = (
        parameters(trainer.model)
        for trainer in (
            made(tmp_path / "start", settings),
            trained(tmp_path / "all", settings)[0],
            trained(tmp_path / "left_out", settings | {"exclude_zero_variance": True})[0],
        )
    )
    whole, without = (end - start for end in ends)
    assert whole.norm() > 1e-3
    torch.testing.assert_close(without, 2 * whole, rtol=1e-6, atol=1e-12)


def by_ids(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def masked() -> dict[str, Any]:
    tokenizer = make_tokenizer()
    engine = BackgroundEngine(tokenizer, make_policy(tokenizer, seed=0).eval(), masks=True)
    settings = {"use_sampling_mask": True, "top_k": 5, "beta": 0.1}
    return settings | {"rollout_engine": engine, "mask_truncated_completions": True}


def advantages_of_tokens(rewards, weights, group_size, completion_ids):
    return [
        [n - rewards[row].item() for n, _ in enumerate(ids)]
        for row, ids in enumerate(completion_ids)
    ]


def taught(kind: str, **changes: Any) -> dict[str, Any]:
    return {"teacher": teacher(14).double(), "distillation": kind} | changes


# what a run has besides, its budget, and how exactly it is the same
WITH = {
    "tools": (
        lambda: agents(tools=[tools.add], reward_funcs=by_ids), 400, 1e-3,
    ),
    "images": (
        lambda: images(beta=0.1, rollout_engine=None, reward_funcs=lengths_reward), 92, 1e-3,
    ),
    "a teacher's log-probabilities": (
        lambda: taught("logprobs", advantages=advantages_of_tokens), BUDGET, 1e-7,
    ),
    "a teacher's distributions": (lambda: taught("jsd"), BUDGET, 1e-7),
    "a sampling mask": (masked, BUDGET, 1e-7),
}  # fmt: skip


@pytest.mark.parametrize("feature", WITH)
def test_with(tmp_path: Path, feature: str) -> None:
    make, budget, rtol = WITH[feature]
    assert_same(tmp_path, make, CUT | {"max_tokens_per_micro_batch": budget}, rtol=rtol)


def test_the_loss_of_routers_counts_alike(tmp_path: Path) -> None:
    changes = {"model": mixture, "router_aux_loss_coef": 0.5, "rollout_engine": None}
    changes["reward_funcs"] = lambda prompts, **_: [1.0] * 8
    _, [first, _] = trained(tmp_path, changes | CUT)
    assert first["micro_batches/number"] > 2
    assert first["loss"] == pytest.approx(0.5 * first["aux_loss"], rel=1e-5) and first["loss"] > 0


def test_a_micro_step_syncs_gradients_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last micro-batch, and the optimizer steps after the last of a step."""
    trainer = made(tmp_path, TWO_MICRO_STEPS)
    syncs: list[bool] = []
    backward = trainer.accelerator.backward

    def noted(loss: Any, **options: Any) -> None:
        syncs.append(trainer.accelerator.sync_gradients)
        backward(loss, **options)

    monkeypatch.setattr(trainer.accelerator, "backward", noted)
    trainer.train()
    count = len(trainer._buffer.batches)
    assert count > 2 and syncs == 2 * [*[False] * (count - 1), True]


def test_micro_batches_keep_to_the_budget(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 1}
    trainer, rows = trained(tmp_path, CUT | changes | {"per_device_train_batch_size": 8})
    batches = trainer._buffer.batches
    assert len(batches) > 4 and len(rows) == 2
    half = len(batches) // 2
    for part in (batches[:half], batches[half:]):  # of an optimizer step each
        assert sum(len(batch.input_ids) for batch in part) == 16
        lengths = [length for batch in part for length in lengths_of(batch)]
        assert lengths == sorted(lengths, reverse=True)
        assert sum(batch.share for batch in part) == pytest.approx(2)
    for batch in batches:
        assert computed_tokens(lengths_of(batch)) == batch.input_ids.numel() <= BUDGET


def test_as_few_parts_as_the_budget_takes() -> None:
    lengths = [9, 8, 5, 5, 4, 2, 2, 1]

    def cost(part: list[int]) -> int:
        return computed_tokens([lengths[i] for i in part])

    assert cut_rows(range(8), cost, 16) == [[0], [1, 2], [3, 4, 5], [6, 7]]
    assert cut_rows(range(8), cost, 100) == [[*range(8)]]
    assert halved([[*range(8)]], cost, 3) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert halved([[0], [6, 7]], cost, 3) == [[0], [6], [7]]
    assert cut_rows(range(8), cost, 1) == [[row] for row in range(8)]
    assert [computed_tokens([3, 5], multiple) for multiple in (None, 1, 4)] == [10, 10, 16]


def test_a_row_that_is_longer_than_the_budget(tmp_path: Path) -> None:
    trainer = made(tmp_path, CUT | {"max_tokens_per_micro_batch": 9, "pad_to_multiple_of": 3})
    message = "expected at least 15, the tokens of the longest completion .*, got 9; raise it"
    with pytest.raises(ValueError, match=f"max_tokens_per_micro_batch: {message}"):
        trainer.train()


def test_evaluation_and_runs_without_a_budget_are_not_cut(tmp_path: Path) -> None:
    trainer, [row, _] = trained(tmp_path, {"eval_strategy": "steps", "eval_steps": 1})
    [batch] = trainer._buffer.batches
    assert (batch.share, batch.num_sequences) == (1.0, None)
    assert not [name for name in row if name.startswith("micro_batches/")]
    cut = made(tmp_path / "cut", CUT | {"per_device_eval_batch_size": 4})
    assert cut.evaluate()["eval_reward"] == trainer.evaluate()["eval_reward"]
