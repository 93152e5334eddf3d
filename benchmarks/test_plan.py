"""Compare the estimates of ``grpo-kernels plan`` with measured memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.child import ask
from benchmarks.conftest import DEVICE, Session
from benchmarks.measure import memory_alone
from benchmarks.providers import PROVIDERS
from benchmarks.shapes import DTYPES, make_case
from grpo_kernels.engine import RunOptions
from grpo_kernels.tools import device_memory
from grpo_kernels.tools.call import Call
from grpo_kernels.tools.estimate import growth, total

# real heads: of a few seconds on a CPU, and one whose full logits fit into 24 GiB of a GPU; and
# with --full a larger vocabulary, for few tokens and for several chunks
HEADS = {
    "cpu": (("qwen2.5-0.5b", 1024), ("gemma-3-1b", 128), ("gemma-3-1b", 512)),
    "cuda": (("qwen3-1.7b", 8192), ("gemma-3-1b", 1024), ("gemma-3-1b", 8192)),
}
# provider -> name of the formula (None: the choice of "auto"), and the precision
FORMULAS = {
    "ours": (None, "fp32"),
    "eager": ("eager", "fp32"),
    "trl": ("trl", "fp32"),
    "ours-input": (None, "input"),
    "ours-one-pass": ("one_pass", "fp32"),
    "ours-two-pass": ("two_pass", "fp32"),
}
ALWAYS = ("ours", "eager", "trl")  # the others, and fp32, with --full
TOLERANCE = 0.15


@pytest.mark.parametrize("model,tokens", HEADS[DEVICE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_memory_is_as_estimated(
    benchmark: Any, session: Session, name: str, dtype: str, model: str, tokens: int
) -> None:
    is_first = (model, tokens) == HEADS[DEVICE][0]
    always = name in ALWAYS and dtype != "fp32" and is_first
    if session.suite == "tiny" or (session.brief and not always):
        pytest.skip("with --full")
    session.begin()
    device = session.device
    case, provider = make_case("dapo", model, tokens, dtype), PROVIDERS[name]
    if (reason := provider.absent(device) or provider.unable(case)) is not None:
        pytest.skip(reason)
    formula, precision = FORMULAS[name]
    call = Call(
        name="one_pass",
        hidden=case.model.hidden,
        vocabulary=case.model.vocabulary,
        tokens=tokens,
        dtype=DTYPES[dtype],
        device=device,
        options=RunOptions(precision=precision),
    )
    planned = replace(call, name=formula or call.default)
    if total(planned) > 0.8 * device_memory(device):
        pytest.skip(f"needs {total(planned) / 2**30:.0f} GiB")
    alone = partial(ask, memory_alone) if device == "cpu" else memory_alone
    memory = benchmark.pedantic(alone, args=(name, case, device), rounds=1)
    measured = memory["extra_bytes"] + memory["returned_bytes"]
    benchmark.group = "measuring memory, to compare it with grpo-kernels plan"
    benchmark.extra_info["memory"] = {"measured": measured, "estimated": growth(planned)}
    assert growth(planned) == pytest.approx(measured, rel=TOLERANCE), str(planned)
