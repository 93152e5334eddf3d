"""What ``grpo-kernels plan`` says of a case."""

from __future__ import annotations

import torch

from benchmarks.shapes import Case
from grpo_kernels.logprob.dispatch import chunk_rows
from grpo_kernels.predict import HeadShape, MemoryPrediction, predict_head_memory


def predicted_memory(case: Case, provider: str, device: str) -> MemoryPrediction | None:
    """Peak memory of a provider's call; None where the plan has no formula.

    The formulas are of a loss in which every token has a gradient.
    """
    work = case.work
    if work.kind not in ("mean", "loss") or work.rows != "all":
        return None
    if provider in ("ours", "ours-input") and _splits_sequences(case, provider, device):
        provider = {"ours": "ours-two-pass"}.get(provider, "")  # what "auto" chooses then
    head = HeadShape(
        hidden=case.model.hidden,
        vocabulary=case.model.vocabulary,
        dtype=case.torch_dtype,
        frozen=work.frozen,
        softcap=case.model.softcap is not None,
    )
    return predict_head_memory(provider, head, case.tokens, device=device)


def _splits_sequences(case: Case, provider: str, device: str) -> bool:
    """Whether the loss needs whole sequences, and a tile of ours does not hold one."""
    loss = case.work.loss
    if loss is None or loss.scope() == "token":
        return False
    precision = "input" if provider == "ours-input" else "fp32"
    columns, dtype = case.model.vocabulary, case.torch_dtype
    return case.length > chunk_rows(columns, dtype, precision, torch.device(device), None)
