"""Helpers to test kernels and losses, including surrogates that you write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels.batch import TokenBatch
from grpo_kernels.linear_policy_loss import linear_policy_loss
from grpo_kernels.losses import LossConfig, PolicyLossOutput

_NEEDED = {
    "cispo": {"epsilon_high": 5.0},  # a bound below 1 is a warning
    "trm": {"trm_threshold": 0.05},
    "vaco": {"vaco_threshold": 0.05},
}
_EMPTY_OPS = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided")


@dataclass(frozen=True)
class Problem:
    """A head, hidden states and a padded rollout. Tensors that can require a gradient do."""

    hidden: Tensor  # (B, L, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    target: Tensor  # (B, L)
    mask: Tensor  # (B, L) bool
    advantages: Tensor  # (B,)
    logprobs: dict[str, Tensor]  # old_, ref_ and rollout_logprobs, (B, L)

    def batch(self, **overrides: Any) -> TokenBatch:
        """Return the padded batch; a keyword replaces a part, None removes it."""
        fields: dict[str, Any] = {"mask": self.mask, **self.logprobs, **overrides}
        advantages = fields.pop("advantages", self.advantages)
        return TokenBatch.from_padded(self.target, advantages, **fields)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Problem:
        """Return the same values on another device and in another dtype, as new leaves."""

        def leaf(x: Tensor) -> Tensor:
            return x.detach().to(device, dtype).requires_grad_()

        return Problem(
            hidden=leaf(self.hidden),
            weight=leaf(self.weight),
            bias=None if self.bias is None else leaf(self.bias),
            target=self.target.to(device),
            mask=self.mask.to(device),
            advantages=self.advantages.to(device),
            logprobs={name: value.to(device) for name, value in self.logprobs.items()},
        )


def make_problem(
    sequences: int = 4,
    length: int = 7,
    hidden_size: int = 16,
    vocab_size: int = 53,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    values_in: torch.dtype = torch.bfloat16,
    bias: bool = True,
) -> Problem:
    """Return a random problem with head inputs that are exact in the dtype ``values_in``.

    So every wider dtype holds the same problem, and fp64 gives its true answer. All tokens of the
    third sequence are masked. Old, reference and rollout log-probabilities are near the head's.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    hidden = normal(sequences, length, hidden_size).to(values_in).double()
    weight = normal(vocab_size, hidden_size, scale=0.4).to(values_in).double()
    head_bias = normal(vocab_size).to(values_in).double()
    target = torch.randint(0, vocab_size, (sequences, length), generator=generator)
    mask = torch.rand(sequences, length, generator=generator) > 0.3
    mask[2:3] = False
    logits = hidden @ weight.t() + head_bias * bias
    own = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    scales = {"old_logprobs": 0.2, "ref_logprobs": 0.3, "rollout_logprobs": 0.1}
    logprobs = {name: own + normal(sequences, length, scale=x) for name, x in scales.items()}
    problem = Problem(
        hidden=hidden,
        weight=weight,
        bias=head_bias if bias else None,
        target=target,
        mask=mask,
        advantages=normal(sequences),
        logprobs=logprobs,
    )
    return problem.to("cpu", dtype)


def make_config(loss_type: str, **settings: Any) -> LossConfig:
    """Return the config of any named loss, with the settings it needs and ``token_truncate``, a
    rollout correction that all losses support."""
    needed: dict[str, Any] = {
        "max_completion_length": 9,
        "rollout_correction_mode": "token_truncate",
        **_NEEDED.get(loss_type, {}),
    }
    return LossConfig(loss_type=loss_type, **(needed | settings))


def run(
    problem: Problem,
    config: LossConfig,
    batch: TokenBatch | None = None,
    *,
    scale: float = 1.0,
    leaves: Mapping[str, Tensor | None] | None = None,
    function: Callable[..., PolicyLossOutput] = linear_policy_loss,
    **options: Any,
) -> dict[str, Tensor]:
    """Run ``linear_policy_loss`` forward and backward on a problem.

    Args:
        problem: the head and the hidden states.
        config: the loss.
        batch: None: the problem's own, in a window of two micro-batches.
        scale: factor on the loss before the backward.
        leaves: tensors to return gradients for, by name; None: the problem's hidden states, weight
            and bias. Leaves without ``requires_grad`` are left out; no ``.grad`` is written.
        function: called instead of ``linear_policy_loss``, such as a compiled one.
        options: keyword arguments of ``linear_policy_loss``; ``weight`` replaces the problem's.

    Returns:
        By name: "loss", (); the gradients of the leaves that got one, such as "dhidden"; and the
        metrics.
    """
    if batch is None:
        batch = problem.batch(num_items_in_batch=17.0, gradient_accumulation_steps=2)
    weight = options.pop("weight", problem.weight)
    out = function(problem.hidden, weight, batch, config, bias=problem.bias, **options)
    if leaves is None:
        leaves = {"hidden": problem.hidden, "weight": problem.weight, "bias": problem.bias}
    trained = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    gradients = torch.autograd.grad(out.loss * scale, list(trained.values()), allow_unused=True)
    pairs = zip(trained, gradients, strict=True)
    by_name = {f"d{name}": gradient for name, gradient in pairs if gradient is not None}
    return {"loss": out.loss.detach(), **by_name, **out.metrics}


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return ``max |value - exact| / max |exact|``; NaN counts as infinite."""
    if exact.numel() == 0:
        return 0.0
    value, exact = (x.detach().double().cpu() for x in (value, exact))
    error = float((value - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error


def assert_as_exact_as(
    value: Tensor,
    eager: Tensor,
    exact: Tensor,
    floor: float,
    what: str,
) -> None:
    """Assert that the error of ``value`` is at most twice that of ``eager``.

    Errors below ``floor``, the rounding of the last digit, always pass.
    """
    own = relative_error(value, exact)
    theirs = relative_error(eager, exact)
    assert own <= max(2 * theirs, floor), f"{what}: error {own:.2e}, eager {theirs:.2e}"


def assert_all_as_exact_as(
    values: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    gradient_floor: float,
    value_floor: float = 1e-5,
) -> None:
    """Apply :func:`assert_as_exact_as` to all results by name; "d..." are gradients.

    A result may be all NaN only if the exact one is.
    """
    assert set(values) == set(exact)
    for name, value in values.items():
        if exact[name].isnan().all():
            assert value.isnan().all(), name
            continue
        floor = gradient_floor if name.startswith("d") else value_floor
        assert_as_exact_as(
            value=value, eager=eager[name], exact=exact[name], floor=floor, what=name
        )


class poisoned_allocations(TorchDispatchMode):  # noqa: N801
    """A context that fills uninitialized memory with NaN, or the largest integer, to expose reads
    of it."""

    def __torch_dispatch__(
        self,
        func,
        types,
        args=(),
        kwargs=None,
    ):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in _EMPTY_OPS and isinstance(out, Tensor):
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif out.dtype in (torch.int32, torch.int64):
                out.fill_(torch.iinfo(out.dtype).max)
        return out
