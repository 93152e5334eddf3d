"""TRL from before its fused head: its Liger loss and its scorers, with theirs and with ours."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.integrations.hosts import need

need("trl_1_9")

from grpo_kernels.integrations import lazy_scorers, liger
from tests.integrations import trl_training as training
from tests.integrations.contract import Adapter, Run, contract_of, unformed

pytestmark = pytest.mark.filterwarnings("ignore")


def liger_step(with_ours: bool, **more: Any) -> Run:
    with liger.enabled() if with_ours else nullcontext():
        trainer = training.build(training.grpo, **training.LIGER, **more)
    assert (type(trainer.liger_loss) is liger.LigerFusedLinearGRPOLoss) == with_ours
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
        switch=lazy_scorers.SWITCHES["trl"],
    )
)
