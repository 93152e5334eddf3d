"""Our side of a comparison with TRL, on the same model and the same inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_kernels import (
    LossConfig,
    PolicyLossOutput,
    TokenBatch,
    explain,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
)
from tests.parity.trl_driver import MAX_COMPLETION_LENGTH, TEMPERATURE, Inputs, Trl

# what TRL's trainer logs from `_compute_loss` that no batch knows
TRAINER_METRICS = {"entropy_coef"}
# relative to the largest entry of the tensor; TRL's head computes in fp32
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def config(**fields: object) -> LossConfig:
    """Return a loss at the temperature and length that the TRL trainer was built with."""
    fields.setdefault("rollout_correction_mode", None)
    if fields.get("loss_type") == "cispo":
        fields.setdefault("epsilon_high", 1.15)  # the bound itself; near enough to be reached
    return LossConfig(
        **{  # type: ignore[arg-type]
            "importance_sampling_level": "token",
            "temperature": TEMPERATURE,
            "max_completion_length": MAX_COMPLETION_LENGTH,
            **fields,
        }
    )


def token_batch(trl: Trl, inputs: Inputs, *, training: bool = True) -> TokenBatch:
    """Return TRL's micro-batch as a :class:`TokenBatch`."""
    items = inputs["num_items_in_batch"].double() / trl.num_processes
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


def hidden_states(trl: Trl, inputs: Inputs) -> Tensor:
    """Return the (B, L, D) last hidden states that predict the completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    hidden = trl.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden[:, inputs["prompt_ids"].shape[1] - 1 : -1]


def our_losses(
    hidden: Tensor, weight: Tensor, batch: TokenBatch, loss: LossConfig
) -> dict[str, PolicyLossOutput]:
    """Compute the loss in every way: both schedules, and the two public functions one by one."""
    scope = explain(hidden, weight, batch, loss).scope
    schedules = ["two_pass"] if scope == "batch" else ["one_pass", "two_pass"]
    outputs = {
        # a tile of 12 rows, so that one_pass runs over several chunks
        schedule: linear_policy_loss(
            hidden, weight, batch, loss, schedule=schedule,
            max_workspace_bytes=12 * weight.shape[0] * hidden.element_size(),
        )
        for schedule in schedules
    }  # fmt: skip
    rows = hidden.flatten(0, -2)
    if batch.rows is not None:
        rows = rows[batch.rows]
    scored = linear_logprobs(
        rows, weight, batch.target, temperature=TEMPERATURE, outputs=("logprobs", "entropy")
    )
    assert scored.logprobs is not None
    outputs["policy_loss"] = policy_loss(scored.logprobs, batch, loss, scored.entropy)
    return outputs


def assert_parity(
    trl: Trl,
    inputs: Inputs,
    loss: LossConfig,
    *,
    training: bool = True,
    trl_loss: LossConfig | None = None,
    metrics: tuple[str, ...] | None = None,
) -> None:
    """Check that loss, the gradient of every parameter, and every logged metric equal TRL's.

    ``trl_loss`` is the same loss under TRL's name, where that differs; ``metrics`` restricts the
    comparison to those that are defined alike.
    """
    theirs, logged = trl.loss(inputs, trl_loss or loss, training=training)
    if metrics is not None:
        logged = {name: logged[name] for name in metrics}
    expected = trl.gradients(theirs)
    hidden = hidden_states(trl, inputs)
    leaf = hidden.detach().requires_grad_()
    weight = trl.model.lm_head.weight
    batch = token_batch(trl, inputs, training=training)
    tolerance = TOLERANCE[trl.dtype]
    head, reference = None, None
    for name, output in our_losses(leaf, weight, batch, loss).items():
        assert_close(f"{name}: loss", output.loss, theirs, tolerance)
        assert_metrics(name, output.metrics, logged)
        gradients = torch.autograd.grad(output.loss, (leaf, weight))
        if head is None:
            head, reference = gradients, through_model(trl, hidden, gradients)
        for what, ours, first in zip(("hidden", "weight"), gradients, head, strict=True):
            assert_close(f"{name}: d{what}", ours, first, tolerance)
    assert reference is not None
    for parameter, gradient in expected.items():
        assert_close(f"gradient of {parameter}", reference[parameter], gradient, tolerance)


def assert_all_parity(
    trl: Trl, loss: LossConfig, *, on_policy: bool = False, trl_loss: LossConfig | None = None
) -> None:
    """Check both micro-batches of a generation batch."""
    generated, _ = trl.generate(trl_loss or loss, on_policy=on_policy)
    for inputs in trl.split(generated):
        assert_parity(trl, inputs, loss, trl_loss=trl_loss)


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
