"""Our losses in SkyRL's registry, with its reductions of advantages."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from tests.integrations.host_stand_ins import SKYRL, copied

skyrl = copied("grpo_skyrl")
B, T, LONGEST = 4, 6, 9
REDUCTIONS = {
    **dict.fromkeys(("dapo", "cispo", "vespo", "pg", "dppo_tv", "fipo"), "token_mean"),
    **dict.fromkeys(("grpo", "gspo", "sapo", "gmpo"), "sequence_mean"),
    "bnpo": "token_mean_legacy",
    "dr_grpo": "seq_mean_token_sum_norm",
}
_SETTINGS: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 5.0}}
# other aggregations than the loss's own
AGGREGATIONS = {
    "window_token_mean": "token_mean",
    "token_mean": "token_mean_legacy",
    "sequence_mean": "sequence_mean",
    "fixed_length": "seq_mean_token_sum_norm",
    "prompt_mean": "prompt_mean",
}
PROMPTS = [(0, 2), (2, 4)]  # the sequences of each; one of them is empty

Host = dict[str, ModuleType]


@pytest.fixture(params=SKYRL.kinds)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with SKYRL.present(request.param) as modules:
        yield modules


def make_inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    own, mask = normal(B, T) - 2, torch.ones(B, T, dtype=dtype)
    mask[0, 4:] = mask[1, 1:3] = mask[3] = 0
    return {
        "log_probs": own.requires_grad_(),
        "old_log_probs": own.detach() + 0.3 * normal(B, T),
        "advantages": normal(B, 1).expand(B, T),
        "loss_mask": mask,
        "rollout_logprobs": own.detach() + 0.3 * normal(B, T),
    }


def algorithm(loss_reduction: str, **corrections: Any) -> SimpleNamespace:
    none = dict.fromkeys(skyrl._CORRECTIONS)
    settings = SimpleNamespace(**(none | corrections))
    return SimpleNamespace(loss_reduction=loss_reduction, off_policy_correction=settings)


def prompt_tokens(mask: Tensor) -> Tensor:
    return torch.cat([mask[a:b].sum().expand(b - a) for a, b in PROMPTS])


def reduced(advantages: Tensor, mask: Tensor, loss_reduction: str) -> Tensor:
    """Scale advantages as SkyRL's documentation of ``loss_reduction`` says."""
    by = {
        "token_mean": mask.sum(),
        "token_mean_legacy": mask.sum(),  # of one micro-batch
        "sequence_mean": B * mask.sum(1, keepdim=True).clamp(min=1),
        "seq_mean_token_sum_norm": torch.tensor(B * LONGEST),
        "prompt_mean": len(PROMPTS) * prompt_tokens(mask)[:, None],
    }
    return advantages / by[loss_reduction]


def own_loss(loss_type: str, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    constant = {"max_completion_length": LONGEST, "rollout_correction_mode": None}
    config = LossConfig(loss_type=loss_type, **constant | settings)
    batch = TokenBatch.from_padded(
        torch.zeros(B, T, dtype=torch.int64), inputs["advantages"], inputs["loss_mask"],
        old_logprobs=inputs["old_log_probs"], rollout_logprobs=inputs["rollout_logprobs"],
        prompt_tokens=prompt_tokens(inputs["loss_mask"]).long(),
    )  # fmt: skip
    return policy_loss(inputs["log_probs"][inputs["loss_mask"] == 1], batch, config)[0]


@pytest.mark.parametrize("correction", [None, "token_truncate"])
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_losses(host: Host, loss_type: str, correction: str | None) -> None:
    settings = dict(_SETTINGS.get(loss_type, {}))
    if correction is not None:
        settings["rollout_correction_mode"] = correction
    check_loss(host, REDUCTIONS[loss_type], loss_type, **settings)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(host: Host, aggregation: str) -> None:
    check_loss(host, AGGREGATIONS[aggregation], "luspo", loss_aggregation=aggregation)


def check_loss(host: Host, reduction: str, loss_type: str, **settings: Any) -> None:
    inputs, correction = make_inputs(), settings.get("rollout_correction_mode")
    name = skyrl.register_policy_loss(loss_type, **settings)
    expected = own_loss(loss_type, inputs, **settings)
    scaled = reduced(inputs["advantages"], inputs["loss_mask"], reduction)
    function = host["ppo_utils"].PolicyLossRegistry.get(name)
    loss, metrics = function(**inputs | {"advantages": scaled}, config=algorithm(reduction))
    torch.testing.assert_close(loss, expected)
    found, right = (torch.autograd.grad(x, inputs["log_probs"])[0] for x in (loss, expected))
    torch.testing.assert_close(found, right)
    assert all(isinstance(value, float) for value in metrics.values()) and "ratio/max" in metrics
    weighs = correction is not None and loss_type != "dppo_tv"  # whose ratio is that weight
    assert ("sampling/importance_sampling_ratio/max" in metrics) == weighs


@pytest.mark.parametrize("host", SKYRL.kinds[1:], indirect=True)
def test_their_reductions(host: Host) -> None:
    """Hold what :func:`reduced` says against SkyRL's own function, which the stand-in lacks."""
    theirs = host["ppo_utils"].apply_loss_reduction_to_advantages_minibatch
    inputs = make_inputs()
    for name in AGGREGATIONS.values():
        found = theirs(inputs["advantages"], inputs["loss_mask"], name, B, LONGEST, PROMPTS)
        torch.testing.assert_close(found, reduced(inputs["advantages"], inputs["loss_mask"], name))


def test_a_function_that_travels(host: Host) -> None:
    """Send it to another process, as SkyRL does to its workers."""
    inputs = make_inputs(torch.float32)
    skyrl.register_policy_loss("dapo", epsilon=0.1)
    function = host["ppo_utils"].PolicyLossRegistry.get("grpo_kernels.dapo")
    again = pickle.loads(pickle.dumps(function))
    config = algorithm("token_mean")
    assert torch.equal(again(**inputs, config=config)[0], function(**inputs, config=config)[0])


def test_what_is_refused(host: Host) -> None:
    skyrl.register_policy_loss("dapo")
    function = host["ppo_utils"].PolicyLossRegistry.get("grpo_kernels.dapo")
    corrected = algorithm("token_mean", tis_ratio_type="token")
    call = partial(function, **make_inputs())
    register = skyrl.register_policy_loss
    wrong = {
        "loss_type: expected one of .* SkyRL .* 'luspo'": partial(register, "luspo"),
        "loss_aggregation: expected one of .*prompt_mean": partial(
            register, "dapo", loss_aggregation="sequence_sum"
        ),
        "beta: expected none here .SkyRL adds its own KL": partial(register, "dapo", beta=0.1),
        "epsilonn: expected a setting of dapo": partial(register, "dapo", epsilonn=0.1),
        "already registered": partial(register, "dapo"),
        "loss_reduction: expected 'token_mean' for dapo": partial(
            call, config=algorithm("sequence_mean")
        ),
        "off_policy_correction.tis_ratio_type: expected None": partial(call, config=corrected),
    }
    for message, refused in wrong.items():
        with pytest.raises(ValueError, match=message):
            refused()
