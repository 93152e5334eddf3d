"""SkyRL's scorers give the same with logits that are not formed.

Its packages import what there is for GPUs alone, so the module of its scorers is imported by
itself, and called as its ``HFModelWrapper`` calls it.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

import torch

from tests.integrations.hosts import need

need("skyrl_fsdp")

from grpo_kernels.integrations import lazy_scorers
from tests.integrations.contract import Adapter, contract_of, unformed
from tests.support.tiny_models import rounded_model

MODULE = "skyrl.backends.skyrl_train.utils.torch_utils"
B, L, CHUNK = 3, 7, 4
for _end in range(1, 5):
    _parts = MODULE.split(".")[:_end]
    _package = ModuleType(".".join(_parts))
    _package.__path__ = [str(distribution("skyrl").locate_file("/".join(_parts)))]
    sys.modules[_package.__name__] = _package
scorers = importlib.import_module(MODULE)
bound_before = scorers.chunked_entropy_from_logits


def step(with_ours: bool, early: bool = False, dtype: Any = torch.float32, **more: Any) -> Any:
    """Score, and where ``early`` by an entropy of theirs that ours has not replaced."""
    model = rounded_model("qwen2", dtype)
    with lazy_scorers.enabled(model, "skyrl") if with_ours else nullcontext():
        entropy = bound_before if early else scorers.chunked_entropy_from_logits
        with unformed(rows=CHUNK if early else 0):
            return score(model, entropy, **more)


def score(model: Any, entropy_of: Any, requires_grad: bool = True) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (B, L), generator=g)
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[0, 5:] = 0
    logits = model(ids, attention_mask=mask)["logits"]
    logits.div_(0.7)
    logp = scorers.logprobs_from_logits(logits, ids.roll(-1, 1), inplace_backward=True)
    entropy = entropy_of(logits, requires_grad=requires_grad, attention_mask=mask, chunk_size=CHUNK)
    assert entropy.requires_grad == requires_grad
    weights = torch.linspace(-1, 1, logp.numel()).view(logp.shape) + 0.1
    loss = (logp * weights).sum() + 0.3 * entropy.sum()
    return logp.detach(), entropy.detach(), torch.autograd.grad(loss, [*model.parameters()])


test_contract = contract_of(
    Adapter(
        package="skyrl",
        step=step,
        settings={
            "plain": {},
            "no gradient of the entropy": {"requires_grad": False},
            "a scorer that was bound before": {"early": True, "requires_grad": False},
        },
        default={"dtype": torch.bfloat16},
        switch=lazy_scorers.SWITCHES["skyrl"],
    )
)
