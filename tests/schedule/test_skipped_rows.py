"""Rows without a gradient: set aside before the forward or after it, measured or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels import (
    LossConfig,
    SamplingMask,
    TokenBatch,
    explain,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
)
from grpo_kernels.backends import StatsGradients
from grpo_kernels.engine import recompute
from grpo_kernels.engine.rows import move_rows_, surviving_rows
from grpo_kernels.losses import LOSSES
from grpo_kernels.testing import (
    Problem,
    assert_as_exact_as,
    make_config,
    make_problem,
    poisoned_allocations,
    relative_error,
    run,
)
from tests.support.host_reads import counted_reads
from tests.support.targets import targets

TILE = 53 * 4 * 8  # eight fp32 rows of the test vocabulary
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
SCHEDULES = ("one_pass", "two_pass")
# old log-probabilities lie 0.2 nats around the policy's: about half of the tokens are clipped
CLIPPED = dict(epsilon=0.01, rollout_correction_mode="token_mask", rollout_correction_max=1.1)


def half_zero(problem: Problem) -> Tensor:
    advantages = problem.advantages.clone()
    advantages[::2] = 0
    return advantages


# --- host reads in a step


def step(problem: Problem, config: LossConfig, counts: dict, **options: object) -> Tensor:
    shape = problem.target.shape
    batch = TokenBatch.from_packed(
        problem.target.flatten(), half_zero(problem),
        torch.arange(0, shape.numel() + 1, shape[1]), problem.mask.flatten(), **counts,
        old_logprobs=problem.logprobs["old_logprobs"].flatten(), num_items_in_batch=17.0,
    )  # fmt: skip
    hidden = problem.hidden.flatten(0, 1)
    loss = linear_policy_loss(hidden, problem.weight, batch, config, **options).loss  # type: ignore[arg-type]
    loss.backward()
    return loss


def true_counts(problem: Problem) -> dict[str, list[int]]:
    active = problem.mask & (half_zero(problem) != 0)[:, None]
    return {"lengths": problem.mask.sum(1).tolist(), "active_lengths": active.sum(1).tolist()}


@pytest.mark.parametrize("name", ("dapo", "gspo", "vespo"))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("metrics", ("all", "active"))
@pytest.mark.parametrize("given", (False, True))
def test_a_step_reads_values_once_and_never_with_counts(
    monkeypatch: pytest.MonkeyPatch, name: str, schedule: str, metrics: str, given: bool
) -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    counts = true_counts(problem) if given else {}
    options = dict(schedule=schedule, metric_rows=metrics, max_workspace_bytes=TILE)
    with counted_reads(monkeypatch) as reads:
        step(problem, make_config(name), counts, **options)
    assert reads == ([] if given else ["cpu"])


def test_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(3.0)
    with counted_reads(monkeypatch) as reads:
        float(x[0]), x.tolist(), x[x > 1], x.cpu(), bool(x[1]), x.nonzero()
        torch.repeat_interleave(torch.tensor([1, 2]))
    assert len(reads) == 8, reads
    problem = make_problem().to("cpu", torch.float32)
    with counted_reads(monkeypatch) as reads:  # inside the op, and inside its backward
        found = linear_logprobs(problem.hidden, problem.weight, problem.target)
        found.logprobs.sum().backward()
    assert reads == ["cpu", "cpu"]


@pytest.mark.parametrize("name", ("dapo", "gspo"))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_given_counts_change_nothing(name: str, schedule: str) -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    fetched = problem.batch(advantages=half_zero(problem))
    told = problem.batch(advantages=half_zero(problem), **true_counts(problem))
    assert (told.lengths, told.active_lengths) == (fetched.lengths, fetched.active_lengths)
    expected = run(problem, make_config(name), fetched, schedule=schedule)
    got = run(problem, make_config(name), told, schedule=schedule)
    for key, value in expected.items():
        assert torch.equal(got[key], value) or value.isnan().all(), key
    without = problem.batch(advantages=half_zero(problem), lengths=true_counts(problem)["lengths"])
    assert run(problem, make_config(name), without)["frac_rows_skipped"] < got["frac_rows_skipped"]


MASK = torch.tensor([[True, True, False], [True, False, False]])
WRONG: list[tuple[dict, str]] = [
    (dict(lengths=[2, 2]), r"lengths: expected \(2, 1\) for these tensors, got \(2, 2\)"),
    (dict(lengths=[2]), "lengths: expected 2 ints >= 0, one per sequence"),
    (dict(lengths=[2, -1]), "lengths: expected 2 ints >= 0"),
    (dict(lengths=torch.tensor([2, 1])), "lengths: expected 2 ints >= 0"),
    (dict(active_lengths=[2, 1]), "lengths: expected the valid tokens that active_lengths are of"),
    (dict(lengths=[2, 1], active_lengths=[0, 1]), r"active_lengths: expected \(2, 0\)"),
    (dict(lengths=[2, 1], active_lengths=[2, 2]), "active_lengths: expected at most"),
]


@pytest.mark.parametrize("counts,message", WRONG, ids=[message for _, message in WRONG])
def test_wrong_counts(counts: dict, message: str) -> None:
    advantages = torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match=message):
        TokenBatch.from_padded(torch.ones(2, 3).long(), advantages, MASK, **counts)


@pytest.mark.parametrize(
    "target,advantages,counts,message",
    [
        (1, 1.0, [2, 2], "lengths: expected another sum"),
        (1, float("nan"), [2, 1], "finite values"),
        (-7, 1.0, [2, 1], "target: expected ids >= 0"),
        (99, 1.0, [2, 1], r"target: expected ids in \[0, 53\)"),
    ],
)
def test_with_counts_values_are_checked_on_the_device(
    monkeypatch: pytest.MonkeyPatch, target: int, advantages: float, counts: list, message: str
) -> None:
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)

    def step() -> None:
        ids, each = torch.full((2, 3), target), torch.full((2,), advantages)
        batch = TokenBatch.from_padded(ids, each, MASK, lengths=counts)
        linear_policy_loss(torch.ones(2, 3, 4), torch.ones(53, 4), batch, LossConfig())

    with pytest.raises(RuntimeError, match=message):
        step()


# --- rows that have no gradient after the forward


def spied_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many rows each GEMM of a weight gradient sees."""
    seen: list[int] = []
    from grpo_kernels.engine import gradients

    plain = gradients.accumulate

    def accumulate(out, a, b, *args, **kwargs):
        if a.shape[0] == 53:  # dlogits.T @ rows
            seen.append(b.shape[0])
        return plain(out, a, b, *args, **kwargs)

    for module in (gradients, recompute):
        monkeypatch.setattr(module, "accumulate", accumulate)
    return seen


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", ("dapo", "gspo"))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend,device", targets("triton"))
@pytest.mark.parametrize("tile", (None, TILE))
def test_clipped_rows(
    dtype: torch.dtype, name: str, schedule: str, backend: str, device: torch.device, tile: int
) -> None:
    problem = make_problem(7, 6)
    config = make_config(name, **CLIPPED)
    exact = run(problem.to("cpu", torch.float64), config, backend="reference")
    eager = run(problem.to(device, dtype), config, backend="reference")
    options = dict(schedule=schedule, backend=backend, max_workspace_bytes=tile)
    with poisoned_allocations():
        got = run(problem.to(device, dtype), config, **options)
    for key in ("loss", "dhidden", "dweight", "dbias"):
        floor = FLOOR[dtype] if key.startswith("d") else 1e-5
        assert_as_exact_as(got[key], eager[key], exact[key], floor, key)
    rows = exact["dhidden"].flatten(0, 1).abs().amax(1)
    assert (rows > 0).sum() < 0.8 * problem.mask.sum(), "too few clipped rows to see anything"
    assert not got["dhidden"].cpu().flatten(0, 1)[rows == 0].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_products_see_the_rows_with_a_gradient(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    problem = make_problem(7, 6).to("cpu", torch.float32)
    seen = spied_rows(monkeypatch)
    got = run(problem, make_config("dapo", **CLIPPED), schedule=schedule)
    alive = int(got["dhidden"].flatten(0, 1).any(1).sum())
    assert alive < problem.mask.sum() and set(seen) == {alive}
    seen.clear()
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    again = run(problem, make_config("dapo", **CLIPPED), schedule=schedule)
    assert set(seen) == {int(problem.mask.sum())}
    for key, value in got.items():
        assert relative_error(again[key], value) < 1e-6, key


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_all_rows_clipped_and_one_left(schedule: str, dtype: torch.dtype) -> None:
    problem = make_problem(1, 9, values_in=torch.bfloat16).to("cpu", dtype)
    config = LossConfig(loss_type="dapo")
    up = torch.ones(1)
    for far in (slice(None), slice(1, None)):
        old = problem.logprobs["old_logprobs"].clone()
        old[:, far] -= 5.0
        batch = TokenBatch.from_padded(problem.target, up, old_logprobs=old)
        with poisoned_allocations():
            got = run(problem, config, batch, schedule=schedule, max_workspace_bytes=TILE)
        alive = got["dhidden"][0].any(1)
        assert alive.tolist() == [far == slice(1, None)] + [False] * 8
        assert got["dweight"].any() == bool(alive.any()) and got["dweight"].isfinite().all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tile", (None, TILE))
def test_clipped_rows_of_a_sampling_mask(schedule: str, tile: int | None) -> None:
    problem = make_problem(6, 6)
    config = make_config("dapo", **CLIPPED)
    ids = (problem.hidden.detach() @ problem.weight.detach().t()).topk(12).indices
    batch = problem.batch(sampling_mask=SamplingMask.from_padded(ids))
    exact = run(problem.to("cpu", torch.float64), config, batch, backend="reference")
    options = dict(schedule=schedule, max_workspace_bytes=tile, backend="chunked")
    got = run(problem.to("cpu", torch.float32), config, batch, **options)
    for key in ("loss", "dhidden", "dweight", "dbias"):
        assert relative_error(got[key], exact[key]) < 1e-5, key


def test_batch_invariant_statistics_do_not_change() -> None:
    problem = make_problem(7, 6).to("cpu", torch.float32)
    config = make_config("dapo", **CLIPPED)
    options = dict(batch_invariant=True, backend="chunked", max_workspace_bytes=53 * 4 * 16)
    got = run(problem, config, schedule="one_pass", **options)
    expected = run(problem, config, schedule="two_pass", **options)
    for key, value in expected.items():
        same = torch.equal(got[key], value) or value.isnan().all()
        assert same or (key.startswith("d") and relative_error(got[key], value) < 1e-6), key


@pytest.mark.parametrize("wanted", ("1111", "0000", "1010", "0011", "1101", "0", "1"))
def test_surviving_rows_fill_the_gaps(wanted: str) -> None:
    mask = torch.tensor([x == "1" for x in wanted])
    order = surviving_rows(mask)
    if mask.all():
        assert order is None
        return
    assert sorted(order) == mask.nonzero().flatten().tolist()
    moved = [row for place, row in enumerate(order) if place != row]
    assert all(row >= mask.sum() for row in moved)
    tile = torch.arange(mask.numel() * 3).reshape(-1, 3)
    expected = tile[order]
    assert torch.equal(move_rows_(tile, order), expected)


def test_few_zero_rows_stay() -> None:
    mask = torch.ones(64, dtype=torch.bool)
    mask[:3] = False
    assert surviving_rows(mask) is None
    mask[:4] = False
    assert surviving_rows(mask) is not None


def test_gradients_that_are_nan_are_not_dropped() -> None:
    nothing = StatsGradients(torch.tensor([0.0, float("nan")]), None, torch.zeros(2))
    assert nothing.nonzero.tolist() == [False, True]
    assert StatsGradients(None).nonzero is None


# --- which rows are measured


def restricted(problem: Problem, config: LossConfig, batch: TokenBatch, keep: Tensor) -> dict:
    """Return the metrics of a batch of the rows ``keep`` alone, by the reference."""
    whole = linear_logprobs(
        problem.hidden.reshape(-1, 16)[batch.rows], problem.weight, batch.target,
        bias=problem.bias, outputs=("logprobs", "entropy"), backend="reference",
    )  # fmt: skip
    sequences = batch.segments.ids[keep]
    lengths = torch.unique_consecutive(sequences, return_counts=True)[1]
    optional = {
        name: getattr(batch, name)[keep]
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    part = TokenBatch.from_packed(
        batch.target[keep], batch.advantages[keep],
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), **optional,
    )  # fmt: skip
    return dict(policy_loss(whole.logprobs[keep], part, config, whole.entropy[keep]).metrics)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("of", ("sequences", "tokens"))
def test_metrics_of_the_active_rows(name: str, schedule: str, of: str) -> None:
    problem, config = make_problem(6, 6).to("cpu", torch.float64), make_config(name)
    if of == "tokens" and config.scope(True) == "sequence":
        pytest.skip("has an advantage of each sequence")
    advantages = half_zero(problem)
    if of == "tokens":
        advantages = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
        advantages[advantages.abs() < 0.7] = 0
    batch = problem.batch(advantages=advantages)
    exact = restricted(problem, config, batch, (batch.advantages != 0).nonzero().squeeze(-1))
    single = problem.to("cpu", torch.float32)
    every = run(single, config, batch, schedule=schedule)
    active = run(single, config, batch, schedule=schedule, metric_rows="active")
    for key in ("loss", "dhidden", "dweight", "dbias", "frac_rows_skipped"):
        assert relative_error(active[key], every[key]) < 1e-6, key
    measured = set(active) - {"loss", "dhidden", "dweight", "dbias", "frac_rows_skipped"}
    assert measured == set(exact) and measured <= set(every)
    for key in measured:
        assert relative_error(active[key], exact[key]) < 1e-5 or exact[key].isnan(), key


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("metrics", ("all", "active"))
def test_nothing_active(schedule: str, metrics: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    batch = problem.batch(advantages=torch.zeros(4))
    got = run(problem, make_config("dapo"), batch, metric_rows=metrics, schedule=schedule)
    assert got["loss"] == 0 and not got["dweight"].any() and not got["dhidden"].any()
    assert got["entropy"].isfinite() == (metrics == "all") and got["frac_rows_skipped"] == 1


def test_metrics_do_not_depend_on_grad_mode() -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    batch = problem.batch(advantages=half_zero(problem))
    expected = run(problem, make_config("gspo"), batch, metric_rows="active")
    with torch.no_grad():
        out = linear_policy_loss(
            problem.hidden, problem.weight, batch, make_config("gspo"), bias=problem.bias,
            metric_rows="active",
        )  # fmt: skip
    for key, value in out.metrics.items():
        assert relative_error(value, expected[key]) < 1e-6 or value.isnan(), key


def test_bad_metrics() -> None:
    problem = make_problem().to("cpu", torch.float32)
    with pytest.raises(ValueError, match="metric_rows: expected one of all, active; got 'none'"):
        run(problem, LossConfig(), metric_rows="none")
    gated = LossConfig(top_entropy_quantile=0.5)
    with pytest.raises(ValueError, match="metric_rows: expected 'all' for a loss whose gate"):
        run(problem, gated, metric_rows="active")


def test_explain_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(4, 6).to("cpu", torch.float32)
    batch = problem.batch(advantages=half_zero(problem))
    waiting = int(problem.mask[::2].sum())
    arguments = (problem.hidden, problem.weight, batch, make_config("dapo"))
    text = str(explain(*arguments))
    assert f"rows of zero advantage: {waiting} take the forward only, for the metrics" in text
    assert "rows that the loss clips or gates: left out of the GEMMs of their gradients" in text
    assert "rows of zero advantage: not computed" in str(explain(*arguments, metric_rows="active"))
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    assert "the host would have to wait for the device" in str(explain(*arguments))
