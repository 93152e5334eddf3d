"""ms-swift's own methods give the same loss, gradients and metrics with our loss and scorers.

Its trainer is not built, which takes a model from its registry; its methods are called on an object
of its class that has the attributes they read.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.contract import Adapter, contract_of, unformed
from tests.integrations.hosts import need

need("ms_swift")

from accelerate import Accelerator
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import grpo_trainer
from swift.utils import import_external_file

from grpo_kernels.integrations import lazy_scorers, liger, ms_swift
from tests.support.documents import DOCS, python_block
from tests.support.tiny_models import rounded_model, tiny_model

B, L, T = 3, 9, 6
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.0, "kl_in_reward": True},
    "dapo": {"temperature": 0.7},
    "bnpo": {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_high": 0.3},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "sapo": {"loss_type": "sapo", "rollout_importance_sampling_mode": "token_truncate"},
}


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch it on by the file of the docs, imported as ms-swift imports it."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # its folder is put there
    file = tmp_path / "grpo_kernels_plugin.py"
    file.write_text(python_block(DOCS, "import ms_swift"))
    import_external_file(str(file))
    assert ms_swift.SWITCH.on
    ms_swift.disable()
    with pytest.raises(ImportError, match=r"external_plugins: expected .* got .*ms_swift.py"):
        import_external_file(ms_swift.__file__)


def make_trainer(model: Any, **settings: Any) -> Any:
    trainer = object.__new__(grpo_trainer.GRPOTrainer)
    args = SimpleNamespace(use_liger_kernel=True, report_to=[])
    trainer.__dict__ |= {
        "args": args, "model": model, "accelerator": Accelerator(cpu=True), "is_multimodal": False,
        "template": SimpleNamespace(padding_free=False), "advantage_estimator": "grpo",
        "model_kwarg_keys": ("use_cache", "logits_to_keep"), "kl_in_reward": False,
        "control": SimpleNamespace(should_evaluate=False), "overlong_filter": False,
        "_metrics": {"train": defaultdict(list)}, "beta": 0.1, "epsilon_low": 0.2,
        "epsilon_high": 0.2, "temperature": 1.0, "loss_type": "dapo", "tau_pos": 1.0,
        "tau_neg": 1.05, "max_completion_length": T, "importance_sampling_level": "token",
        "rollout_importance_sampling_mode": None, "disable_rollout_importance_sampling": False,
        "rollout_importance_sampling_threshold": 1.5,
    } | settings  # fmt: skip
    trainer._prepare_liger_loss()
    return trainer


def make_batch(model: Any, temperature: float) -> tuple[dict[str, Any], Any]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (B, L), generator=g)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, 4:] = mask[2, 5:] = False
    attention = torch.ones(B, L, dtype=torch.int64)
    attention[:, -T:] = mask
    with torch.no_grad():
        exact = copy.deepcopy(model).float()
        logits = exact(ids, attention_mask=attention).logits[:, -T - 1 : -1] / temperature
    own = logits.log_softmax(-1).gather(-1, ids[:, -T:, None]).squeeze(-1)
    logps = own + 0.2 * torch.randn(3, B, T, generator=g)
    advantages = torch.randn(B, 1, generator=g).expand(B, T)
    batch = GRPOBatch(
        completion_mask=mask, truncated_mask=torch.zeros(B, dtype=torch.bool),
        seq_lengths=torch.full((B,), L), old_per_token_logps=logps[0],
        ref_per_token_logps=logps[1], rollout_per_token_logps=logps[2], advantages=advantages,
        logits_to_keep=T,
    )  # fmt: skip
    return {"input_ids": ids, "attention_mask": attention}, batch


def step(
    with_ours: bool, dtype: Any = torch.float32, family: str = "qwen2", **settings: Any
) -> Any:
    model = rounded_model(family, dtype)
    with ms_swift.enabled() if with_ours else nullcontext():
        trainer = make_trainer(model, **settings)
    assert (type(trainer.liger_grpo_loss) is liger.LigerFusedLinearGRPOLoss) == with_ours
    loss = trainer.compute_liger_loss(model, *make_batch(model, trainer.temperature))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), gradients, dict(trainer._metrics["train"])


def score(with_ours: bool, padding_free: bool = False) -> Any:
    """Take the way without Liger's module, with logits that are not formed."""
    model = tiny_model("qwen2")
    template = SimpleNamespace(padding_free=padding_free, sequence_parallel_size=1)
    trainer = make_trainer(model, template=template, temperature=0.7)
    inputs, batch = make_batch(model, 0.7)
    if padding_free:
        positions = torch.arange(L).repeat(B)[None]
        inputs = {"input_ids": inputs["input_ids"].view(1, -1), "position_ids": positions}
        batch.logits_to_keep = B * L - 1
    with lazy_scorers.enabled(model, "trl") if with_ours else nullcontext(), unformed():
        logps, entropies = trainer._get_logps_via_local_forward(
            model, dict(inputs), batch.logits_to_keep, inputs["input_ids"], compute_entropy=True
        )
    weights = torch.linspace(-1, 1, logps.numel()).view(logps.shape) + 0.1
    loss = (logps * weights).sum() + 0.3 * entropies.sum()
    return logps.detach(), entropies.detach(), torch.autograd.grad(loss, [*model.parameters()])


test_the_loss_of_liger = contract_of(
    Adapter(
        package="swift",
        step=step,
        settings=LOSSES,
        default={"dtype": torch.bfloat16},
        switch=ms_swift.SWITCH,
        refused={
            "overlong_filter: expected False": partial(step, True, overlong_filter=True),
            "kl_in_reward: expected False": partial(step, True, kl_in_reward=True),
            "loss_type: expected one of": partial(step, True, loss_type="fipo"),
            "model: expected logits without": partial(step, True, family="gemma2"),
        },
    )
)
test_logits_that_are_not_formed = contract_of(
    Adapter(
        package="swift",
        step=score,
        settings={"padded": {}, "padding-free": {"padding_free": True}},
    )
)
