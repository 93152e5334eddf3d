"""The fingerprint: it changes with what the numerics depend on, and with nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest
import torch

from grpo_kernels import (
    LossConfig,
    available_backends,
    explain,
    explain_logprobs,
    linear_logprobs,
)
from grpo_kernels.testing import make_problem

HIDDEN, WEIGHT = torch.randn(6, 8), torch.randn(50, 8)


def of(**options: object) -> str:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "backend": "chunked", **options}
    return explain_logprobs(**arguments).fingerprint


def test_the_same_for_every_number_of_rows() -> None:
    lines = {of(hidden=torch.randn(rows, 8)) for rows in (0, 1, 7, 3000)}
    assert lines == {of()} == {of(hidden=torch.randn(2, 3, 8))}


def test_it_names_what_the_numerics_depend_on() -> None:
    for part in ("grpo-kernels", "chunked", "float32 precision=fp32", torch.__version__):
        assert part in of()
    assert of(batch_invariant=True).count("batch_invariant") == 1
    plan = explain_logprobs(HIDDEN, WEIGHT)
    assert plan.fingerprint in str(plan) and plan.backend in str(plan)


def test_different_for_everything_else() -> None:
    half = dict(hidden=HIDDEN.bfloat16(), weight=WEIGHT.bfloat16())
    variants: list[dict[str, object]] = [
        {},
        half,
        {**half, "precision": "input"},
        {"batch_invariant": True},
        {"max_workspace_bytes": 50 * 4 * 5},
        *({"backend": name} for name in available_backends() if name != "chunked"),
        *({**half, "backend": name} for name in available_backends() if name != "chunked"),
    ]
    lines = [of(**variant) for variant in variants]
    assert len(set(lines)) == len(lines)
    assert len({line.rsplit(" | ")[-1] for line in lines}) == len(lines)  # so do the hashes


def test_a_new_library_or_config_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert of() != before
    monkeypatch.undo()
    module = importlib.import_module("grpo_kernels.engine.fingerprint")
    monkeypatch.setattr(module, "VERSION", "99.0")
    assert of() != before


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
def test_triton_names_its_tiles() -> None:
    half = dict(hidden=HIDDEN.bfloat16(), weight=WEIGHT.bfloat16(), backend="triton")
    assert "linear_stats" in of(**half) and "LinearConfig" in of(**half)
    tiled = of(**half, sampling_mask=True)
    assert "logits tile" in tiled and "RowConfig" in tiled and "triton=" in tiled


def test_plans_carry_it_with_their_schedule() -> None:
    problem = make_problem().to("cpu", torch.float32)
    lines = set()
    for schedule in ("one_pass", "two_pass"):
        plan = explain(
            problem.hidden, problem.weight, problem.batch(), LossConfig(), schedule=schedule
        )
        assert schedule in plan.fingerprint and plan.fingerprint in str(plan)
        lines.add(plan.fingerprint)
    assert len(lines) == 2


def test_explain_refuses_what_the_op_refuses() -> None:
    for call in (
        lambda: of(precision="bf8"),
        lambda: linear_logprobs(HIDDEN, WEIGHT, torch.zeros(6).long(), precision="bf8"),
    ):
        with pytest.raises(ValueError, match="precision: expected one of fp32, input, tf32"):
            call()


@pytest.mark.skipif("triton" not in available_backends(), reason="the interpreter is off")
def test_triton_is_known_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its distribution has other names on other platforms, and nightlies have others still."""

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    plan = explain_logprobs(torch.randn(2, 4), torch.randn(9, 4), backend="triton")
    assert "triton=" in plan.fingerprint
