"""Advantages against a plain oracle, over generated rewards, weights and groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels.losses import static_weights
from grpo_trainer.experience import compute_advantages
from tests.support.trainer import CannedEngine
from tests.trainer.features import resumable

NAN = float("nan")
ONE = torch.ones(1)
OFFSET = 1e-4  # added to a standard deviation, as in TRL
EIGHTHS = st.integers(-16, 16).map(lambda eighths: eighths / 8)
HUGE = st.sampled_from([2.0**65, -(2.0**99)])  # whose squares are beyond fp32
REWARD = st.one_of(st.just(NAN), EIGHTHS, EIGHTHS, HUGE)


@st.composite
def problems(draw: Any) -> tuple[list[list[float]], list[float], int]:
    """Draw rewards (N, F), a weight for each function, and the size of a group."""
    size, groups, functions = (draw(st.integers(1, most)) for most in (5, 4, 3))
    row = st.lists(REWARD, min_size=functions, max_size=functions)
    rows = draw(st.lists(row, min_size=size * groups, max_size=size * groups))
    weights = draw(
        st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=functions, max_size=functions)
    )
    return rows, weights, size


def known(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def mean(values: list[float]) -> float:
    return math.fsum(known(values)) / len(known(values)) if known(values) else NAN


def deviation(values: list[float]) -> float:
    squares = [(value - mean(values)) ** 2 for value in known(values)]
    return math.sqrt(math.fsum(squares) / (len(squares) - 1)) if len(squares) > 1 else 0.0


def weighted(row: list[float], weights: list[float]) -> float:
    terms = known([value * weight for value, weight in zip(row, weights, strict=True)])
    return math.fsum(terms) if terms else NAN


def oracle(
    rows: list[list[float]], weights: list[float], size: int, scale: str, aggregation: str
) -> tuple[list[float], list[float]]:
    """Return centred rewards and the spread that each is compared with (GRPO, Dr. GRPO, GDPO)."""
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    if aggregation == "normalize_then_sum":
        totals = [
            weighted(
                [
                    (value - mean(column)) / (deviation(column) + OFFSET)
                    for value, column in zip(row, map(list, zip(*part, strict=True)), strict=True)
                ],
                weights,
            )
            for part in parts
            for row in part
        ]
        return [total - mean(totals) for total in totals], [deviation(totals)] * len(rows)
    sums = [[weighted(row, weights) for row in part] for part in parts]
    whole = deviation([total for part in sums for total in part])
    spreads = [whole if scale == "batch" else deviation(part) for part in sums for _ in part]
    return [total - mean(part) for part in sums for total in part], spreads


@pytest.mark.parametrize(
    ("scale", "aggregation"),
    [
        *((scale, "sum_then_normalize") for scale in ("group", "batch", "none")),
        ("group", "normalize_then_sum"),
    ],
)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(problem=problems())
def test_oracle(scale: str, aggregation: str, problem: Any) -> None:
    rows, weights, size = problem
    tensors = [torch.tensor(values) for values in (rows, weights)]
    centred, spreads = oracle(rows, weights, size, scale, aggregation)
    if scale == "none" and max(map(abs, known(centred)), default=0.0) > 1e15:
        with pytest.raises(ValueError, match="scale_rewards: expected advantages of at most 1e"):
            compute_advantages(*tensors, size, scale, aggregation)
        return
    out = compute_advantages(*tensors, size, scale, aggregation)
    assert out.zero_std.tolist() == [spread < 1e-8 for spread in spreads]
    parts = [known(centred[first : first + size]) for first in range(0, len(rows), size)]
    assert out.signal.tolist() == [bool(part) and max(part) - min(part) > 1e-8 for part in parts]
    divided = [
        value if scale == "none" else value / (spread + OFFSET)
        for value, spread in zip(centred, spreads, strict=True)
    ]
    expected = torch.tensor(divided, dtype=torch.float64).nan_to_num(0.0)
    torch.testing.assert_close(out.advantages, expected, rtol=1e-9, atol=1e-9)
    totals = torch.tensor([weighted(row, weights) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(out.rewards, totals, equal_nan=True)


def test_rounding_is_no_signal() -> None:
    large = torch.full((3, 1), 1e5) + 0.1  # whose mean is rounded
    assert compute_advantages(large, ONE, 3).signal.tolist() == [False]


def leave_one_out(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return RLOO's: the reward less the mean of the group's others."""
    totals = (rewards * weights).sum(1).reshape(-1, group_size)
    others = (totals.sum(1, keepdim=True) - totals) / (group_size - 1)
    return (totals - others).flatten()


class LaterTokens:
    """Give each token the advantage of its completion, rising to the last token's."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[torch.Tensor]:
        self.ids = completion_ids
        values = leave_one_out(**{k: kwargs[k] for k in ("rewards", "weights", "group_size")})
        return [
            value * torch.arange(1.0, len(ids) + 1) / len(ids)
            for value, ids in zip(values, completion_ids, strict=True)
        ]


def by_length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids)) for ids in completion_ids]


def test_a_function_compares(make_trainer: Any) -> None:
    trainer = make_trainer(by_length, advantages=leave_one_out, max_steps=1, engine=CannedEngine())
    trainer.train()
    [batch] = trainer._buffer.batches
    rewards = [
        float(ids[target != -100].sum())
        for ids, target in zip(batch.input_ids[:, 1:], batch.target[:, :-1], strict=True)
    ]
    expected = leave_one_out(torch.tensor(rewards)[:, None], ONE, trainer.num_generations)
    torch.testing.assert_close(batch.advantages, expected)


def test_a_function_gives_each_token_its_own(make_trainer: Any) -> None:
    compare = LaterTokens()
    settings = {"max_steps": 1, "shuffle_dataset": False, "gradient_accumulation_steps": 1}
    trainer = make_trainer(by_length, advantages=compare, engine=CannedEngine(), **settings)
    trainer.train()
    [batch] = trainer._buffer.batches
    assert batch.advantages.shape == batch.target.shape
    for row, target, ids in zip(batch.advantages, batch.target, compare.ids, strict=True):
        assert target[target != -100].tolist() == ids
        values = row[target != -100]
        steps = torch.arange(1.0, len(ids) + 1) / len(ids)
        torch.testing.assert_close(values, values[-1] * steps)
        assert (row[target == -100] == 0).all()
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert math.isfinite(log["loss"]) and log["grad_norm"] > 0


@pytest.mark.parametrize(("baseline", "share"), [(0.5, 0), (1.0, 1)])
def test_equal_rewards_may_teach(make_trainer: Any, baseline: float, share: float) -> None:
    """A function may compare a group with a baseline, so only advantages of 0 are no signal."""
    trainer = make_trainer(
        lambda completions, **_: [1.0] * len(completions),
        advantages=lambda rewards, **_: (rewards - baseline).flatten(),
        max_steps=1,
        engine=CannedEngine(),
    )
    trainer.train()
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert log["frac_reward_zero_std"] == share


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (1, "advantages: expected a function or an object to call, got 1"),
        (lambda rewards: rewards, "advantages: expected a function of rewards, weights and group"),
        (lambda rewards, **_: rewards[:1, 0], "advantages: expected 4 entries, .* got 1"),
        (lambda rewards, **_: "no", "advantages: expected 4 entries, .* got str"),
        (lambda rewards, **_: ["no"] * 4, "advantages: expected numbers, or lists of them"),
        (lambda rewards, **_: rewards[:, None], "a number per completion, or a list"),
        (lambda rewards, **_: [[1.0]] * 4, "one value per token of completion 0, [2-9], got 1"),
        (
            lambda rewards, weights, group_size: [[1.0]] * 4,
            "one value per token of completion 0, [2-9], got 1",
        ),
        (lambda rewards, **_: [1e16, 0, 0, 0], "advantages: expected advantages of at most 1e.15"),
        (lambda rewards, **_: [math.nan] * 4, "advantages: expected finite numbers"),
    ],
)
def test_functions_that_cannot(make_trainer: Any, function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(by_length, advantages=function, max_steps=1, engine=CannedEngine()).train()


@pytest.mark.parametrize(
    "setting", [{"scale_rewards": "none"}, {"multi_objective_aggregation": "normalize_then_sum"}]
)
def test_settings_that_a_function_replaces(make_trainer: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))}: expected .* with advantages"):
        make_trainer(by_length, advantages=leave_one_out, **setting)


@pytest.mark.parametrize("steps", (1, 4))
def test_mean_over_prompts(tmp_path, steps):
    """Each prompt counts alike, however long its completions are and where they are dealt to."""
    changes = {"loss_aggregation": "prompt_mean", "steps_per_generation": steps}
    changes |= {"per_device_train_batch_size": 8 // steps, "rollout_engine": CannedEngine()}
    made = resumable(changes, tmp_path)
    made.current_gradient_accumulation_steps = steps
    batches = made._generation_batch()
    weights: dict[int, float] = {}
    for batch in batches:
        tokens = batch.token_batch(steps)
        each = static_weights(tokens, made.loss_config).policy
        for index, part in enumerate(each.split(tokens.segments.lengths.tolist())):
            prompt = tuple(batch.input_ids[index, :2].tolist())
            weights[prompt] = weights.get(prompt, 0.0) + part.sum().item()
    assert list(weights.values()) == pytest.approx([1 / len(weights)] * len(weights))
