"""Every loss of TRL, at every ratio level, under every option: loss, gradients and metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig

from grpo_kernels import LossConfig, Metrics, TokenBatch, linear_policy_loss
from grpo_kernels.losses import LOSSES
from grpo_trainer.config.loss import OF_TRL
from tests.parity.canned import make_rollouts
from tests.parity.trl_driver import MAX_COMPLETION_LENGTH, ONE_WINDOW, TEMPERATURE, Inputs, Trl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trls() -> dict[torch.dtype, Trl]:
    """One trainer per precision: accelerate's state is that of whoever came last."""
    return {dtype: Trl(dtype) for dtype in (torch.float32, torch.float64)}


@pytest.fixture
def trl(trls: dict[torch.dtype, Trl]) -> Trl:
    return trls[torch.float64]


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


TRLS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
AT_LEVELS = [*itertools.product(TRLS, ("token", "sequence")), ("gspo", None)]
AT_LEVELS.remove(("vespo", "sequence"))  # is its own sequence ratio
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = {"max": (None, 1.3), "min": (0.75, None), "both": (0.75, 1.3)}


def correction(mode: str, bounds: str = "both") -> dict[str, object]:
    low, high = BOUNDS[bounds]
    return {
        "rollout_correction_mode": mode,
        "rollout_correction_min": low,
        "rollout_correction_max": high,
    }


TERMS = dict(beta=0.1, entropy_coef=0.03)
GATE = dict(off_policy_mask_threshold=0.01)
ALL = dict(
    beta=0.1, delta=1.3, epsilon_high=1.02, top_entropy_quantile=0.6, entropy_coef=-0.02,
    **GATE, **correction("token_truncate"),
)  # fmt: skip

# what a loss does not have TRL ignores: it goes without
OPTIONS = {
    "plain": Case(),
    "KL": Case(dict(beta=0.1)),
    "KL, plain": Case(dict(beta=0.1, use_bias_correction_kl=False)),
    "delta": Case(dict(delta=1.3)),
    "delta below clip": Case(dict(delta=1.1, epsilon=0.3)),
    "clip": Case(dict(epsilon=0.02, epsilon_high=0.5)),
    "epsilon_high": Case(dict(epsilon=0.1, epsilon_high=1.02)),
    "no lower bound": Case(dict(epsilon=10.0, epsilon_high=0.1)),  # DeepSeek-R1's epsilon
    "off-policy mask": Case(GATE),
    "off-policy mask, no rollout": Case(GATE, without="sampling_per_token_logps"),
    "top entropy": Case(dict(top_entropy_quantile=0.45)),
    "entropy bonus": Case(dict(entropy_coef=0.03)),
    "entropy bonus on top": Case(dict(**TERMS, top_entropy_quantile=0.45)),
    "temperatures": Case(dict(sapo_temperature_pos=0.6, sapo_temperature_neg=1.7)),
    "exponents": Case(
        dict(vespo_k_pos=1.5, vespo_lambda_pos=0.5, vespo_k_neg=1.0, vespo_lambda_neg=0.0)
    ),
    "longest": Case(dict(max_completion_length=37)),
    **{mode: Case(correction(mode)) for mode in MODES},
    "token_mask, KL and delta": Case(dict(beta=0.1, delta=1.3, **correction("token_mask"))),
    "sequence_truncate, KL and delta": Case(
        dict(beta=0.1, delta=1.3, **correction("sequence_truncate"))
    ),
    "all": Case(ALL),
    "plain, fp32": Case(dtype=torch.float32),
    "all, fp32": Case(ALL, dtype=torch.float32),
    "advantage per token": Case(dict(beta=0.1, **GATE), per_token=True),
}  # fmt: skip
# by what a loss is divided does not depend on its ratio
WINDOWS = {
    "on policy": Case(on_policy=True),
    "on policy, all": Case(dict(**TERMS, **GATE), on_policy=True),
    "evaluation": Case(TERMS, training=False, window=(4, 2)),
    "no accumulation": Case(TERMS, window=(1, 2)),
    "more accumulation": Case(TERMS, window=(4, 2)),
    "windows apart": Case(TERMS, window=(3, 5)),
    "processes": Case(processes=4),
    # few tokens shared by many steps: the normaliser is a fraction, not 1
    "less than one item": Case(num_items=1, window=(1, 4)),
}


def cases() -> Iterator[Any]:
    at_tokens = [(name, level) for name, level in AT_LEVELS if level == "token"]
    for (name, level), (option, case) in (
        *itertools.product(AT_LEVELS, OPTIONS.items()),
        *itertools.product(at_tokens, WINDOWS.items()),
    ):
        foreign = {*LOSSES["grpo"].settings, *LOSSES["sapo"].settings, *LOSSES["vespo"].settings}
        foreign -= set(LOSSES[name].settings)
        settings = {key: value for key, value in case.settings.items() if key not in foreign}
        refused = name == "vespo" and "sequence" in str(settings.get("rollout_correction_mode"))
        if refused or (case.settings and not settings):
            continue
        yield pytest.param(name, level, settings, case, id=f"{name}-{level or 'own'}-{option}")


def test_settings_that_trl_has_for_every_loss() -> None:
    of_losses = {name for loss in LOSSES.values() for name in loss.settings}
    assert of_losses & {item.name for item in fields(GRPOConfig)} == set(OF_TRL)


@pytest.mark.parametrize(("name", "level", "settings", "case"), cases())
def test_option(
    trls: dict[torch.dtype, Trl], name: str, level: str | None, settings: Any, case: Case
) -> None:
    # of cispo the bound itself; near enough to be reached
    own = {"epsilon_high": 1.15} if name == "cispo" else {}
    loss = loss_config(loss_type=name, importance_sampling_level=level, **own | settings)
    assert_parity(trls[case.dtype], loss, case)


@pytest.mark.parametrize("rollouts", ROLLOUTS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(
    ("name", "mode"),
    [*itertools.product(("grpo",), MODES), *itertools.product(("vespo",), MODES[:2])],
)
def test_correction(trl: Trl, name: str, mode: str, bounds: str, rollouts: str) -> None:
    """Bounds, NaN and tool masks; vespo folds the correction into its weight."""
    loss = loss_config(loss_type=name, beta=0.1, **correction(mode, bounds))
    assert_parity(trl, loss, Case(rollouts=rollouts))


@pytest.mark.parametrize("mode", MODES)
def test_the_inputs_reach_every_branch(trl: Trl, mode: str) -> None:
    """Guards the comparison: tokens clip on both sides, and weights lie in and outside bounds."""
    low, high = BOUNDS["both"]
    loss = loss_config(loss_type="grpo", delta=1.3, **correction(mode))
    parts, _ = Case().micro_batches(trl, loss)
    weights = torch.cat([inputs["importance_sampling_ratio"] for inputs in parts])
    for bound in (low, high) if mode.endswith("truncate") else (0.0,):
        assert bool((weights == bound).any())
    assert bool(((weights > low) & (weights < high) & (weights != 1)).any())
    for inputs in parts:
        _, logged = trl.loss(inputs, loss, training=True)
        assert 0 < logged["clip_ratio/low_mean"] < 0.5
        assert 0 < logged["clip_ratio/high_mean"] < 0.5
        assert loss_mask(inputs).sum(1).min() == 0  # a sequence without a valid token
        assert bool(inputs["sampling_per_token_logps"].isnan().any())
