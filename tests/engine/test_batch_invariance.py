"""batch_invariant: a row's bits depend on nothing but its own inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    Head,
    HeadLoRA,
    LinearLogprobs,
    LossConfig,
    SamplingMask,
    TokenBatch,
    available_backends,
    explain,
    explain_logprobs,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.backends import BACKENDS, chunked
from grpo_kernels.engine import invariance
from grpo_kernels.testing import Problem, make_problem
from tests.support.targets import targets

OUTPUTS = ("logprobs", "entropy", "lse", "sum_sq_probs", "max_logit", "min_logit")
SHAPES = ((5, 1), (33, 257), (64, 1000), (1, 31))  # hidden size, vocabulary
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TILE_ROWS = 16
TOKENS = 37  # two and a third tiles


def runs(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    return BACKENDS[backend].unsuited(device, dtype) is None


@contextmanager
def skipped_if_refused() -> Iterator[None]:
    """Skip where a library cannot, as with fp64 on some CPUs, and the call says so."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("batch_invariant: expected the library's GEMM"):
            raise
        pytest.skip(str(error))


def interpreted(backend: str, device: torch.device) -> bool:
    return backend == "triton" and device.type == "cpu"


def posed(dtype: torch.dtype, device: torch.device, depth: int, columns: int) -> Problem:
    problem = make_problem(1, TOKENS, depth, columns, values_in=torch.float32)
    return problem.to(device, dtype)


def statistics(
    problem: Problem, rows: Tensor, backend: str, sets: list[list[int]], **kwargs: object
) -> dict[str, Tensor]:
    """Return the statistics of some rows, in this order, in tiles of 16; -1 is a masked row."""
    masked = rows < 0
    hidden, target = problem.hidden[0][rows], problem.target[0][rows]
    device, columns = hidden.device, problem.weight.shape[0]
    sampling_mask = SamplingMask.from_lists([sets[row] for row in rows.tolist()], device=device)

    def run(*outputs: str, sampling_mask: SamplingMask | None = None) -> LinearLogprobs:
        return linear_logprobs(
            hidden, problem.weight, target.masked_fill(masked, -100), bias=problem.bias,
            temperature=torch.linspace(0.5, 2, TOKENS, device=device)[rows], softcap=5.0,
            outputs=outputs, sampling_mask=sampling_mask, backend=backend, batch_invariant=True,
            max_workspace_bytes=TILE_ROWS * columns * 8, **kwargs,
        )  # fmt: skip

    out, plain, alone = (
        run(*OUTPUTS, "mean_logit", "masked_logprobs", sampling_mask=sampling_mask),
        run(*OUTPUTS),
        run("logprobs"),
    )
    assert torch.equal(alone.logprobs, plain.logprobs)  # whatever else is asked for
    named = {f"{name}, plain": value for name, value in plain._asdict().items()}
    return {k: v.detach() for k, v in {**out._asdict(), **named}.items() if v is not None}


SELECTIONS: dict[str, Callable[[], Tensor]] = {
    "again": lambda: torch.arange(TOKENS),
    "permuted": lambda: torch.randperm(TOKENS),
    "some": lambda: torch.randperm(TOKENS)[:5],
    "one": lambda: torch.tensor([TOKENS - 1]),
    "repeated": lambda: torch.tensor([3] * 50),
    "padded": lambda: torch.tensor([-1, 7, -1, -1, 2, -1]),
}


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth,columns", SHAPES)
@pytest.mark.parametrize("precision", ("fp32", "input"))
@skipped_if_refused()
def test_bits_are_the_same_in_every_batch(
    backend: str, device: torch.device, dtype: torch.dtype, depth: int, columns: int,
    precision: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not runs(backend, device, dtype):
        pytest.skip("the backend has no such kernels")
    if interpreted(backend, device) and columns != 257:
        pytest.skip("too long for the interpreter")
    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS", 5 * columns)  # several blocks to a tile
    problem = posed(dtype, device, depth, columns)
    g = torch.Generator().manual_seed(1)
    sets = [torch.randint(0, columns, (n % 6,), generator=g).tolist() for n in range(TOKENS)]
    everything = statistics(problem, torch.arange(TOKENS), backend, sets, precision=precision)
    chosen = ("some", "one", "padded") if interpreted(backend, device) else tuple(SELECTIONS)
    for what in chosen:
        rows = SELECTIONS[what]()
        valid = rows >= 0
        got = statistics(problem, rows, backend, sets, precision=precision)
        for name, value in got.items():
            expected = everything[name][rows[valid]]
            assert torch.equal(value[valid.to(device)], expected), (what, name)


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sets", (False, True))
@skipped_if_refused()
def test_training_sees_the_bits_of_the_forward(
    backend: str, device: torch.device, dtype: torch.dtype, with_sets: bool
) -> None:
    """On-policy, every log-ratio is exactly 0: the old log-probs came from single rows."""
    if not runs(backend, device, dtype):
        pytest.skip("the backend has no such kernels")
    problem = make_problem(2, 5, 33, 257, values_in=torch.float32).to(device, dtype)
    rows = problem.target.numel()
    sets = [[row % 7, row % 5, 250] for row in range(rows)]
    sampling_mask = SamplingMask.from_lists(sets, device=device) if with_sets else None
    kind = "masked_logprobs" if with_sets else "logprobs"
    options = dict(backend=backend, batch_invariant=True, max_workspace_bytes=16 * 257 * 8)

    def old(row: int) -> Tensor:
        own = SamplingMask.from_lists([sets[row]], device=device) if with_sets else None
        with torch.no_grad():
            out = linear_logprobs(
                problem.hidden.reshape(rows, -1)[row : row + 1], problem.weight,
                problem.target.reshape(-1)[row : row + 1], bias=problem.bias, sampling_mask=own,
                outputs=(kind,), temperature=0.8, **options,
            )  # fmt: skip
        return getattr(out, kind)

    old_logprobs = torch.cat([old(row) for row in range(rows)]).reshape(problem.target.shape)
    batch = problem.batch(
        old_logprobs=old_logprobs,
        ref_logprobs=old_logprobs,
        rollout_logprobs=None,
        sampling_mask=sampling_mask,
    )
    for config in (
        LossConfig(temperature=0.8, beta=0.1),
        LossConfig(loss_type="gspo", temperature=0.8),
    ):
        out = linear_policy_loss(
            problem.hidden, problem.weight, batch, config, bias=problem.bias, **options
        )
        out.loss.backward()
        assert out.metrics["ratio/min"] == out.metrics["ratio/max"] == 1
        if config.beta:
            assert out.metrics["kl"] == 0


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_without_the_mode_training_and_forward_agree_to_rounding(
    backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    problem = make_problem(2, 9, 33, 257).to(device, dtype)
    with torch.no_grad():
        old = linear_logprobs(
            problem.hidden, problem.weight, problem.target, bias=problem.bias, backend=backend
        ).logprobs
    batch = problem.batch(old_logprobs=old, ref_logprobs=None, rollout_logprobs=None)
    out = linear_policy_loss(
        problem.hidden, problem.weight, batch, LossConfig(), bias=problem.bias, backend=backend
    )
    assert abs(out.metrics["ratio/min"] - 1) < 1e-5 and abs(out.metrics["ratio/max"] - 1) < 1e-5


def plan_of(dtype: torch.dtype, backend: str, **kwargs: object):
    problem = make_problem(1, 20, 32, 64).to("cpu", dtype)
    batch: TokenBatch = problem.batch(rollout_logprobs=None)
    args = (problem.hidden, problem.weight, batch, LossConfig())
    return explain(*args, backend=backend, batch_invariant=True, **kwargs)


def test_plans_say_what_the_mode_costs() -> None:
    tiled = plan_of(torch.float32, "chunked")
    assert tiled.schedule == "one_pass" and tiled.tile_rows == 256
    assert "filled up, its GEMM proven at first use" in tiled.fingerprint
    assert "batch_invariant" in tiled.fingerprint
    if "cpu" in available_backends():
        for dtype in (torch.float32, torch.bfloat16):
            assert plan_of(dtype, "cpu").schedule == "one_pass"
        hidden, weight = torch.ones(2, 4).bfloat16(), torch.ones(9, 4).bfloat16()
        plan = explain_logprobs(hidden, weight, backend="cpu", tiled=True, batch_invariant=True)
        assert plan.forward.endswith("filled up")  # no library's GEMM
    if "triton" in available_backends():
        fused = plan_of(torch.bfloat16, "triton")
        assert fused.schedule == "two_pass" and "fixes a row's bits" in str(fused)
        with pytest.raises(ValueError, match="schedule: 'one_pass' cannot run: the forward that"):
            plan_of(torch.bfloat16, "triton", schedule="one_pass")


def test_where_it_cannot_be_had() -> None:
    hidden, weight, target = torch.ones(2, 4), torch.ones(9, 4), torch.tensor([1, 2])
    with pytest.raises(
        ValueError, match="batch_invariant: expected False with backend 'reference'"
    ):
        linear_logprobs(hidden, weight, target, backend="reference", batch_invariant=True)
    with pytest.raises(ValueError, match="max_workspace_bytes: expected room for 16 rows of"):
        linear_logprobs(
            hidden, weight, target, backend="chunked", batch_invariant=True,
            max_workspace_bytes=15 * 9 * 4,
        )  # fmt: skip


def some_logprobs(rows: int = 3, columns: int = 9, invariant: bool = True, **given: object) -> None:
    hidden, weight = torch.randn(rows, 4), torch.randn(columns, 4)
    target = torch.zeros(rows, dtype=torch.int64)
    linear_logprobs(
        hidden, weight, target, backend="chunked", batch_invariant=invariant,
        max_workspace_bytes=TILE_ROWS * columns * 4, **given,
    )  # fmt: skip


@pytest.fixture
def nothing_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_proven", set())


def by_place(hidden: Tensor, logits: Tensor) -> Tensor:
    logits[11:] *= 1.001
    return logits


def by_neighbours(hidden: Tensor, logits: Tensor) -> Tensor:
    return logits.add_(hidden.amax(0).sum() - hidden.amin(0).sum())


@pytest.mark.parametrize(
    ("spoil", "wrong"), [(by_place, "5 of them, first at 11"), (by_neighbours, "1 of them")]
)
def test_a_library_that_does_not_keep_a_rows_bits_is_an_error(
    nothing_proven: None,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Tensor, Tensor], Tensor],
    wrong: str,
) -> None:
    right = invariance.project
    spoiled = lambda hidden, head, out: spoil(hidden, right(hidden, head, out))  # noqa: E731
    monkeypatch.setattr(invariance, "project", spoiled)
    for _ in range(2):  # a failure is not forgotten
        with pytest.raises(
            RuntimeError, match=f"batch_invariant: expected .* all 16 places .* got .* at {wrong}"
        ):
            some_logprobs()
    some_logprobs(invariant=False)


def test_the_update_of_an_adapter_is_proven_while_it_is_zero(
    nothing_proven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = HeadLoRA.inner
    monkeypatch.setattr(
        HeadLoRA, "inner", lambda lora, hidden: by_place(hidden, right(lora, hidden))
    )
    with pytest.raises(RuntimeError, match="got others at 5 of them"):
        some_logprobs(lora=HeadLoRA(a=torch.randn(2, 4), b=torch.zeros(9, 2)))


def test_it_is_proven_once(nothing_proven: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, right, captured = [], invariance.project, True

    def counted(hidden: Tensor, head: Head, out: Tensor) -> Tensor:
        calls.append(tuple(out.shape))
        return right(hidden, head, out)

    monkeypatch.setattr(invariance, "project", counted)
    monkeypatch.setattr(invariance, "_is_captured", lambda device: captured)
    some_logprobs()
    assert not calls  # the host cannot look
    captured = False
    for rows in (3, 40, 1):
        some_logprobs(rows)
    assert calls == [(16, 9)] * 2
    some_logprobs(columns=10)
    some_logprobs(precision="input")
    assert calls == [(16, 9)] * 2 + [(16, 10)] * 2 + [(16, 9)] * 2
