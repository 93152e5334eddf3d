"""Wrong arguments: one clear error each that names the argument, and nothing has changed.

Values of a wrong kind, shape, dtype, device or range are made from a right one for every argument
of every public function; ``CASES`` has what only an example can say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import grpo_kernels.batch.host as host
from grpo_kernels import (
    Bounded,
    FusedLinearGRPOLoss,
    Head,
    HeadLoRA,
    LossConfig,
    SamplingMask,
    TokenBatch,
    Transform,
    context_parallel_rows,
    explain,
    explain_divergence,
    explain_logprobs,
    linear_divergence,
    linear_logprobs,
    linear_policy_loss,
    next_token_targets,
    policy_loss,
    warm_up,
)
from grpo_kernels.losses import LOSSES
from grpo_kernels.testing import make_config

META = torch.device("meta")
HUGE = 10**400  # larger than any float


def leaf(*shape: int) -> Tensor:
    """Return a parameter with a gradient of a step before."""
    x = torch.randn(shape, requires_grad=True)
    x.grad = torch.ones(shape)
    return x


def right(name: str) -> dict[str, Any]:
    """Return arguments that a function of ``FUNCTIONS`` takes, most of them not the default."""
    ids, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 4])
    target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    batch = {
        "target": target,
        "advantages": torch.tensor([1.0, -1.0]),
        "mask": torch.ones(2, 3),
        **{f"{name}_logprobs": -torch.rand(2, 3) for name in ("old", "ref", "rollout")},
        "num_items_in_batch": 5,
        "num_tokens_in_micro_batch": 5,
        "num_sequences_in_micro_batch": 2,
        "num_prompts": 1.5,
        "prompt_tokens": torch.tensor([4, 3]),
        "entropy_scale": 1.0,
        "gradient_accumulation_steps": 2,
        "lengths": [3, 2],
        "active_lengths": [3, 2],
        "sampling_mask": SamplingMask.from_padded(torch.arange(9).expand(2, 3, 9)),
    }
    head = {
        "weight": leaf(9, 4),
        "bias": leaf(9),
        "lora": HeadLoRA(a=leaf(2, 4), b=leaf(9, 2)),
        "logit_scale": 1.5,
        "softcap": 10.0,
        "precision": "fp32",
        "backend": "auto",
        "max_workspace_bytes": 1 << 20,
        "batch_invariant": False,
    }
    rows = head | {"hidden": leaf(2, 3, 4), "backward": "exact", "activation_bytes": 1 << 20}
    loss = {
        "batch": TokenBatch.from_padded(target, batch["advantages"]),
        "config": LossConfig(),
        "schedule": "auto",
        "metric_rows": "all",
    }
    models = {
        "hidden": leaf(2, 3, 4),
        "head": leaf(9, 4),
        "teacher_hidden": torch.randn(2, 3, 5),
        "teacher_head": torch.randn(9, 5),
        "kind": "jsd",
        "beta": 0.5,
        "vocab_size": 8,
        **{name: head[name] for name in ("precision", "backend", "max_workspace_bytes")},
        "batch_invariant": False,
    }
    tokens = {
        "temperature": torch.ones(2, 3), "weights": torch.ones(2, 3), "mask": torch.ones(2, 3),
    }  # fmt: skip
    flat = {"target": target.flatten(), "mask": torch.ones(6), "sampling_mask": None}
    flat |= {f"{name}_logprobs": -torch.rand(6) for name in ("old", "ref", "rollout")}
    return {
        "from_padded": batch,
        "from_packed": batch | flat | {"cu_seqlens": torch.tensor([0, 3, 6])},
        "linear_logprobs": rows
        | {"target": target, "temperature": torch.ones(2, 3), "top_k": 3}
        | {"outputs": ("logprobs", "topk_indices"), "backend": "chunked"},
        "linear_policy_loss": rows
        | loss
        | {"main_grad": torch.zeros(9, 4)},
        "linear_divergence": models | tokens,
        "explain_divergence": models,
        "explain": rows | loss,
        "explain_logprobs": rows,
        "policy_loss": {
            "logprobs": leaf(5), "entropy": leaf(5), "batch": loss["batch"], "config": LossConfig(),
        },
        "warm_up": head | {"config": LossConfig()},
        "next_token_targets": {"input_ids": ids, "cu_seqlens": offsets, "mask": torch.ones(4)},
        "context_parallel_rows": {
            "cu_seqlens": torch.tensor([0, 4, 8]), "rank": 1, "size": 2, "layout": "head_tail",
        },
        "from_csr": {"indices": ids, "offsets": offsets},
        "Bounded": {"tolerance": 1e-3, "slots": 8, "exact_weight": True, "seed": 3},
        "LossConfig": {
            "loss_type": "dapo", "beta": 0.1, "importance_sampling_level": "token",
            "temperature": 0.5, "kl_estimator": "k3", "use_bias_correction_kl": True,
            "max_completion_length": 5, "entropy_coef": 0.1, "top_entropy_quantile": 0.5,
            "off_policy_mask_threshold": 0.5, "rollout_correction_mode": "token_mask",
            "rollout_correction_max": 3.0, "rollout_correction_min": 0.5, "epsilon": 0.2,
            "epsilon_high": 0.3, "delta": 4.0, "dual_clip": 3.0,
        },
    }[name]  # fmt: skip


FUNCTIONS: dict[str, Callable[..., object]] = {
    "from_padded": TokenBatch.from_padded,
    "from_packed": TokenBatch.from_packed,
    "linear_logprobs": linear_logprobs,
    "linear_policy_loss": linear_policy_loss,
    "linear_divergence": linear_divergence,
    "explain_divergence": explain_divergence,
    "explain": explain,
    "explain_logprobs": explain_logprobs,
    "policy_loss": policy_loss,
    "warm_up": warm_up,
    "next_token_targets": next_token_targets,
    "context_parallel_rows": context_parallel_rows,
    "from_csr": SamplingMask.from_csr,
    "Bounded": Bounded,
    "LossConfig": LossConfig,
}

# what is wrong of its kind elsewhere, and has a meaning here
ACCEPTED = {
    ("next_token_targets", "input_ids"): {"ids below 0", "ids too large"},  # it looks at places
    ("explain_logprobs", "hidden"): {"no first dimension"},  # any (..., D)
    ("from_csr", "indices"): {"ids too large"},  # for any vocabulary
    ("from_padded", "prompt_tokens"): {"ids too large"},  # of tokens that are elsewhere
    ("from_packed", "prompt_tokens"): {"ids too large"},
    ("linear_logprobs", "temperature"): {"integers"},
    ("linear_divergence", "temperature"): {"integers"},
    ("linear_divergence", "weights"): {"integers"},
    ("warm_up", "weight"): {"another device"},
    ("LossConfig", "max_completion_length"): {"1.5"},
    ("LossConfig", "entropy_coef"): {"-1"},
    ("LossConfig", "off_policy_mask_threshold"): {"-1"},
}
# how messages of linear_divergence call what they find within these
NAMED = {
    "teacher_hidden": ("teacher_head",),
    "hidden": ("weight",),
}
VALUES_ARE_NOT_READ = (
    "hidden",
    "weight",
    "bias",
    "lora",
    "logprobs",
    "entropy",
    "main_grad",
    "head",
    "teacher_hidden",
    "teacher_head",
    "weights",
)
NAN_IS_UNKNOWN = ("rollout_logprobs",)
ANY_SIZE = (
    "max_workspace_bytes",
    "activation_bytes",
    "gradient_accumulation_steps",
    "slots",
    "size",
)
FRACTIONS = (
    "num_items_in_batch",
    "num_tokens_in_micro_batch",
    "num_sequences_in_micro_batch",
    "num_prompts",
)
# meta tensors have no values that a host could compare
ON_NO_DEVICE = ("context_parallel_rows",)


class Wrong(NamedTuple):
    """A value that an argument cannot have."""

    kind: str
    value: Any


def wrong_values(function: str, name: str, value: Any) -> Iterator[Wrong]:
    """Make them of a right value."""
    yield from (Wrong("a text", "no such name"), Wrong("an object", object()))
    yield Wrong("a list", [[1.5]])
    if isinstance(value, Tensor):
        yield from _wrong_tensors(function, name, value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (Wrong(repr(x), x) for x in (math.nan, math.inf, -1))
        if name not in ANY_SIZE:
            yield Wrong("an int above all floats", HUGE)
        if isinstance(value, int) and name not in FRACTIONS:
            yield Wrong("1.5", 1.5)
    elif isinstance(value, HeadLoRA):
        for part in ("a", "b"):
            for wrong in wrong_values(function, name, getattr(value, part)):
                factors = {"a": value.a, "b": value.b, part: wrong.value}
                yield Wrong(f"{part}: {wrong.kind}", HeadLoRA(**factors))
        yield Wrong("a scaling of NaN", HeadLoRA(a=value.a, b=value.b, scaling=math.nan))
    else:
        yield from (Wrong("a number", 3), Wrong("NaN", math.nan))


def _wrong_tensors(function: str, name: str, value: Tensor) -> Iterator[Wrong]:
    yield Wrong("twice as wide", torch.cat([value, value], -1))
    yield Wrong("no first dimension", value[0])
    if function not in ON_NO_DEVICE:
        yield Wrong("another device", value.to(META))
    if not value.is_floating_point():
        yield from (Wrong("floats", value.float()), Wrong("ids below 0", value - 1000))
        yield Wrong("ids too large", value + 1000)
        return
    if name != "mask":  # of 0 and 1 in any dtype
        yield Wrong("integers", value.long())
    if name not in (*VALUES_ARE_NOT_READ, *NAN_IS_UNKNOWN):
        yield Wrong("NaN", torch.where(torch.arange(value.numel()) == 0, math.nan, value.flatten())
                    .view_as(value))  # fmt: skip


ARGUMENTS = [(function, name) for function in FUNCTIONS for name in right(function)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_right_arguments(function: str) -> None:
    FUNCTIONS[function](**right(function))


@pytest.mark.parametrize(("function", "name"), ARGUMENTS, ids=map(".".join, ARGUMENTS))
def test_every_argument(function: str, name: str) -> None:
    arguments = right(function)
    tensors = [x for x in tree_leaves(list(map(_parts, arguments.values()))) if _is_tensor(x)]
    before = [(x.detach().clone(), x.grad if x.grad is None else x.grad.clone()) for x in tensors]
    for wrong in wrong_values(function, name, arguments[name]):
        if wrong.kind in ACCEPTED.get((function, name), ()):
            continue
        with pytest.raises(ValueError, match=r"^\w+") as error:
            FUNCTIONS[function](**arguments | {name: wrong.value})
        said = str(error.value).partition(": ")[0].partition(".")[0]
        # of two that do not fit together it may be the other
        fits = said in arguments and isinstance(wrong.value, Tensor)
        assert fits or said in (name, *NAMED.get(name, ())), wrong.kind
    for x, (value, grad) in zip(tensors, before, strict=True):
        torch.testing.assert_close(x.detach(), value, rtol=0, atol=0)
        assert grad is None or torch.equal(x.grad, grad)


def _parts(value: Any) -> Any:
    return [value.a, value.b] if isinstance(value, HeadLoRA) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def batch(**overrides: object) -> TokenBatch:
    given = right("from_padded")
    return TokenBatch.from_padded(
        **{"target": given["target"], "advantages": given["advantages"], **overrides}
    )


def packed(*cu_seqlens: int, **optional: Any) -> TokenBatch:
    advantages = torch.ones(len(cu_seqlens) - 1)
    return TokenBatch.from_packed(torch.arange(6), advantages, torch.tensor(cu_seqlens), **optional)


def logprobs(**overrides: object) -> object:
    return _without_options("linear_logprobs", linear_logprobs, "target", overrides)


def loss(**overrides: object) -> object:
    return _without_options("linear_policy_loss", linear_policy_loss, "batch config", overrides)


def buffered(buffer: Tensor, **options: object) -> object:
    return loss(weight=leaf(9, 4), main_grad=buffer, **options)


def divergence(**overrides: object) -> object:
    given = right("linear_divergence")
    named = ("hidden", "head", "teacher_hidden", "teacher_head")
    return linear_divergence(**{name: given[name] for name in named} | overrides)


def of_topk(logprobs: Tensor, ids: Tensor) -> object:
    return divergence(teacher_hidden=None, teacher_head=None, teacher_topk=(logprobs, ids))


def _without_options(name: str, function: Callable, also: str, overrides: dict) -> object:
    given = right(name)
    return function(
        **{name: given[name] for name in ("hidden", "weight", *also.split())} | overrides
    )


WEIGHT, TARGET = torch.randn(9, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
WIDE, TIED = torch.zeros(9, 4), leaf(9, 4)
IDS, MASKED = torch.arange(3), ("masked_logprobs",)
FAR, NONE = SamplingMask.from_lists([[53]] * 6), SamplingMask.from_lists([[]] * 6)
HOT = Head(WEIGHT, transform=Transform(temperature=2.0))
ENTROPY, GATED = LossConfig(entropy_coef=0.1), LossConfig(top_entropy_quantile=0.5)
PROMPTS = LossConfig(loss_aggregation="prompt_mean")
FIRST = torch.tensor([-0.7, -1.6, -2.3]).expand(2, 3, 3), torch.tensor([4, 0, 7]).expand(2, 3, 3)
LOGPROBS, LISTED = "teacher_topk log-probabilities", "teacher_topk ids"

# call -> the argument that is named, and what makes the case
CASES: list[tuple[Callable[[], object], str, str]] = [
    # a batch
    (lambda: batch(mask=torch.full((2, 3), 0.5)), "mask", "bool or 0 and 1"),
    (lambda: batch(mask=TARGET), "mask", "bool or 0 and 1, got other values$"),
    (lambda: batch(mask=-torch.rand(2, 3)), "mask", r"\(is it old_logprobs=\?\)$"),  # by position
    (lambda: batch(rollout_logprobs=torch.full((2, 3), -torch.inf)), "rollout_logprobs", "finite"),
    (lambda: batch(rollout_weights=torch.full((2, 3), -1.0)), "rollout_weights", "finite .* >= 0"),
    (lambda: batch(num_items_in_batch=torch.ones(2)), "num_items_in_batch", r"got shape \(2,\)"),
    (lambda: batch(gradient_accumulation_steps=0), "gradient_accumulation_steps", ">= 1"),
    (lambda: batch(old_logprob=torch.zeros(2, 3)), "old_logprob", "expected one of"),
    (lambda: batch(lengths=[2, 2]), "lengths", r"\(3, 2\) for these tensors, got \(2, 2\)"),
    (lambda: batch(lengths=[1, 4]), "lengths", r"of shape \(2, 3\), got \[1, 4\]"),
    (lambda: packed(0, 3, 6, lengths=[3, 4]), "lengths", r"of shape \(6,\), got \[3, 4\]"),
    (lambda: batch(active_lengths=[3, 2]), "lengths", "next to active_lengths, got None"),
    (lambda: batch(lengths=[3, 2], active_lengths=[3, 3]), "active_lengths", "at most"),
    (lambda: packed(0, 3, 5), "cu_seqlens", "T = 6"),
    (lambda: packed(0, 9, 6), "cu_seqlens", "rising"),
    # a sampling mask
    (lambda: SamplingMask.from_csr(IDS, torch.tensor([0, 4, 3])), "offsets", "falling at 1 of"),
    (lambda: SamplingMask.from_lists([[3], [True]]), "ids", "expected integers, got True"),
    (lambda: SamplingMask.from_lists([[2**62]]), "ids", r"token ids in \[0, .* got 46116"),
    (lambda: SamplingMask.from_padded(IDS), "ids", r"a \(\.\.\., K\) integer tensor"),
    (lambda: SamplingMask.from_padded(IDS[None].half()), "ids", "int32 or int64"),
    (lambda: SamplingMask.from_padded(IDS[None] - 4), "ids", r"\[0, .* got -4"),
    (lambda: logprobs(sampling_mask=IDS, outputs=MASKED), "sampling_mask", "a SamplingMask of 6"),
    (lambda: logprobs(outputs=MASKED), "sampling_mask", "output 'masked_logprobs', got None"),
    (lambda: logprobs(sampling_mask=FAR, outputs=MASKED), "sampling_mask", r"\[0, 9\), got 53"),
    # log-probabilities
    (lambda: logprobs(weight=WEIGHT[:0]), "weight", r"V, D >= 1, got \(0, 4\)"),
    (lambda: logprobs(weight=WEIGHT.double()), "weight", "expected dtype torch.float32"),
    (lambda: logprobs(target=TARGET.abs().clamp(max=9)), "target", r"in \[0, 9\) .* got 9"),
    (lambda: logprobs(target=TARGET.int()), "target", "torch.int64"),
    (lambda: logprobs(temperature=0.0), "temperature", "number > 0, got 0.0"),
    (lambda: logprobs(temperature=torch.zeros(2, 3)), "temperature", "values > 0"),
    (
        lambda: logprobs(temperature=torch.ones(2, 3, requires_grad=True)),
        "temperature",
        "requires_grad=False",
    ),
    (lambda: logprobs(softcap=0.0), "softcap", "> 0, or None"),
    (lambda: logprobs(logit_scale=0.0), "logit_scale", "> 0, got 0.0"),
    (lambda: logprobs(precision="tf32"), "precision", "fp32 tensors on a CUDA device"),
    (lambda: logprobs(outputs=()), "outputs", "tuple of names"),
    (lambda: logprobs(outputs=("entries",)), "outputs", "entries, gradient_error"),
    (lambda: logprobs(outputs=("topk_indices",)), "top_k", "a number of ids"),
    (
        lambda: logprobs(outputs=("lse",), top_k=3),
        "top_k",
        "None without one of the outputs",
    ),
    (lambda: logprobs(outputs=("topk_indices",), top_k=10), "top_k", r"1 to 9 \(V\), got 10"),
    (lambda: logprobs(max_workspace_bytes=3), "max_workspace_bytes", "at least 36"),
    (
        lambda: logprobs(batch_invariant=True, backend="chunked", max_workspace_bytes=15 * 9 * 4),
        "max_workspace_bytes",
        "room for 16 rows",
    ),
    (lambda: logprobs(weight=HOT), "weight", "Head with temperature 1 .* got 2.0"),
    (
        lambda: logprobs(backward=Bounded(), sampling_mask=NONE, outputs=MASKED),
        "backward",
        "'exact' for masked_logprobs",
    ),
    # a divergence
    (lambda: divergence(kind="kl"), "kind", "forward_kl, jsd, reverse_kl; got 'kl'"),
    (lambda: divergence(kind="jsd", beta=1.0), "beta", r"a number in \(0, 1\), got 1.0"),
    (lambda: divergence(vocab_size=10), "vocab_size", r"1 to 9 \(ids of head\), got 10"),
    (lambda: divergence(teacher_topk=FIRST), "teacher_topk", "None when teacher_hidden"),
    (lambda: divergence(teacher_hidden=None), "teacher_hidden", "if teacher_topk is not given"),
    (lambda: divergence(teacher_head=WEIGHT[:8]), "teacher_hidden", r"to match head"),
    (
        lambda: divergence(teacher_head=torch.randn(8, 5)),
        "teacher_head",
        "the student's vocabulary of 9 ids, got 8; .* padding",
    ),
    (
        lambda: divergence(teacher_head=leaf(9, 5)),
        "teacher_hidden, teacher_head",
        "requires_grad=False",
    ),
    (
        lambda: divergence(
            teacher_hidden=torch.randn(2, 3, 5).double(), teacher_head=torch.randn(9, 5).double()
        ),
        "teacher_hidden",
        "fp64 if and only if hidden is fp64",
    ),
    (
        lambda: divergence(teacher_hidden=None, teacher_head=None, teacher_topk=FIRST[0]),
        "teacher_topk",
        r"\(log-probabilities, ids\)",
    ),
    (lambda: of_topk(FIRST[0], FIRST[1].int()), LISTED, "a torch.int64 tensor"),
    (lambda: of_topk(FIRST[0][:1], FIRST[1]), LOGPROBS, "expected shape"),
    (lambda: of_topk(FIRST[0].flip(-1), FIRST[1]), LOGPROBS, "descending"),
    (lambda: of_topk(FIRST[0], FIRST[1] * 0), LISTED, "each id once"),
    (lambda: of_topk(FIRST[0], FIRST[1] + 9), LISTED, r"ids in \[0, 9\)"),
    (lambda: of_topk(FIRST[0] + 5, FIRST[1]), LOGPROBS, "sum to at most 1"),
    (lambda: of_topk(*(x[..., :0] for x in FIRST)), "teacher_topk", r"1 to 8 ids \(V - 1\), got 0"),
    # a loss
    (lambda: loss(batch=batch(target=TARGET.abs())), "target", r"in \[0, 9\) .* 100"),
    (lambda: loss(config=LossConfig(beta=0.1)), "ref_logprobs", "got None"),
    (
        lambda: loss(config=ENTROPY, backward="sparse", schedule="two_pass"),
        "backward",
        "'exact' for an entropy bonus in two passes, got 'sparse'",
    ),
    (lambda: loss(backward="dense"), "backward", "'exact', 'sparse' or a Bounded, got 'dense'"),
    (lambda: loss(config=GATED, metric_rows="active"), "metric_rows", "'all' for a loss with"),
    (lambda: loss(weight=Head(WEIGHT), bias=WEIGHT[:, 0]), "bias", "None when weight is a Head"),
    (lambda: loss(weight=Head(WEIGHT), softcap=2.0), "softcap", "None when weight is a Head"),
    (
        lambda: loss(weight=Head(WEIGHT), logit_scale=2.0),
        "logit_scale",
        "1.0 when weight is a Head",
    ),
    (
        lambda: loss(
            config=LossConfig(rollout_correction_mode="token_mask"),
            batch=batch(rollout_weights=torch.ones(2, 3), rollout_logprobs=torch.zeros(2, 3)),
        ),
        "rollout_weights",
        "None, because rollout_correction",
    ),
    (
        lambda: loss(
            config=LossConfig(loss_type="vespo"), batch=batch(rollout_logprobs=torch.zeros(2, 3))
        ),
        "rollout_correction_mode",
        "token mode for vespo.* 'token_mask'",
    ),
    (lambda: buffered(WIDE.half()), "main_grad", "dtype torch.float32"),
    (lambda: buffered(torch.zeros(4, 9).t()), "main_grad", "a non-contiguous one"),
    (lambda: buffered(leaf(9, 4)), "main_grad", "requires_grad=False"),
    (
        lambda: loss(weight=TIED, main_grad=TIED.detach()),
        "main_grad",
        "a buffer other than the weight",
    ),
    (lambda: loss(weight=WEIGHT, main_grad=WIDE), "main_grad", "None for a weight"),
    (lambda: buffered(WIDE, backend="reference"), "main_grad", "eager reference"),
    (lambda: policy_loss(torch.zeros(5).half(), batch(), LossConfig()), "logprobs", "float32"),
    (lambda: policy_loss(torch.zeros(4), batch(), ENTROPY), "logprobs", r"\(5,\) .* or \(2, 3\)"),
    (lambda: policy_loss(torch.zeros(5), batch(), ENTROPY), "entropy", "got None"),
    # settings
    (lambda: FusedLinearGRPOLoss(epsilom=0.1), "epsilom", r"a setting of dapo .*is it epsilon\?"),
    (lambda: LossConfig(loss_type="dappo"), "loss_type", r"got 'dappo' \(is it dapo\?\)"),
    (lambda: LossConfig(epsilon=-0.1), "epsilon", ">= 0, got -0.1"),
    (lambda: LossConfig(temperature=0.0), "temperature", "a finite number > 0"),
    (lambda: LossConfig(delta=0), "delta", "> 0"),
    (lambda: LossConfig(dual_clip=1.0), "dual_clip", "> 1"),
    (lambda: LossConfig(top_entropy_quantile=0.0), "top_entropy_quantile", r"\(0, 1\]"),
    (lambda: LossConfig(rollout_correction_min=3.0), "rollout_correction_min", "below"),
    (lambda: LossConfig(loss_type="dr_grpo"), "max_completion_length", "the constant length"),
    (lambda: LossConfig(loss_type="sapo", delta=2.0), "delta", "a setting of sapo"),
    (lambda: LossConfig(loss_type="pg", epsilon=0.2), "epsilon", r"a setting of pg \(none\)"),
    *(
        (
            lambda name=name: LossConfig(loss_type=name, importance_sampling_level="sequence"),
            "importance_sampling_level",
            name,
        )
        for name in ("gmpo", "vespo")
    ),
    (lambda: LossConfig(loss_type="trm"), "trm_threshold", "> 0, got None"),
    (lambda: LossConfig(loss_type="vaco"), "vaco_threshold", "> 0, got None"),
    (lambda: LossConfig(loss_type="icepop", icepop_low=1.1), "icepop_low", r"\(0, 1\]"),
    (lambda: LossConfig(loss_type="cppo", cppo_w_min=0), "cppo_w_min", r"\(0, 1\]"),
    (lambda: LossConfig(loss_type="fipo", fipo_clip=1), "fipo_clip", r"\[0, 1\)"),
    (lambda: LossConfig(loss_type="dppo_kl", dppo_kl_low=-1), "dppo_kl_low", ">= 0"),
    (lambda: LossConfig(bypass_mode="yes"), "bypass_mode", "False, True; got 'yes'"),
    (lambda: LossConfig(loss_aggregation="mean"), "loss_aggregation", "prompt_mean, .*'mean'"),
    (
        lambda: LossConfig(loss_aggregation="fixed_length"),
        "max_completion_length",
        "dapo divides by .fixed_length.",
    ),
    # what a loss needs of a batch
    *(
        (lambda name=name: loss(config=make_config(name)), "rollout_logprobs", f"{name} .*got None")
        for name, named in LOSSES.items()
        if named.bypass_mode
    ),
    (lambda: loss(config=LossConfig(bypass_mode=True)), "rollout_logprobs", "dapo .*got None"),
    (lambda: loss(config=PROMPTS), "prompt_tokens", "tokens of each sequence.s prompt.* got None"),
    (lambda: batch(prompt_tokens=torch.tensor([2, 3])), "prompt_tokens", "at least the tokens"),
    (lambda: batch(prompt_tokens=torch.tensor([4])), "prompt_tokens", "one per sequence, 2, got 1"),
    (lambda: batch(num_prompts=-1), "num_prompts", ">= 0"),
    # warming up
    (lambda: warm_up(WEIGHT, LossConfig(), inputs=["logprobs"]), "inputs", "any of old_logprobs"),
]


@pytest.mark.parametrize(
    ("call", "argument", "message"), CASES, ids=[f"{case[1]}: {case[2]}" for case in CASES]
)
def test_examples(call: Callable[[], object], argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: .*{message}"):
        call()


@pytest.mark.parametrize(
    "target,advantages,counts,message",
    [
        (1, 1.0, [2, 2], "lengths: expected a sum that matches"),
        (1, float("nan"), [2, 1], "finite values"),
        (-7, 1.0, [2, 1], "target: expected ids >= 0"),
        (99, 1.0, [2, 1], r"target: expected ids in \[0, 9\)"),
    ],
)
def test_with_counts_values_are_checked_on_the_device(
    monkeypatch: pytest.MonkeyPatch, target: int, advantages: float, counts: list, message: str
) -> None:
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)

    ids, each = torch.full((2, 3), target), torch.full((2,), advantages)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    with pytest.raises(RuntimeError, match=message):
        loss(batch=TokenBatch.from_padded(ids, each, mask, lengths=counts))


def test_nan_on_masked_tokens_is_no_error() -> None:
    values = torch.zeros(2, 3)
    values[1, 2] = math.nan
    assert batch(old_logprobs=values, ref_logprobs=values).num_tokens == 5


def test_no_sequences_at_all() -> None:
    empty = TokenBatch.from_padded(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0))
    hidden = torch.zeros(0, 3, 4, requires_grad=True)
    out = linear_policy_loss(hidden, WEIGHT, empty, LossConfig())
    assert out.loss.item() == 0
    out.loss.backward()
