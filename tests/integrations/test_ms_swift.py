"""ms-swift's own methods give the same loss, gradients and metrics with our loss and scorers.

Its trainer is not built, which takes a model from its registry; its methods are called on an object
of its class that has the attributes they read.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.hosts import need
from tests.integrations.precision import assert_results_as_exact_as

need("ms_swift")

from accelerate import Accelerator
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import grpo_trainer
from swift.utils import import_external_file

from grpo_kernels.integrations import lazy_hosts, lazy_logits, liger, ms_swift
from tests.hf.test_families import tiny_model

B, L, T = 3, 9, 6
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.0},
    "dapo": {"temperature": 0.7},
    "bnpo": {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_high": 0.3},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "sapo": {"loss_type": "sapo", "rollout_importance_sampling_mode": "token_truncate"},
}


@pytest.fixture(scope="module", autouse=True)
def _on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have it on by the file of docs/integrations.md, imported as ms-swift imports it."""
    (plugin,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "import ms_swift" in block
    )
    file = tmp_path_factory.mktemp("plugin") / "grpo_kernels_plugin.py"
    file.write_text(plugin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))  # its folder is put there
        import_external_file(str(file))
    assert ms_swift.SWITCH.on
    yield
    ms_swift.disable()


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


def run(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, ...]:
    model = tiny_model("qwen2").to(torch.bfloat16).to(dtype)  # the same weights in both
    trainer = make_trainer(model, **settings)
    loss = trainer.compute_liger_loss(model, *make_batch(model, trainer.temperature))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    ours = type(trainer.liger_grpo_loss) is liger.LigerFusedLinearGRPOLoss
    return ours, loss.detach(), gradients, dict(trainer._metrics["train"])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_the_loss_of_liger(name: str) -> None:
    ours, *found = run(**LOSSES[name])
    ms_swift.disable()
    theirs, *expected = run(**LOSSES[name])
    ms_swift.enable()
    assert ours and not theirs
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_its_default_precision(name: str) -> None:
    found = run(torch.bfloat16, **LOSSES[name])[1:]
    ms_swift.disable()
    theirs, exact = (run(dtype, **LOSSES[name])[1:] for dtype in (torch.bfloat16, torch.float32))
    ms_swift.enable()
    assert_results_as_exact_as(found[:2], theirs[:2], exact[:2])


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("overlong_filter", "kl_in_reward"):
        with pytest.raises(ValueError, match=f"{name}: expected False with use_liger_kernel"):
            run(**{name: True})
    assert run(kl_in_reward=True, beta=0.0)[0]
    with pytest.raises(ValueError, match="loss_type: expected one of"):
        run(loss_type="fipo")
    with pytest.raises(ValueError, match="model: expected logits without scale and softcap"):
        make_trainer(tiny_model("gemma2"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ImportError, match=r"external_plugins: expected .* got .*ms_swift.py"):
        import_external_file(ms_swift.__file__)


@pytest.mark.parametrize("padding_free", [False, True])
def test_logits_that_are_not_formed(padding_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    template = SimpleNamespace(padding_free=padding_free, sequence_parallel_size=1)
    trainer = make_trainer(model, template=template, temperature=0.7)
    inputs, batch = make_batch(model, 0.7)
    if padding_free:
        inputs = {"input_ids": inputs["input_ids"].view(1, -1), "position_ids": positions()}
        batch.logits_to_keep = B * L - 1

    def score() -> tuple[Any, ...]:
        logps, entropies = trainer._get_logps_via_local_forward(
            model, dict(inputs), batch.logits_to_keep, inputs["input_ids"], compute_entropy=True
        )
        weights = torch.linspace(-1, 1, logps.numel()).view(logps.shape) + 0.1
        loss = (logps * weights).sum() + 0.3 * entropies.sum()
        return logps.detach(), entropies.detach(), torch.autograd.grad(loss, [*model.parameters()])

    expected = score()
    monkeypatch.setattr(lazy_logits.Recipe, "logits", None)  # nobody forms them
    with lazy_hosts.enabled(model, "trl"):
        found = score()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def positions() -> torch.Tensor:
    return torch.arange(L).repeat(B)[None]
