"""Wrong arguments: one clear error each, naming the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpo_kernels import (
    FusedLinearGRPOLoss,
    Head,
    LossConfig,
    TokenBatch,
    Transform,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
)

HIDDEN, WEIGHT = torch.randn(2, 3, 4), torch.randn(9, 4)
TARGET = torch.tensor([[1, 2, 3], [4, 5, -100]])
ADVANTAGES = torch.tensor([1.0, -1.0])
HOT = Head(WEIGHT, transform=Transform(temperature=2.0))
META = torch.device("meta")


def batch(**overrides: object) -> TokenBatch:
    fields = {"target": TARGET, "advantages": ADVANTAGES, **overrides}
    return TokenBatch.from_padded(**fields)


def logprobs(**overrides: object) -> object:
    fields = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, **overrides}
    return linear_logprobs(**fields)


def loss(**overrides: object) -> object:
    fields = {
        "hidden": HIDDEN, "weight": WEIGHT, "batch": batch(), "config": LossConfig(), **overrides
    }  # fmt: skip
    return linear_policy_loss(**fields)


def packed(**overrides: object) -> TokenBatch:
    fields = {
        "target": TARGET.flatten(), "advantages": ADVANTAGES,
        "cu_seqlens": torch.tensor([0, 3, 6]), **overrides,
    }  # fmt: skip
    return TokenBatch.from_packed(**fields)


def nan_at(shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.zeros(shape)
    values[0] = float("nan")
    return values


CASES: list[tuple[Callable[[], object], str]] = [
    # the batch
    (lambda: batch(target=TARGET.float()), "target: expected dtype torch.int64, got torch.float32"),
    (lambda: batch(target=TARGET[0]), r"target: expected a \(B, L\) tensor of token ids, got \(3,"),
    (lambda: batch(target=[[1]]), "target: expected a .* got list"),
    (lambda: batch(target=TARGET - 3), "target: expected ids >= 0 .*, got -103"),
    (lambda: batch(advantages=torch.ones(3)), r"advantages: expected shape \(2,\).*got \(3,\)"),
    (lambda: batch(advantages=torch.ones(2, dtype=torch.int64)), "advantages: expected a floating"),
    (lambda: batch(advantages=[1.0, 2.0]), "advantages: expected shape .* got list"),
    (lambda: batch(advantages=nan_at((2,))), "advantages: expected finite .* got NaN"),
    (lambda: batch(advantages=torch.ones(2, device=META)), "advantages: expected device cpu"),
    (lambda: batch(mask=torch.ones(2, 4)), r"mask: expected the shape of target \(2, 3\), got"),
    (lambda: batch(mask=nan_at((2, 3))), "mask: expected bool or 0 and 1, got other values"),
    (lambda: batch(mask=torch.full((2, 3), 0.5)), "mask: expected bool or 0 and 1"),
    (lambda: batch(mask=torch.full((2, 3), -torch.inf)), "mask: expected bool or 0 and 1"),
    (lambda: batch(mask=TARGET), "mask: expected bool or 0 and 1"),
    (lambda: batch(old_logprobs=torch.zeros(2, 2)), "old_logprobs: expected the shape of target"),
    (lambda: batch(old_logprobs=nan_at((2, 3))), "old_logprobs: expected finite"),
    (lambda: batch(ref_logprobs=nan_at((2, 3))), "ref_logprobs: expected finite"),
    (lambda: batch(rollout_logprobs=nan_at((2, 3)) - torch.inf), "rollout_logprobs: expected fin"),
    (lambda: batch(ref_logprobs=TARGET), "ref_logprobs: expected a floating-point dtype"),
    (lambda: batch(num_items_in_batch=-1), "num_items_in_batch: expected a finite number >= 0"),
    (lambda: batch(num_items_in_batch=torch.ones(2)), "num_items_in_batch: expected a scalar"),
    (lambda: batch(entropy_scale=torch.nan), "entropy_scale: expected a finite number >= 0, got"),
    (lambda: batch(num_tokens_in_micro_batch=-1), "num_tokens_in_micro_batch: expected a finite"),
    (lambda: batch(gradient_accumulation_steps=0), "gradient_accumulation_steps: expected an int"),
    (lambda: packed(cu_seqlens=torch.tensor([0, 3, 5])), "cu_seqlens: expected offsets .* T = 6"),
    (lambda: packed(cu_seqlens=torch.tensor([0, 9, 6])), "cu_seqlens: expected offsets rising"),
    (lambda: packed(cu_seqlens=torch.tensor([0.0, 6.0])), "cu_seqlens: expected int32 or int64"),
    (lambda: packed(cu_seqlens=[0, 6]), r"cu_seqlens: expected a \(B \+ 1,\) integer tensor"),
    # the head
    (lambda: logprobs(hidden=HIDDEN[..., :3]), r"hidden: expected shape \(\.\.\., 4\)"),
    (lambda: logprobs(hidden=HIDDEN.long()), "hidden: expected one of torch.float32"),
    (lambda: logprobs(hidden="x"), "hidden: expected a tensor, got str"),
    (lambda: logprobs(weight=WEIGHT[0]), r"weight: expected shape \(V, D\), .* got \(4,\)"),
    (lambda: logprobs(weight=WEIGHT[:0]), r"weight: expected shape .* V, D >= 1, got \(0, 4\)"),
    (
        lambda: logprobs(hidden=HIDDEN[..., :0], weight=WEIGHT[:, :0]),
        r"weight: expected shape .* V, D >= 1, got \(9, 0\)",
    ),
    (lambda: logprobs(weight=WEIGHT.double()), "weight: expected dtype torch.float32 .* got"),
    (lambda: logprobs(weight=WEIGHT.to(META)), "weight: expected device cpu .* got meta"),
    (lambda: logprobs(bias=torch.zeros(8)), r"bias: expected shape \(9,\), got \(8,\)"),
    (lambda: logprobs(target=TARGET.abs() + 6), r"target: expected ids in \[0, 9\) .* got 106"),
    (lambda: logprobs(target=TARGET - 4), r"target: expected ids in \[0, 9\) .* got -104"),
    (lambda: logprobs(target=TARGET.int()), "target: expected a torch.int64 tensor, got"),
    (lambda: logprobs(target=TARGET[:, :2]), r"target: expected shape \(2, 3\) .* got \(2, 2\)"),
    (lambda: logprobs(temperature=0.0), "temperature: expected a finite number > 0, got 0.0"),
    (lambda: logprobs(temperature=-1.0), "temperature: expected a finite number > 0"),
    (lambda: logprobs(temperature=torch.ones(2)), r"temperature: expected a float or shape \(2, 3"),
    (lambda: logprobs(temperature=torch.zeros(2, 3)), "temperature: expected values > 0"),
    (lambda: logprobs(temperature=torch.ones(2, 3, requires_grad=True)), "needs no gradient"),
    (lambda: logprobs(softcap=0.0), "softcap: expected a finite number > 0, or None"),
    (lambda: logprobs(logit_scale=0.0), "logit_scale: expected a finite number > 0, got 0.0"),
    (lambda: logprobs(logit_scale=float("nan")), "logit_scale: expected a finite number"),
    (lambda: logprobs(precision="bf16"), "precision: expected one of fp32, input, tf32; got 'bf16"),
    (lambda: logprobs(precision="tf32"), "precision: 'tf32' expects fp32 tensors on a CUDA device"),
    (lambda: logprobs(backend="cuda"), "backend: expected one of auto, triton, cpu, chunked"),
    (lambda: logprobs(outputs=("logits",)), "outputs: expected a tuple of names among logprobs"),
    (lambda: logprobs(outputs="logprobs"), "outputs: expected a tuple of names"),
    (lambda: logprobs(outputs=()), "outputs: expected a tuple of names"),
    (lambda: logprobs(max_workspace_bytes=3), "max_workspace_bytes: expected at least 36"),
    (lambda: logprobs(max_workspace_bytes=1.5), "max_workspace_bytes: expected an int or None"),
    (lambda: logprobs(max_workspace_bytes=True), "max_workspace_bytes: expected an int or None"),
    (lambda: logprobs(temperature="hot"), "temperature: expected a finite number > 0, got 'hot'"),
    (lambda: logprobs(softcap="3"), "softcap: expected a finite number > 0, or None, got '3'"),
    (lambda: logprobs(logit_scale=None), "logit_scale: expected a finite number > 0, got None"),
    (lambda: logprobs(target=3), "target: expected a torch.int64 tensor, got int"),
    # the loss
    (lambda: loss(hidden=HIDDEN[:, :2]), r"hidden: expected shape \(2, 3, 4\) .* got \(2, 2, 4\)"),
    (lambda: loss(batch=batch(target=TARGET.abs())), r"target: expected ids in \[0, 9\) .* 100"),
    (lambda: loss(config=LossConfig(beta=0.1)), "ref_logprobs: expected the reference's .* None"),
    (lambda: loss(config={"beta": 0.1}), "config: expected a LossConfig, got dict"),
    (lambda: loss(config=None), "config: expected a LossConfig, got NoneType"),
    (lambda: loss(batch=TARGET), "batch: expected a TokenBatch, got Tensor"),
    (lambda: policy_loss(torch.zeros(5), TARGET, LossConfig()), "batch: expected a TokenBatch"),
    (lambda: loss(max_workspace_bytes=1.5), "max_workspace_bytes: expected an int or None"),
    (lambda: loss(hidden=None), "hidden: expected a tensor, got NoneType"),
    (lambda: loss(weight=None), "weight: expected a tensor, got NoneType"),
    (lambda: loss(weight=Head(WEIGHT), bias=WEIGHT[:, 0]), "bias: expected None beside a Head"),
    (lambda: loss(weight=Head(WEIGHT), softcap=2.0), "softcap: expected None beside a Head"),
    (lambda: loss(weight=Head(WEIGHT), logit_scale=2.0), "logit_scale: expected 1.0 beside a Head"),
    (lambda: loss(weight=HOT), "weight: expected a Head of temperature 1, .* got 2.0"),
    (lambda: logprobs(weight=HOT), "weight: expected a Head of temperature 1, .* got 2.0"),
    (lambda: loss(schedule="three_pass"), "schedule: expected one of auto, one_pass, two_pass"),
    (lambda: loss(precision="bf16"), "precision: expected one of fp32, input"),
    (
        lambda: policy_loss(torch.zeros(4), batch(), LossConfig()),
        r"logprobs: expected shape \(5,\) \(the batch's tokens\) or \(2, 3\) \(its layout\)",
    ),
    (lambda: policy_loss(torch.zeros(5).half(), batch(), LossConfig()), "logprobs: expected float"),
    (
        lambda: policy_loss(torch.zeros(5), batch(), LossConfig(entropy_coef=0.1)),
        r"entropy: expected a \(T,\) tensor for this loss, got None",
    ),
    (
        lambda: policy_loss(torch.zeros(5), batch(), LossConfig(), torch.zeros(4)),
        r"entropy: expected shape \(5,\) .* got \(4,\)",
    ),
    (lambda: FusedLinearGRPOLoss(epsilom=0.1), "epsilom: expected a setting of dapo"),
    (lambda: FusedLinearGRPOLoss(loss_type="ppo"), "loss_type: expected one of bnpo, cispo"),
]


@pytest.mark.parametrize("call,message", CASES, ids=[message[:40] for _, message in CASES])
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_nan_on_masked_tokens_is_no_error() -> None:
    values = torch.zeros(2, 3)
    values[1, 2] = float("nan")
    assert batch(old_logprobs=values, ref_logprobs=values).num_tokens == 5


def test_no_sequences_at_all() -> None:
    empty = TokenBatch.from_padded(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0))
    hidden = torch.zeros(0, 3, 4, requires_grad=True)
    out = linear_policy_loss(hidden, WEIGHT, empty, LossConfig())
    assert out.loss.item() == 0
    out.loss.backward()
