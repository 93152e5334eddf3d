"""Packing a rollout: the kernel against torch operations, for every kind of input and error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import SamplingMask, TokenBatch, available_backends
from grpo_kernels.backends import kernel_packing
from grpo_kernels.batch import PACKERS, TOKEN_FIELDS, BatchInputs, Packing, host
from tests.conftest import HAS_GPU

pytestmark = [
    pytest.mark.skipif("triton" not in available_backends(), reason="the interpreter is off"),
    # which warns where a GPU gives inf or NaN without a word
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

MASKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda ids: None,
    "prefix": lambda ids: torch.arange(ids.shape[1]) < torch.arange(len(ids))[:, None],
    "holes": lambda ids: torch.rand(ids.shape) < 0.5,
    "nothing": lambda ids: torch.zeros_like(ids),
    "everything": lambda ids: torch.ones(ids.shape),
}
# sequences and their tokens, of which a block has 1,024
SHAPES = [(1, 1), (4, 7), (3, 1), (2, 2100), (5, 0), (0, 3)]
Make = Callable[..., TokenBatch]


def by_the_kernel(inputs: BatchInputs) -> Packing | None:
    packing = kernel_packing(inputs)
    assert (packing is not None) == (inputs.num_tokens > 0)
    return packing


@pytest.fixture
def pack(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TokenBatch]:
    """Return what makes a batch by the kernel or by torch operations."""

    def pack(by_kernel: bool, make: Make, **inputs: Any) -> TokenBatch:
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        with monkeypatch.context() as patch:
            patch.setitem(PACKERS, device.type, by_the_kernel if by_kernel else lambda _: None)
            return make(**moved)

    return pack


def rollout(sequences: int, length: int) -> dict[str, Any]:
    """Return a few ids without loss, and NaNs at them."""
    ids = torch.randint(0, 99, (sequences, length))
    ids[torch.rand(ids.shape) < 0.2] = -100
    values = torch.randn(4, sequences, length).masked_fill(ids == -100, torch.nan)
    fields = dict(zip(TOKEN_FIELDS, values, strict=True))
    fields["rollout_weights"] = fields["rollout_weights"].abs()
    return {"target": ids, "advantages": torch.randn(sequences).relu(), **fields}


def flat(inputs: dict[str, Any], cu_seqlens: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the same tokens in other sequences."""
    packed = {k: v.flatten() if getattr(v, "ndim", 0) == 2 else v for k, v in inputs.items()}
    packed["advantages"] = torch.randn(len(cu_seqlens) - 1)
    return packed | {"cu_seqlens": torch.tensor(cu_seqlens, dtype=dtype)}


def assert_same(got: TokenBatch, expected: TokenBatch) -> None:
    for mine, other in zip(got.tensors(), expected.tensors(), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert got.advantages_per_token == expected.advantages_per_token


def compare(pack: Make, make: Make, **inputs: Any) -> None:
    assert_same(pack(True, make, **inputs), pack(False, make, **inputs))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_padded(pack: Make, shape: tuple[int, int], mask: str) -> None:
    inputs = rollout(*shape)
    compare(pack, TokenBatch.from_padded, **inputs, mask=MASKS[mask](inputs["target"]))


@pytest.mark.parametrize("cu_seqlens", ([0, 28], [0, 0, 3, 3, 28, 28], [0, 1, 27, 28]))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_packed(pack: Make, cu_seqlens: list[int], dtype: torch.dtype) -> None:
    inputs = rollout(4, 7)
    inputs = flat(inputs | {"mask": MASKS["holes"](inputs["target"])}, cu_seqlens, dtype)
    compare(pack, TokenBatch.from_packed, **inputs)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("per_token", (False, True))
def test_dtypes(pack: Make, dtype: torch.dtype, per_token: bool) -> None:
    """Of columns and masks; advantages per token are not contiguous."""
    inputs = rollout(6, 4)
    advantages = inputs["advantages"].to(dtype)
    if per_token:
        advantages = (torch.randn(4, 6) > 0).to(dtype).t()
    inputs["advantages"] = advantages
    for name, each in zip(TOKEN_FIELDS, (dtype, torch.float32, dtype, torch.bfloat16), strict=True):
        inputs[name] = inputs[name].to(each)
    mask = MASKS["holes"](inputs["target"])
    for kind in (torch.uint8, torch.int32, torch.float16):
        compare(pack, TokenBatch.from_padded, **inputs, mask=mask.to(kind))


def test_what_a_prompt_has_and_numbers(pack: Make) -> None:
    inputs = {k: v for k, v in rollout(3, 5).items() if k != "ref_logprobs"}
    numbers = {"num_items_in_batch": torch.tensor(7), "entropy_scale": torch.tensor(0.5)}
    compare(
        pack, TokenBatch.from_padded, **inputs, **numbers, num_prompts=2.0,
        prompt_tokens=torch.tensor([5, 9, 5], dtype=torch.int32),
    )  # fmt: skip


def test_sampling_mask(pack: Make, device: torch.device) -> None:
    mask = SamplingMask.from_lists([[each, 98] for each in range(15)], device)
    compare(pack, TokenBatch.from_padded, **rollout(3, 5), sampling_mask=mask)


def wrong_at(name: str, value: float) -> Callable[[dict[str, Any]], None]:
    def change(inputs: dict[str, Any]) -> None:
        inputs["target"][2, 6] = 1
        inputs[name] = inputs[name].clone()
        inputs[name][(2, 6)[: inputs[name].dim()]] = value

    return change


WRONG = {
    "target": (wrong_at("target", -3), "target: expected ids >= 0 .* got -3"),
    "mask": (wrong_at("mask", 2), "mask: expected bool or 0 and 1"),
    "weights": (wrong_at("rollout_weights", -1.0), "rollout_weights: expected finite values >= 0"),
    "rollout": (wrong_at("rollout_logprobs", -torch.inf), "rollout_logprobs: expected finite"),
    "old": (wrong_at("old_logprobs", torch.nan), "old_logprobs: expected finite"),
    "ref": (wrong_at("ref_logprobs", torch.inf), "ref_logprobs: expected finite"),
    "advantages": (wrong_at("advantages", torch.nan), "advantages: expected finite"),
    "number": (wrong_at("num_items_in_batch", -1.0), "num_items_in_batch: expected a finite"),
    "another": (wrong_at("entropy_scale", torch.nan), "entropy_scale: expected a finite"),
    "prompts": (wrong_at("prompt_tokens", 0), "prompt_tokens: expected at least"),
    "lengths": (wrong_at("lengths", 1), r"lengths: expected \(.*\) for these tensors, got"),
}


def complete(lengths: bool = False) -> dict[str, Any]:
    inputs = rollout(3, 7)
    numbers = {name: torch.tensor(2.0) for name in ("num_items_in_batch", "entropy_scale")}
    inputs |= {"prompt_tokens": torch.tensor([7, 7, 7]), "mask": torch.ones(3, 7)} | numbers
    return inputs | {"lengths": (inputs["target"] != -100).sum(1) if lengths else None}


@pytest.mark.parametrize("by_kernel", (False, True))
@pytest.mark.parametrize("wrong", WRONG)
def test_errors(pack: Make, by_kernel: bool, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = WRONG[wrong]
    inputs = complete(lengths=wrong == "lengths")
    change(inputs)
    if isinstance(inputs["lengths"], Tensor):
        inputs["lengths"] = inputs["lengths"].tolist()
    # a CPU reads the numbers at once
    free = wrong not in ("number", "another")
    monkeypatch.setattr(host, "reading_is_free", lambda x: free)
    with pytest.raises(ValueError, match=message):
        pack(by_kernel, TokenBatch.from_padded, **inputs)


@pytest.mark.parametrize("by_kernel", (False, True))
@pytest.mark.parametrize(
    "cu_seqlens", ([0, 5, 3, 21], [0, 99, 4, 21], [1, 2, 21], [0, 2, 20], [-1, 21])
)
def test_falling_offsets(pack: Make, by_kernel: bool, cu_seqlens: list[int]) -> None:
    inputs = {k: v for k, v in complete().items() if k not in ("prompt_tokens", "lengths")}
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets rising from 0 to T = 21"):
        pack(by_kernel, TokenBatch.from_packed, **flat(inputs, cu_seqlens, torch.int64))


LATER = {
    "target": (wrong_at("target", -3), "target: expected ids >= 0"),
    "old": (wrong_at("old_logprobs", torch.nan), "TokenBatch: expected rising cu_seqlens"),
    "lengths": (wrong_at("lengths", 1), "^lengths: expected a sum that matches"),
    "more": (wrong_at("lengths", 7), "^lengths: expected a sum that matches"),
    "active": (wrong_at("active_lengths", 1), "active_lengths: expected a sum that matches"),
    "nothing": (lambda inputs: None, None),
}


@pytest.mark.skipif(HAS_GPU, reason="an assertion on a GPU ends its context")
@pytest.mark.parametrize("by_kernel", (False, True))
@pytest.mark.parametrize("wrong", LATER)
def test_values_of_known_lengths_are_checked_later(
    pack: Make, by_kernel: bool, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    change, message = LATER[wrong]
    inputs = complete(lengths=True)
    inputs["target"][2] = 1
    inputs["target"][0, 1] = -100
    for name in TOKEN_FIELDS:
        inputs[name] = inputs[name].nan_to_num()
    lengths = (inputs["target"] != -100).sum(1)
    active = lengths * (inputs["advantages"] != 0)
    inputs |= {"lengths": lengths, "active_lengths": active}
    if wrong == "more":  # than there are: rows of the end do not exist
        inputs["target"][2, :3] = -100
    change(inputs)
    inputs |= {name: inputs[name].tolist() for name in ("lengths", "active_lengths")}
    if message is None:
        assert pack(by_kernel, TokenBatch.from_padded, **inputs).lengths == tuple(lengths.tolist())
        return
    with pytest.raises(RuntimeError, match=message):
        pack(by_kernel, TokenBatch.from_padded, **inputs)
