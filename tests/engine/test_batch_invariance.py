"""batch_invariant: training sees the bits of the forward. A row in other batches: ``tests/net``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    LossConfig,
    SamplingMask,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.backends import BACKENDS
from grpo_kernels.engine import invariance
from grpo_kernels.testing import make_problem
from tests.support.targets import targets

KINDS = (
    (torch.float32, "logprobs"),
    (torch.bfloat16, "masked_logprobs"),
    (torch.float16, "logprobs"),
    (torch.float64, "masked_logprobs"),
)


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


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("dtype,kind", KINDS, ids=str)
@skipped_if_refused()
def test_training_sees_the_bits_of_the_forward(
    backend: str, device: torch.device, dtype: torch.dtype, kind: str
) -> None:
    """On-policy, every log-ratio is exactly 0: the old log-probs came from single rows."""
    if BACKENDS[backend].unsuited(device, dtype) is not None:
        pytest.skip("the backend has no such kernels")
    x = make_problem(2, 2, 33, 150, values_in=torch.float32).to(device, dtype)
    rows = torch.arange(x.target.numel(), device=device)
    hidden, target = x.hidden.reshape(len(rows), -1), x.target.reshape(-1)
    options = dict(backend=backend, batch_invariant=True, max_workspace_bytes=16 * 150 * 8)

    def masks(of: Tensor) -> SamplingMask | None:
        return sets_of(of, 150) if kind == "masked_logprobs" else None

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


def by_place(hidden: Tensor, logits: Tensor) -> Tensor:
    logits[11:] *= 1.001
    return logits


def by_neighbours(hidden: Tensor, logits: Tensor) -> Tensor:
    return logits.add_(hidden.amax(0).sum() - hidden.amin(0).sum())


@pytest.mark.parametrize(
    ("spoil", "wrong"), [(by_place, "5 of them, first at 11"), (by_neighbours, "1 of them")]
)
def test_a_library_that_does_not_keep_a_rows_bits_is_an_error(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor, Tensor], Tensor], wrong: str
) -> None:
    right, args = invariance.project, (torch.randn(3, 4), torch.randn(9, 4), torch.arange(3))
    monkeypatch.setattr(invariance, "_proven", set())
    spoiled = lambda hidden, head, out: spoil(hidden, right(hidden, head, out))  # noqa: E731
    monkeypatch.setattr(invariance, "project", spoiled)
    message = f"batch_invariant: expected .* all 16 positions .* got .* at {wrong}"
    options = dict(backend="chunked", max_workspace_bytes=16 * 9 * 4)
    for _ in range(2):  # a failure is not forgotten
        with pytest.raises(RuntimeError, match=message):
            linear_logprobs(*args, batch_invariant=True, **options)
    linear_logprobs(*args, **options)
