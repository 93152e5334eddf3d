"""What ``grpo-kernels plan`` says of a case."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from benchmarks.shapes import Case
from grpo_kernels.tools.estimate import HeadShape, MemoryPrediction, Speed, predict_head_memory
from grpo_kernels.tools.estimate.cost import predict_costs, speed_of, speed_of_class
from grpo_kernels.tools.estimate.cost_rates import MEASURED_ON
from grpo_kernels.tools.estimate.memory import predict_schedule_memory
from grpo_kernels.tools.estimate.shape import Setting

if TYPE_CHECKING:
    from benchmarks.load import Environment  # which imports the providers

# providers of which "auto" chooses the schedule -> their precision
_CHOOSING = {"ours": "fp32", "ours-input": "input"}


def predicted_memory(case: Case, provider: str, device: str) -> MemoryPrediction | None:
    """Peak memory of a provider's call; None where the plan has no formula.

    The formulas are of a loss in which every token has a gradient.
    """
    if case.work.kind not in ("mean", "loss") or case.work.rows != "all":
        return None
    head = _head(case)
    if provider not in _CHOOSING:
        return predict_head_memory(provider, head, case.tokens, device=device)
    precision, schedule = _CHOOSING[provider], default_schedule(case, provider, device)
    return predict_schedule_memory(schedule, head, _setting(case, device), precision)


def default_schedule(case: Case, provider: str, device: str) -> str:
    """What "auto" takes for a loss of ``case``, whatever memory is free."""
    speed = speed_of(torch.device(device), case.torch_dtype)
    return faster_schedule(case, provider, _setting(case, device), speed)


def schedule_on(case: Case, provider: str, environment: Environment) -> str | None:
    """The same on the device of a result file; None where nothing was fitted on one like it.

    It does not depend on the machine that asks.
    """
    of_name = (k for k, facts in MEASURED_ON.items() if facts["device"] == environment.device)
    threads = environment.threads if environment.kind == "cpu" else None
    speed = speed_of_class(next(of_name, ""), case.torch_dtype, threads)
    setting = replace(_setting(case, environment.kind), threads=environment.threads, native=True)
    return None if speed is None else faster_schedule(case, provider, setting, speed)


def faster_schedule(case: Case, provider: str, setting: Setting, speed: Speed) -> str:
    precision = _CHOOSING[provider]
    if splits_sequences(case, precision, setting.device):
        return "two_pass"
    return predict_costs(_head(case), setting, precision, speed).choose(None)[0]


def _head(case: Case) -> HeadShape:
    return HeadShape(
        hidden=case.model.hidden,
        vocabulary=case.model.vocabulary,
        dtype=case.torch_dtype,
        frozen=case.work.frozen,
        softcap=case.model.softcap is not None,
    )


def _setting(case: Case, device: str) -> Setting:
    """Of the rows with a gradient; half of a case's may have none."""
    whole = case.work.rows == "all"
    return Setting(
        tokens=case.tokens if whole else case.tokens // 2,
        device=device,
        threads=torch.get_num_threads(),
        forward_only=case.tokens // 2 if case.work.rows == "zero" else 0,
    )


def splits_sequences(case: Case, precision: str, device: str) -> bool:
    """Whether the loss needs whole sequences, and a tile of ours does not hold one."""
    loss = case.work.loss
    if loss is None or loss.scope() == "token":
        return False
    return case.length > _setting(case, device).rows(_head(case), precision)
