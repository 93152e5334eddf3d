"""Losses over whole sequences that are longer than a chunk, packed with short and empty ones."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import LossConfig, TokenBatch, available_backends, explain, linear_policy_loss
from grpo_kernels.losses import LOSSES
from grpo_kernels.testing import Problem, make_problem
from tests.conftest import DEVICES, HAS_GPU
from tests.test_linear_policy_loss import assert_matches_eager, config_for

# past what a GPU's grid takes on its second axis; a CPU has none
LONG = 65600 if HAS_GPU else 9000
HIDDEN, VOCABULARY = 4, 11
ROW_BYTES = VOCABULARY * 4
CHUNK = 4096 * ROW_BYTES  # much less than the long sequence
# those of sequence scope by themselves, and one whose rollout correction is of a sequence
SEQUENCE_LOSSES = [name for name in LOSSES if config_for(name).scope(True) == "sequence"]


def ragged(long: int = LONG) -> Problem:
    """Return a short, a long, an empty and a one-token sequence."""
    problem = make_problem(4, long, HIDDEN, VOCABULARY)
    problem.mask.zero_()
    problem.mask[0, 2:7] = True
    problem.mask[1] = True
    problem.mask[3, -1] = True
    return problem


def test_sequence_losses_are_found() -> None:
    assert {"gspo", "gmpo", "vespo"} <= set(SEQUENCE_LOSSES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_long_sequence_in_two_passes(name: str, device: str) -> None:
    assert_matches_eager(
        config_for(name, beta=0.05), torch.float32, ragged(), device, max_workspace_bytes=CHUNK
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_long_sequence_in_one_chunk(name: str, device: str) -> None:
    whole = (LONG + 4096) * ROW_BYTES
    options = dict(max_workspace_bytes=whole, schedule="one_pass")
    assert_matches_eager(config_for(name), torch.float32, ragged(), device, **options)


@pytest.mark.parametrize("name", ("grpo", "dapo"))
def test_correction_of_a_long_sequence(name: str) -> None:
    """A token's loss, with a weight of its whole sequence."""
    config = config_for(name, rollout_correction_mode="sequence_truncate")
    assert_matches_eager(config, torch.float32, ragged(), max_workspace_bytes=CHUNK)


def test_long_sequence_of_zero_advantage_is_set_aside() -> None:
    problem = ragged()
    problem.advantages[1] = 0
    assert_matches_eager(config_for("gspo"), torch.float32, problem, max_workspace_bytes=CHUNK)


def test_the_plan_says_why() -> None:
    problem = ragged().to("cpu", torch.float32)
    batch = problem.batch(rollout_logprobs=None)
    args = (problem.hidden, problem.weight, batch)
    assert batch.lengths == (5, LONG, 0, 1)

    gspo = LossConfig(loss_type="gspo")
    plan = explain(*args, gspo, max_workspace_bytes=CHUNK)
    assert (plan.schedule, plan.scope) == ("two_pass", "sequence")
    assert f"a sequence of {LONG} tokens does not fit" in str(plan)
    with pytest.raises(ValueError, match="'one_pass' cannot run: a sequence of"):
        linear_policy_loss(*args, gspo, max_workspace_bytes=CHUNK, schedule="one_pass")
    token = explain(*args, LossConfig(), max_workspace_bytes=CHUNK, schedule="one_pass")
    assert len(token.chunks) == -(-batch.num_tokens // 4096)


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.parametrize("name", ("gspo", "gmpo", "vespo"))
@pytest.mark.parametrize("rows,schedule", ((8, "two_pass"), (32, "one_pass")))
def test_triton_with_a_sequence_beside_its_chunk(name: str, rows: int, schedule: str) -> None:
    """Shorter, since the interpreter runs one row after the other."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = dict(max_workspace_bytes=rows * ROW_BYTES, schedule=schedule, backend="triton")
    assert_matches_eager(config_for(name), torch.float32, ragged(20), device, **options)


def test_padded_to_65536() -> None:
    target = torch.randint(0, VOCABULARY, (2, 65536))
    mask = torch.ones(2, 65536, dtype=torch.bool)
    mask[1, 40000:] = False
    batch = TokenBatch.from_padded(target, torch.tensor([1.0, -1.0]), mask)
    assert batch.lengths == (65536, 40000)
    assert torch.equal(batch.target, torch.cat([target[0], target[1, :40000]]))
    assert batch.rows is not None and int(batch.rows[-1]) == 65536 + 39999
    assert torch.equal(batch.segments.sum(torch.ones(105536)), torch.tensor([65536.0, 40000.0]))
    assert batch.narrow(65530, 65540).lengths == (6, 4)
