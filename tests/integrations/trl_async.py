"""The loss of TRL's AsyncGRPO, on rows that are packed by hand: its trainer needs a vLLM server."""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor
from trl.experimental.async_grpo import async_grpo_trainer

from tests.integrations.contract import Run
from tests.parity.canned import VOCABULARY, tiny_model

STEPS, LENGTHS, PROMPT = 10, (7, 4, 6), 2


def train(bf16: bool = False) -> Run:
    """Take steps by its own ``compute_loss``; return the metrics of each, and the weights.

    Args:
        bf16: as accelerate prepares a model, which is TRL's default.
    """
    model = tiny_model()
    # by its own name, which is what is replaced
    async_grpo_trainer.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    if bf16:
        rounded = torch.autocast("cpu", torch.bfloat16)(model.forward)
        model.forward = convert_outputs_to_fp32(rounded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = []
    for step in range(STEPS):
        trainer = _trainer()
        loss = async_grpo_trainer.AsyncGRPOTrainer.compute_loss(trainer, model, _packed(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
        log.append({"loss": loss.item(), **metrics})
    return Run(log, copy.deepcopy(model.state_dict()))


def _trainer() -> Any:
    """Make what ``compute_loss`` reads of a trainer on one process."""
    counters = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    return SimpleNamespace(
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        epsilon_low=0.2,
        epsilon_high=0.28,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=2,
        _metrics={"train": defaultdict(list)},
        **{f"_step_{name}": 0.0 for name in counters},
    )


def _packed(step: int) -> dict[str, Tensor]:
    """Pack sequences into a row, each with a prompt, without trees."""
    g = torch.Generator().manual_seed(step)
    total = sum(LENGTHS)
    ids = torch.randint(2, VOCABULARY, (1, total), generator=g)
    position = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    trained = position[0].roll(-1) >= PROMPT  # what follows is of a completion
    trained[-1] = False
    (index,) = trained.nonzero(as_tuple=True)
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[index]
    advantages = torch.randn(len(LENGTHS), generator=g)[segment]
    count = torch.tensor([float(len(index))])
    return {
        "attention_mask": torch.ones_like(ids), "input_ids": ids, "position_ids": position,
        "shift_labels": torch.where(trained, ids.roll(-1), -100),
        "token_index": index, "segment_id": segment, "advantages": advantages,
        "old_log_probs": torch.randn(len(index), generator=g) * 0.3 - 5,
        **{f"tree_{name}": torch.full((1,), -1) for name in
           ("kv_index", "cu_seqlens_q", "cu_seqlens_k")},
        "tree_max_seqlens": torch.zeros(1, 2, dtype=torch.int64),
        "global_n_tokens": count, "global_n_forward_tokens": count,
        "mean_seq_len": torch.tensor([total / len(LENGTHS)]),
    }  # fmt: skip
