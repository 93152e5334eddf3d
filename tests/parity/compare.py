"""Our side of a comparison with TRL, on the same model and the same inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from grpo_kernels import (
    LossConfig,
    Metrics,
    TokenBatch,
    linear_policy_loss,
)
from tests.parity.canned import make_rollouts
from tests.parity.trl_driver import MAX_COMPLETION_LENGTH, ONE_WINDOW, TEMPERATURE, Inputs, Trl

ROLLOUTS = {
    "tools and unknown": make_rollouts(),
    "tools": make_rollouts(unknown=False),
    "unknown": make_rollouts(env_mask=False),
    "plain": make_rollouts(seed=5, env_mask=False, unknown=False),
}

# what TRL's trainer logs from `_compute_loss` that no batch knows
TRAINER_METRICS = {"entropy_coef"}
# relative to the largest entry of the tensor; TRL's head computes in fp32
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


@dataclass(frozen=True)
class Case:
    """Settings of a loss, and what it is computed on."""

    settings: Mapping[str, object] = field(default_factory=dict)  # of LossConfig
    _: KW_ONLY
    dtype: torch.dtype = torch.float64  # separates a wrong formula from rounding
    rollouts: str = "tools and unknown"
    training: bool = True  # an evaluation batch is neither split nor accumulated
    window: tuple[int, int] = ONE_WINDOW  # accumulated, and generated, micro-batches
    processes: int = 1
    on_policy: bool = False  # used once: TRL keeps no old log-probabilities, the ratio is 1
    num_items: int | None = None  # tokens of the generation batch, as TRL is told
    per_token: bool = False  # an advantage for each
    without: str | None = None  # a column that is not there

    def micro_batches(self, trl: Trl, loss: LossConfig) -> tuple[list[Inputs], dict[str, float]]:
        """Return those of the generation batch that TRL makes, and the metrics it logs of it."""
        rollouts = ROLLOUTS[self.rollouts]
        generated, logged = trl.generate(
            loss, rollouts, on_policy=self.on_policy, training=self.training
        )
        parts = trl.split(generated) if self.training else [generated]
        for inputs in parts:
            if self.num_items is not None:
                inputs["num_items_in_batch"] = torch.tensor(self.num_items)
            if self.per_token:
                shape = inputs["completion_ids"].shape
                inputs["advantages"] = torch.randn(shape, dtype=self.dtype)
            if self.without is not None:
                del inputs[self.without]
        trl.place(self.window, self.processes)
        return parts, logged


def loss_config(**fields: object) -> LossConfig:
    """Return a loss at the temperature and length that the TRL trainer was built with."""
    defaults: dict[str, object] = {
        "temperature": TEMPERATURE,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "rollout_correction_mode": None,
    }
    return LossConfig(**(defaults | fields))


def token_batch(trl: Trl, inputs: Inputs, training: bool = True) -> TokenBatch:
    """Return TRL's micro-batch as a :class:`TokenBatch`."""
    items = inputs["num_items_in_batch"].double() / trl.trainer.accelerator.num_processes
    steps = trl.trainer.current_gradient_accumulation_steps if training else 1
    if training:
        items = items * steps / trl.trainer.args.steps_per_generation
    return TokenBatch.from_padded(
        inputs["completion_ids"],
        inputs["advantages"],
        loss_mask(inputs),
        old_logprobs=inputs.get("old_per_token_logps"),
        ref_logprobs=inputs.get("ref_per_token_logps"),
        rollout_logprobs=inputs.get("sampling_per_token_logps"),
        num_items_in_batch=items,
        gradient_accumulation_steps=steps,
    )


def loss_mask(inputs: Inputs) -> Tensor:
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)


def assert_parity(trl: Trl, loss: LossConfig, case: Case) -> None:
    """Check that every micro-batch's loss, the gradient of every parameter, and every logged metric
    equal TRL's."""
    parts, logged = case.micro_batches(trl, loss)
    merged = Metrics.merge([_assert_same(trl, loss, inputs, case) for inputs in parts])
    # TRL logs these once, for the generation batch
    sampling = {name: value for name, value in logged.items() if name.startswith("sampling/")}
    assert len(sampling) == (0 if loss.rollout_correction_mode is None else 5)
    assert_metrics("merged", merged, sampling)


def _assert_same(trl: Trl, loss: LossConfig, inputs: Inputs, case: Case) -> Metrics:
    theirs, logged = trl.loss(inputs, loss, training=case.training)
    if case.per_token:  # phi is one value per sequence in ours, TRL averages over tokens
        logged = {name: value for name, value in logged.items() if not name.startswith("vespo/")}
    expected = trl.gradients(theirs)
    hidden = trl.hidden_states(inputs)
    leaf = hidden.detach().requires_grad_()
    weight = trl.model.lm_head.weight
    batch = token_batch(trl, inputs, case.training)
    tolerance = TOLERANCE[trl.dtype]
    output = linear_policy_loss(leaf, weight, batch, loss)
    assert_close("loss", output.loss, theirs, tolerance)
    assert_metrics("micro-batch", output.metrics, logged)
    carried = through_model(trl, hidden, torch.autograd.grad(output.loss, (leaf, weight)))
    for parameter, gradient in expected.items():
        assert_close(f"gradient of {parameter}", carried[parameter], gradient, tolerance)
    return output.metrics


def through_model(trl: Trl, hidden: Tensor, gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Carry the head's gradients back to every parameter of the model."""
    dhidden, dweight = gradients
    named = dict(trl.model.named_parameters())
    del named["lm_head.weight"]
    carried = torch.autograd.grad(hidden, list(named.values()), dhidden)
    return {**dict(zip(named, carried, strict=True)), "lm_head.weight": dweight}


def assert_close(what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.isfinite().all(), f"{what}: not finite"
    scale = theirs.abs().max().clamp(min=1e-3)
    error = ((ours - theirs).abs().max() / scale).item()
    assert error <= tolerance, f"{what}: relative error {error:.1e} exceeds {tolerance:.0e}"


def assert_metrics(where: str, ours: Mapping[str, Tensor], logged: dict[str, float]) -> None:
    for name in logged.keys() - TRAINER_METRICS:
        assert name in ours, f"{where}: no metric {name}"
        value, expected = ours[name].item(), logged[name]
        close = math.isclose(value, expected, rel_tol=2e-5, abs_tol=2e-6)
        both_nan = math.isnan(value) and math.isnan(expected)
        assert close or both_nan, f"{where}: {name} is {value}, TRL logged {expected}"
