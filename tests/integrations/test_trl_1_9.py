"""TRL from before its fused head: its Liger loss and its scorers, with theirs and with ours."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.integrations.hosts import need

need("trl_1_9")

import grpo_kernels.integrations.trl_head as later_trl
from grpo_kernels.integrations import lazy_scorers, liger
from tests.integrations import trl_training as training
from tests.integrations.contract import Adapter, Run, contract_of, unformed
from tests.parity.canned import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def liger_step(with_ours: bool, **more: Any) -> Run:
    with liger.enabled() if with_ours else nullcontext():
        trainer = training.build(training.grpo, **training.LIGER, **more)
    assert (type(trainer.liger_loss) is liger.LigerFusedLinearGRPOLoss) == with_ours
    return training.run(trainer)


def gkd(model: Any, **more: Any) -> Any:
    """Make a trainer of distillation on given texts."""
    gkd = import_module("trl.experimental.gkd")
    teacher, tokenizer = copy.deepcopy(model), tiny_tokenizer()
    with torch.no_grad():
        teacher.lm_head.weight += 0.3 * torch.randn(teacher.lm_head.weight.shape)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    data = Dataset.from_dict(
        {
            "messages": [
                [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
                for asked, answer in zip(training.texts(), training.texts(40), strict=True)
            ]
        }
    )
    args = gkd.GKDConfig(**{**training.COMMON, "lmbda": 0.0, **more})
    return gkd.GKDTrainer(model, teacher, args, None, data, processing_class=tokenizer)


def gkd_step(with_ours: bool, **more: Any) -> Run:
    with liger.enabled() if with_ours else nullcontext():
        trainer = training.build(gkd, **training.LIGER, **more)
    assert (type(trainer.liger_loss) is liger.LigerFusedLinearJSDLoss) == with_ours
    return training.run(trainer)


def lazy_step(with_ours: bool, make: Any = training.grpo, **more: Any) -> Run:
    trainer = training.build(make, **more)
    models = [x for x in (trainer.model, trainer.ref_model) if x is not None and with_ours]
    for model in models:
        lazy_scorers.enable(model, "trl")
    with unformed() if with_ours else nullcontext():
        found = training.run(trainer)
    for model in models:
        lazy_scorers.disable(model)
    return found


test_the_loss_of_liger = contract_of(
    Adapter(
        package="liger_kernel",
        step=liger_step,
        settings={
            "dapo": {},
            "grpo": {
                "loss_type": "grpo", "temperature": 0.7, "epsilon_high": 0.3, "num_iterations": 2,
            },
            "bnpo": {"loss_type": "bnpo", "importance_sampling_level": "sequence", "beta": 0.0},
            "dr_grpo": {"loss_type": "dr_grpo", "delta": 1.5, "use_bias_correction_kl": True},
            "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
            "sapo": {"loss_type": "sapo"},
            "vespo": {"loss_type": "vespo"},
        },
        default=training.DEFAULT,
    )
)  # fmt: skip
test_the_distillation_of_liger = contract_of(
    Adapter(
        package="liger_kernel",
        step=gkd_step,
        settings={f"beta {beta}": {"beta": beta} for beta in (0.0, 0.3, 1.0)},
        default=training.DEFAULT,
    )
)
test_logits_that_are_not_formed = contract_of(
    Adapter(
        package="trl",
        step=lazy_step,
        settings={
            "grpo": {},
            "entropy bonus": {"entropy_coef": 0.1, "temperature": 0.7},
            "off-policy": {"num_iterations": 2, "loss_type": "dr_grpo"},
            "few tokens": {"top_entropy_quantile": 0.3, "loss_type": "cispo"},
            "rloo": {"make": training.rloo},
        },
        default=training.DEFAULT,
        fp32_only=["few tokens", "off-policy"],
        switch=lazy_scorers.SWITCHES["trl"],
    )
)


def test_it_has_no_fused_head() -> None:
    """What the adapter of later versions needs is missing, and each of it is named."""
    with pytest.raises(ImportError, match=r"^trl 1.9.0 differs from what our adapter n") as error:
        later_trl.enable()
    names = (
        "utils.add_fused_lm_head",
        "utils.FusedCausalLMOutput",
        "distillation_trainer._chunked_divergence_loss",
        *(f"{name}_trainer.add_fused_lm_head" for name in later_trl._TRAINERS),
    )
    for name in names:
        assert f"* trl.trainer.{name}: missing" in str(error.value)
    with (
        pytest.warns(RuntimeWarning, match="add_fused_lm_head: missing"),
        pytest.raises(ImportError, match="found nothing in it that we could replace"),
    ):
        later_trl.enable(any_version=True)
    assert not later_trl.SWITCH.on
