"""Every loss of TRL, at every ratio level, with and without KL, delta and rollout correction."""

from __future__ import annotations

import itertools

import pytest
import torch

from grpo_kernels import linear_logprobs
from tests.parity.compare import assert_all_parity, assert_parity, config, hidden_states, loss_mask
from tests.parity.trl_driver import TEMPERATURE, Trl

pytestmark = pytest.mark.slow

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
MODES = (None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
DTYPES = (torch.float32, torch.float64)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # the losses that delta is for


def supported(loss_type: str, level: str, mode: str | None) -> bool:
    # vespo is its own sequence ratio, and sums token corrections into it
    per_token = level == "token" and mode in (None, "token_truncate", "token_mask")
    return loss_type != "vespo" or per_token


GRID = [
    pytest.param(
        *case,
        id="{}-{}-{}-beta{}-delta{}".format(*case).replace("None", "off"),
    )
    for case in itertools.product(LOSS_TYPES, LEVELS, MODES, (0.0, 0.1), (None, 1.3))
    if supported(*case[:3]) and (case[4] is None or case[0] in CLIPPED)
]


@pytest.mark.parametrize("loss_type,level,mode,beta,delta", GRID)
@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "fp64"))
def test_loss_gradients_and_metrics(
    trl_by_dtype: dict[torch.dtype, Trl],
    dtype: torch.dtype,
    loss_type: str,
    level: str,
    mode: str | None,
    beta: float,
    delta: float | None,
) -> None:
    trl = trl_by_dtype[dtype]
    loss = config(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        rollout_correction_mode=mode,
        rollout_correction_min=0.75,
        rollout_correction_max=1.3,
        **({} if delta is None else {"delta": delta}),
    )
    generated, _ = trl.generate(loss)
    # the micro-batches differ in what they are masked for, so each precision takes one
    assert_parity(trl, trl.split(generated)[DTYPES.index(dtype)], loss)


@pytest.mark.parametrize("delta", (None, 1.3))
@pytest.mark.parametrize("beta", (0.0, 0.1))
def test_gspo_is_grpo_at_the_sequence_level(trl: Trl, beta: float, delta: float | None) -> None:
    ours = config(loss_type="gspo", importance_sampling_level=None, beta=beta, delta=delta)
    theirs = config(loss_type="grpo", importance_sampling_level="sequence", beta=beta, delta=delta)
    assert_all_parity(trl, ours, trl_loss=theirs)


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_inputs_reach_every_branch(trl: Trl, mode: str) -> None:
    """Guards the comparison: tokens clip on both sides, and weights lie in and outside bounds."""
    low, high = 0.75, 1.3
    loss = config(
        loss_type="grpo",
        delta=1.3,
        rollout_correction_mode=mode,
        rollout_correction_min=low,
        rollout_correction_max=high,
    )
    generated, _ = trl.generate(loss)
    weights = generated["importance_sampling_ratio"]
    for bound in (low, high) if mode.endswith("truncate") else (0.0,):
        assert bool((weights == bound).any())
    assert bool(((weights > low) & (weights < high) & (weights != 1)).any())
    for inputs in trl.split(generated):
        _, logged = trl.loss(inputs, loss)
        assert 0 < logged["clip_ratio/low_mean"] < 0.5
        assert 0 < logged["clip_ratio/high_mean"] < 0.5
        assert loss_mask(inputs).sum(1).min() == 0  # a sequence without a valid token
        assert bool(inputs["sampling_per_token_logps"].isnan().any())


def test_log_probabilities_and_entropy(trl_by_dtype: dict[torch.dtype, Trl]) -> None:
    """The head alone, against the one that TRL puts into the model, at its temperature."""
    trl = trl_by_dtype[torch.float32]
    generated, _ = trl.generate(config(loss_type="grpo"))
    ours = linear_logprobs(
        hidden_states(trl, generated),
        trl.model.lm_head.weight,
        generated["completion_ids"],
        temperature=TEMPERATURE,
        outputs=("logprobs", "entropy"),
    )
    logprobs, entropy = trl.head_outputs(generated)
    scored = generated["completion_mask"] != 0
    torch.testing.assert_close(ours.logprobs[scored], logprobs[scored], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(ours.entropy[scored], entropy[scored], rtol=2e-6, atol=2e-6)
