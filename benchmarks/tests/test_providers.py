"""Every provider that is present computes what the others do, and an absent one says why."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from benchmarks.check import compare, reference
from benchmarks.problem import make_problem
from benchmarks.providers import PROVIDERS
from benchmarks.providers.base import Provider
from benchmarks.providers.libraries import loss_arguments
from benchmarks.shapes import DTYPES, MODELS, Case, Model
from benchmarks.work import WORKS
from grpo_kernels import LossConfig

TINY = MODELS["tiny"]
SOFTCAPPED = replace(TINY, name="tiny-softcap", softcap=5.0)
SLOW = ("nll", "dapo")  # works of those that compile for long
GPU_ONLY = ("liger-triton", "liger-sm90", "cce", "cce-exact", "quack")

every_provider = pytest.mark.parametrize("name", PROVIDERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def present(name: str, device: str) -> Provider:
    provider = PROVIDERS[name]
    reason = provider.absent(device)
    if reason is not None:
        pytest.skip(reason)
    if provider.timeout is not None:
        pytest.skip("may hang, and runs in a process of its own")
    return provider


def failure(provider: Provider, work: str, model: Model, dtype: str, device: str) -> str | None:
    case = Case(model, 32, dtype, WORKS[work])
    if provider.unable(case) is not None:
        return None
    problem = make_problem(case, device)
    result = provider.run(problem)
    return compare(result, reference(problem), problem)[1] if provider.checked else None


def failures(provider: Provider, works, model: Model, dtype: str, device: str) -> dict[str, str]:
    found = ((work, failure(provider, work, model, dtype, device)) for work in works)
    return {work: reason for work, reason in found if reason is not None}


@every_dtype
@every_provider
def test_present_one_agrees_with_the_reference(name, dtype, device):
    provider = present(name, device.type)
    works = SLOW if provider.slow_start else WORKS
    assert failures(provider, works, TINY, dtype, device.type) == {}


@every_provider
def test_softcap_is_kept_or_refused(name, device):
    provider = present(name, device.type)
    works = ("dapo",) if provider.slow_start else ("logprobs", "logprobs-grad", "nll", "dapo")
    assert failures(provider, works, SOFTCAPPED, "fp32", device.type) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
@pytest.mark.parametrize("work", ["logprobs", "logprobs-grad", "nll", "dapo-kl", "gspo-masked"])
def test_liger_triton_in_the_interpreter(work):
    pytest.importorskip("liger_kernel")
    assert failure(PROVIDERS["liger-triton"], work, TINY, "bf16", "cpu") is None


@pytest.mark.parametrize("work", ["logprobs-entropy", "logprobs-grad", "dapo-masked"])
def test_liger_sm90_on_ligers_own_fallback(work, monkeypatch):
    """The torch code that takes and returns what the Hopper kernels do."""
    ops = pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    name = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    stand_in = ModuleType(name)
    function = ops.LigerFusedLinearScaledCrossEntropyFunction
    stand_in.LigerFusedScaledCrossEntropySM90Function = function
    monkeypatch.setitem(sys.modules, name, stand_in)
    assert failure(PROVIDERS["liger-sm90"], work, TINY, "bf16", "cpu") is None


def test_half_of_the_batch_runs_too():
    for name in ("compile", "torch-lce", "trl", "liger"):
        provider = PROVIDERS[name]
        if provider.absent("cpu") is None:
            problem = make_problem(Case(TINY, 32, "fp32", WORKS["dapo"])).half()
            assert compare(provider.run(problem), reference(problem), problem)[1] is None, name


def test_gspo_is_the_baselines_grpo_over_ratios_of_sequences():
    arguments = loss_arguments(LossConfig(loss_type="gspo", beta=0.1))
    assert arguments["loss_type"] == "grpo"
    assert arguments["importance_sampling_level"] == "sequence"
    assert arguments["beta"] == 0.1
    assert arguments["epsilon_high"] == arguments["epsilon_low"]


@pytest.mark.parametrize("name", GPU_ONLY)
def test_gpu_only_ones_say_so_on_a_cpu(name):
    assert PROVIDERS[name].absent("cpu") == "needs a GPU"


@pytest.mark.parametrize("name", ["liger-sm90", "quack"])
def test_what_the_gpu_lacks_is_said(name, monkeypatch):
    absent = PROVIDERS[name].absent
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert absent("cuda").startswith("needs a GPU of compute capability 9.0")
    assert absent("cuda").endswith("this is 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(
        "benchmarks.providers.base.installed_version",
        lambda name: None if "nvidia" in name else "1.0",
    )
    assert absent("cuda") == "needs nvidia-cutlass-dsl"


def test_an_older_torch_has_no_linear_cross_entropy(monkeypatch):
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    assert PROVIDERS["torch-lce"].absent("cpu").startswith(f"torch {torch.__version__} has no")
