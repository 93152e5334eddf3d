"""What explain says: what runs and why, and a fingerprint of what the numerics depend on."""

from __future__ import annotations

import importlib

import pytest
import torch

from grpo_kernels import (
    Bounded,
    HeadLoRA,
    LossConfig,
    available_backends,
    explain,
    explain_logprobs,
)
from grpo_kernels.losses import LOSSES, NamedLoss, Surrogate, Terms
from grpo_kernels.testing import make_problem

HIDDEN, WEIGHT = torch.randn(6, 8), torch.randn(50, 8)
HALF = dict(hidden=HIDDEN.bfloat16(), weight=WEIGHT.bfloat16())
LORA = HeadLoRA(a=torch.zeros(7, 16), b=torch.zeros(53, 7), scaling=1.0)


def fingerprint(**options: object) -> str:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "backend": "chunked", **options}
    return explain_logprobs(**arguments).fingerprint


def test_the_same_fingerprint_for_every_number_of_rows() -> None:
    lines = {fingerprint(hidden=torch.randn(rows, 8)) for rows in (0, 1, 7, 3000)}
    assert lines == {fingerprint()} == {fingerprint(hidden=torch.randn(2, 3, 8))}


def test_another_one_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [name for name in available_backends() if name != "chunked"]
    lora = HeadLoRA(a=torch.zeros(2, 8), b=torch.zeros(50, 2), scaling=1.0)
    variants: list[dict[str, object]] = [
        {},
        HALF,
        {**HALF, "precision": "input"},
        {"batch_invariant": True},
        {"max_workspace_bytes": 50 * 4 * 5},
        {"lora": lora},
        {"backward": Bounded()},
        *({"backend": name} for name in others),
        *({**HALF, "backend": name} for name in others),
    ]
    lines = [fingerprint(**variant) for variant in variants]
    monkeypatch.setattr(torch, "__version__", "99.0")
    lines.append(fingerprint())
    monkeypatch.undo()
    module = importlib.import_module("grpo_kernels.engine.explain")
    monkeypatch.setattr(module, "VERSION", "99.0")
    lines.append(fingerprint())
    assert len(set(lines)) == len(lines)
    assert len({line.rsplit(" | ")[-1] for line in lines}) == len(lines)  # so do the hashes


TILE = 53 * 4 * 8
LOSS_SAYS = {
    "one_pass": dict(),
    "LoRA of rank 7": dict(lora=LORA),
    "does not fit": dict(config=LossConfig(loss_type="gspo"), max_workspace_bytes=TILE // 4),
    "rows of zero advantage: 6 run only the forward, for the metrics": dict(),
    "that the loss clips or gates: left out of the GEMMs of their gradients": dict(),
    "rows of zero advantage: not computed": dict(metric_rows="active"),
    "keeps entries": dict(backward=Bounded()),
    "2 GEMMs in total": dict(backward=Bounded()),
    "logits are computed again": dict(schedule="two_pass", activation_bytes=0),
    "would keep dlogits": dict(schedule="two_pass"),
}


@pytest.mark.parametrize("said", LOSS_SAYS)
def test_plans_of_a_loss(said: str) -> None:
    problem = make_problem(2, 7).to("cpu", torch.float32)
    problem.mask[0] = torch.arange(7) < 6
    batch = problem.batch(advantages=torch.tensor([0.0, 1.0]), rollout_logprobs=None)
    options = {"config": LossConfig(), "backend": "chunked", **LOSS_SAYS[said]}
    config = options.pop("config")
    plan = explain(problem.hidden, problem.weight, batch, config, **options)
    assert said in str(plan) and plan.schedule in plan.fingerprint
    assert sum(c.stop - c.start for c in plan.chunks) <= batch.num_tokens


def test_one_pass_where_it_cannot_run() -> None:
    problem = make_problem(2, 3).to("cpu", torch.float32)
    arguments = (problem.hidden, problem.weight, problem.batch())
    assert explain(*arguments, LossConfig(top_entropy_quantile=0.5)).schedule == "two_pass"
    with pytest.raises(ValueError, match="schedule: 'one_pass' cannot run"):
        explain(*arguments, LossConfig(top_entropy_quantile=0.5), schedule="one_pass")


def test_a_cpu_adds_no_gradient_of_16_bits_up_over_chunks() -> None:
    problem = make_problem(4, 16, 8, 64, bias=False).to("cpu", torch.bfloat16)
    arguments = (problem.hidden, problem.weight, problem.batch(), LossConfig())
    several = {"backend": "chunked", "max_workspace_bytes": 16 * 64 * 4}
    assert explain(*arguments, backend="chunked").schedule == "one_pass"
    assert explain(*arguments, **several).schedule == "two_pass"
    problem.weight.requires_grad_(False)
    assert explain(*arguments, **several).schedule == "one_pass"


class Sorted(Surrogate):
    """A surrogate that cannot be traced."""

    def __call__(self, terms: Terms) -> torch.Tensor:
        return -terms.advantages * terms.logprobs.sort().values


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.parametrize(
    "loss_type,said",
    [
        ("dapo", "generated from the loss"),
        ("gspo", "sums over sequences"),
        ("sorted", "torch ops, because"),
    ],
)
def test_how_the_loss_runs_in_triton(
    monkeypatch: pytest.MonkeyPatch, loss_type: str, said: str
) -> None:
    named = NamedLoss(surrogate=Sorted, aggregation="token_mean", source="here")
    monkeypatch.setitem(LOSSES, "sorted", named)
    problem = make_problem(2, 3).to("cpu", torch.float32)
    batch, config = problem.batch(rollout_logprobs=None), LossConfig(loss_type=loss_type)
    assert said in str(explain(problem.hidden, problem.weight, batch, config, backend="triton"))
