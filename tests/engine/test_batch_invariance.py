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
ALL = (*OUTPUTS, "mean_logit", "rank", "topk_indices", "topk_logprobs", "masked_logprobs")
SHAPES = ((5, 1), (33, 257), (64, 1000), (1, 31))  # hidden size, vocabulary
TILE_ROWS = 16
TOKENS = 37  # two and a third tiles


@pytest.fixture(params=(torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def dtype(request: pytest.FixtureRequest, backend: str, device: torch.device) -> torch.dtype:
    if BACKENDS[backend].unsuited(device, request.param) is not None:
        pytest.skip("the backend has no such kernels")
    return request.param


@contextmanager
def skipped_if_refused() -> Iterator[None]:
    """Skip where a library cannot, as with fp64 on some CPUs, and the call says so."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("batch_invariant: expected the library's GEMM"):
            raise
        pytest.skip(str(error))


def sets_of(rows: Tensor, columns: int) -> SamplingMask:
    """Return a sampling mask of up to five ids for each of these rows, the same in any order."""
    lists = [[row * k % columns for k in range(row % 6)] for row in rows.tolist()]
    return SamplingMask.from_lists(lists, device=rows.device)


def statistics(problem: Problem, rows: Tensor, **options: object) -> dict[str, Tensor]:
    """Return the statistics of some rows, in this order, in tiles of 16; -1 is a masked row."""
    hidden, target = problem.hidden[0][rows], problem.target[0][rows].masked_fill(rows < 0, -100)
    columns = problem.weight.shape[0]
    temperature = torch.linspace(0.5, 2, TOKENS, device=hidden.device)[rows]
    options |= dict(batch_invariant=True, max_workspace_bytes=TILE_ROWS * columns * 8)

    def run(*outputs: str, **more: object) -> LinearLogprobs:
        return linear_logprobs(
            hidden, problem.weight, target, bias=problem.bias, temperature=temperature, softcap=5.0,
            outputs=outputs, **options, **more,
        )  # fmt: skip

    whole = run(*ALL, sampling_mask=sets_of(rows, columns), top_k=min(5, columns))
    plain, alone = run(*OUTPUTS), run("logprobs")
    assert torch.equal(alone.logprobs, plain.logprobs)  # whatever else is asked for
    found = {name: getattr(whole, name) for name in ALL}
    found |= {f"{name}, plain": getattr(plain, name) for name in OUTPUTS}
    return {name: value.detach() for name, value in found.items()}


SELECTIONS: dict[str, Callable[[], Tensor]] = {
    "some": lambda: torch.randperm(TOKENS)[:5],
    "one": lambda: torch.tensor([TOKENS - 1]),
    "padded": lambda: torch.tensor([-1, 7, -1, -1, 2, -1]),
    "again": lambda: torch.arange(TOKENS),
    "permuted": lambda: torch.randperm(TOKENS),
    "repeated": lambda: torch.tensor([3] * 50),
}


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("depth,columns", SHAPES)
@pytest.mark.parametrize("precision", ("fp32", "input"))
@skipped_if_refused()
def test_bits_are_the_same_in_every_batch(
    backend: str, device: torch.device, dtype: torch.dtype, depth: int, columns: int,
    precision: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    interpreted = backend == "triton" and device.type == "cpu"
    if interpreted and columns != 257:
        pytest.skip("too long for the interpreter")
    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS", 5 * columns)  # several blocks to a tile
    problem = make_problem(1, TOKENS, depth, columns, values_in=torch.float32).to(device, dtype)
    options = dict(backend=backend, precision=precision)
    everything = statistics(problem, torch.arange(TOKENS, device=device), **options)
    for what in list(SELECTIONS)[: 3 if interpreted else None]:
        rows = SELECTIONS[what]().to(device)
        for name, value in statistics(problem, rows, **options).items():
            expected = everything[name][rows[rows >= 0]]
            assert torch.equal(value[rows >= 0], expected), (what, name)


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("kind", ("logprobs", "masked_logprobs"))
@skipped_if_refused()
def test_training_sees_the_bits_of_the_forward(
    backend: str, device: torch.device, dtype: torch.dtype, kind: str
) -> None:
    """On-policy, every log-ratio is exactly 0: the old log-probs came from single rows."""
    x = make_problem(2, 5, 33, 257, values_in=torch.float32).to(device, dtype)
    rows = torch.arange(x.target.numel(), device=device)
    hidden, target = x.hidden.reshape(len(rows), -1), x.target.reshape(-1)
    options = dict(backend=backend, batch_invariant=True, max_workspace_bytes=16 * 257 * 8)

    def masks(of: Tensor) -> SamplingMask | None:
        return sets_of(of, 257) if kind == "masked_logprobs" else None

    def old(row: Tensor) -> Tensor:
        with torch.no_grad():
            out = linear_logprobs(
                hidden[row], x.weight, target[row], bias=x.bias, sampling_mask=masks(row),
                outputs=(kind,), temperature=0.8, **options,
            )  # fmt: skip
        return getattr(out, kind)

    logprobs = torch.cat([old(row) for row in rows.split(1)]).reshape(x.target.shape)
    batch = x.batch(
        old_logprobs=logprobs, ref_logprobs=logprobs, rollout_logprobs=None,
        sampling_mask=masks(rows),
    )  # fmt: skip
    for config in (
        LossConfig(temperature=0.8, beta=0.1),
        LossConfig(loss_type="gspo", temperature=0.8),
    ):
        out = linear_policy_loss(x.hidden, x.weight, batch, config, bias=x.bias, **options)
        out.loss.backward()
        assert out.metrics["ratio/min"] == out.metrics["ratio/max"] == 1
        if config.beta:
            assert out.metrics["kl"] == 0


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
