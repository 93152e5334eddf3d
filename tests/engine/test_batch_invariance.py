"""batch_invariant: a row's bits depend on nothing but its own inputs."""

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
from grpo_kernels.linear_logprobs import OUTPUTS
from grpo_kernels.testing import make_problem
from tests.support.targets import targets

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


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("precision", ("fp32", "input"))
@skipped_if_refused()
def test_bits_are_the_same_in_every_batch(
    backend: str, device: torch.device, dtype: torch.dtype, precision: str
) -> None:
    """In tiles of 16 rows; the net has no GPU."""
    x = make_problem(1, TOKENS, 33, 257, values_in=torch.float32).to(device, dtype)

    def statistics(rows: Tensor) -> dict[str, Tensor]:
        temperature = torch.linspace(0.5, 2, TOKENS, device=device)[rows]
        args = (x.hidden[0][rows], x.weight, x.target[0][rows])
        options = dict(
            bias=x.bias, temperature=temperature, softcap=5.0, precision=precision, backend=backend,
            batch_invariant=True, max_workspace_bytes=16 * 257 * 8,
        )  # fmt: skip
        members = sets_of(rows, 257)
        out = linear_logprobs(*args, outputs=OUTPUTS, top_k=5, sampling_mask=members, **options)
        found = {name: getattr(out, name).detach() for name in OUTPUTS}
        alone = linear_logprobs(*args, **options).logprobs.detach()  # perhaps without a tile
        return found | {"alone": alone}

    everything = statistics(torch.arange(TOKENS, device=device))
    for rows in (torch.randperm(TOKENS)[:20], torch.tensor([TOKENS - 1]), torch.tensor([3] * 18)):
        rows = rows.to(device)
        for name, value in statistics(rows).items():
            if name == "mean_logit" and dtype == torch.float64 and device.type == "cuda":
                # torch's sums of fp64 depend on how many there are, and nothing rounds them away
                torch.testing.assert_close(value, everything[name][rows], rtol=0, atol=1e-15)
                continue
            assert torch.equal(value, everything[name][rows]), name


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
    message = f"batch_invariant: expected .* all 16 places .* got .* at {wrong}"
    options = dict(backend="chunked", max_workspace_bytes=16 * 9 * 4)
    for _ in range(2):  # a failure is not forgotten
        with pytest.raises(RuntimeError, match=message):
            linear_logprobs(*args, batch_invariant=True, **options)
    linear_logprobs(*args, **options)
