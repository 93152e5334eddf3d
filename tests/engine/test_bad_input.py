"""What an option of linear_logprobs refuses, and by which name: ``call -> argument``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import (
    Bounded,
    HeadLoRA,
    LossConfig,
    SamplingMask,
    TokenBatch,
    linear_logprobs,
    linear_policy_loss,
)

HIDDEN, WEIGHT, TARGET = torch.zeros(2, 16), torch.zeros(53, 16), torch.tensor([1, 2])
A, B = torch.zeros(3, 16), torch.zeros(53, 3)
MASKS = SamplingMask.from_lists([[1], [2]])


def lora(a: Any = A, b: Any = B, scaling: Any = 1.0) -> dict[str, object]:
    return dict(lora=HeadLoRA(a=a, b=b, scaling=scaling))


def masked(mask: object) -> dict[str, object]:
    return dict(sampling_mask=mask, outputs=("masked_logprobs",))


def top(k: object, *outputs: str) -> dict[str, object]:
    return dict(top_k=k, outputs=outputs or ("topk_indices",))


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(lora=(A, B)), "lora: expected a HeadLoRA or None, got tuple"),
        (lora(a=A[:, 1:]), r"lora\.a: expected shape \(r, 16\), r > 0, got \(3, 15\)"),
        (lora(a=A[:0]), r"lora\.a: expected shape .* got \(0, 16\)"),
        (lora(a=A[0]), r"lora\.a: expected shape .* got \(16,\)"),
        (lora(b=B[1:]), r"lora\.b: expected shape \(53, 3\) .* got \(52, 3\)"),
        (lora(b=B[:, :2]), r"lora\.b: expected shape \(53, 3\) .* got \(53, 2\)"),
        (lora(a=A.long()), r"lora\.a: expected one of torch\.float32.* got torch\.int64"),
        (lora(b=None), r"lora\.b: expected a tensor, got NoneType"),
        (lora(b=B.to("meta")), r"lora\.b: expected device cpu .* got meta"),
        (lora(scaling=float("nan")), r"lora\.scaling: expected a finite number"),
        (lora(scaling=None), r"lora\.scaling: expected a finite number"),
        (masked(None), "sampling_mask: .* for the output 'masked_logprobs', got None"),
        (masked([[1]]), "sampling_mask: expected a SamplingMask of 2 rows .* got list"),
        (masked(MASKS.take(slice(1))), "sampling_mask: .* of 2 rows .* got 1 rows"),
        (
            masked(SamplingMask.from_lists([[1], [53]])),
            r"sampling_mask: expected ids in \[0, 53\), got 53",
        ),
        (top(None, "topk_logprobs"), "top_k: expected a number of ids .* 'topk_logprobs'"),
        (top(None, "logprobs", "topk_indices"), "top_k: expected a number .* 'topk_indices'"),
        (top(3, "rank"), "top_k: expected None without one of the outputs topk_logp.* got 3"),
        (top(0), r"top_k: expected 1 to 53 \(V\), got 0"),
        (top(54), r"top_k: expected 1 to 53 \(V\), got 54"),
        (top(2.0), "top_k: expected an int, got 2.0"),
        (top(True), "top_k: expected an int, got True"),
        (dict(outputs=("ranks",)), "outputs: expected a tuple of names among .*rank, .* got"),
        (dict(outputs=("entries",)), "outputs: expected entries, gradient_error"),
        (dict(activation_bytes=-1), "activation_bytes: expected"),
        (dict(activation_bytes=1.5), "activation_bytes: expected"),
        (dict(activation_bytes=True), "activation_bytes: expected"),
        (dict(activation_bytes="all"), "activation_bytes: expected"),
        (dict(backward="fast"), "backward: expected 'exact' or a Bounded, got 'fast'"),
        (
            dict(backward=Bounded(), **masked(MASKS)),
            "backward: expected 'exact' for masked_logprobs",
        ),
        (
            dict(batch_invariant=True, backend="reference"),
            "batch_invariant: expected False with backend 'reference'",
        ),
        (
            dict(batch_invariant=True, backend="chunked", max_workspace_bytes=15 * 53 * 4),
            "max_workspace_bytes: expected room for 16 rows of",
        ),
    ],
)
def test_options_of_a_call(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        linear_logprobs(HIDDEN, WEIGHT, TARGET, **options)


def test_a_bounded_backward_with_an_entropy_bonus() -> None:
    batch = TokenBatch.from_padded(TARGET[None], torch.ones(1))
    args = (HIDDEN[None], WEIGHT, batch, LossConfig(entropy_coef=0.1))
    with pytest.raises(ValueError, match="backward: expected 'exact', since the gradient through"):
        linear_policy_loss(*args, backward=Bounded())


IDS, OFFSETS, FALLING = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), torch.tensor([0, 4, 3])
csr, lists, padded = SamplingMask.from_csr, SamplingMask.from_lists, SamplingMask.from_padded


@pytest.mark.parametrize(
    "build,arguments,message",
    [
        (Bounded, dict(tolerance=0.0), "tolerance: expected a float in"),
        (Bounded, dict(tolerance="small"), "tolerance: expected a float in"),
        (Bounded, dict(slots=0), "slots: expected an int of at least 1"),
        (Bounded, dict(seed=-1), "seed: expected an int in"),
        (csr, ([1], OFFSETS), r"indices: expected a \(N,\) .* got list"),
        (csr, (IDS.float(), OFFSETS), "indices: expected int32 or int64, got"),
        (csr, (IDS, OFFSETS[None]), r"offsets: expected a \(T \+ 1,\) integer"),
        (csr, (IDS, OFFSETS.short()), "offsets: expected int32 or int64"),
        (csr, (IDS, OFFSETS.to("meta")), "offsets: expected device cpu"),
        (csr, (IDS, OFFSETS[:2]), "offsets: expected values rising from 0 to N"),
        (csr, (IDS, FALLING), "offsets: .* 1 of them falling"),
        (csr, (IDS - 2, OFFSETS), r"indices: expected token ids in \[0, 2\*\*31\), got -1"),
        (lists, ([[-5]],), r"ids: expected token ids in \[0, .* got -5"),
        (lists, ([[1.5]],), "ids: expected integers, got 1.5"),
        (lists, ([[3], [True]],), "ids: expected integers, got True"),
        (lists, ([[2**62]],), r"ids: expected token ids in \[0, .* got 46116"),
        (padded, (IDS[None] + 2**62,), "ids: expected token ids in .* got 4611"),
        (padded, (IDS,), r"ids: expected a \(\.\.\., K\) integer tensor"),
        (padded, (IDS[None].half(),), "ids: expected int32 or int64"),
        (padded, (IDS[None] - 4,), r"ids: expected token ids in \[0, .* got -3"),
    ],
)
def test_what_cannot_be_built(build: Any, arguments: Any, message: str) -> None:
    args, named = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with pytest.raises(ValueError, match=message):
        build(*args, **named)
