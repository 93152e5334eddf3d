"""Axolotl's GRPO trainers log the same with our plugin as with Liger's loss."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integrations.hosts import need

need("axolotl")

from axolotl.cli.config import prepare_plugins
from axolotl.core.trainers.grpo import GRPOStrategy
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.enums import RLType
from datasets import Dataset

from grpo_kernels.integrations import liger
from tests.integrations import trl_training as training
from tests.integrations.contract import Adapter, Run, contract_of
from tests.parity.canned import tiny_tokenizer
from tests.support.tiny_models import tiny_model

NAME = "grpo_kernels.integrations.axolotl.GRPOKernelsPlugin"


@pytest.fixture(autouse=True)
def _without_plugins() -> Iterator[None]:
    yield
    PluginManager.get_instance().plugins.clear()


def config(**more: Any) -> Any:
    trl = {"use_liger_loss": True}
    return DictDefault({"plugins": [NAME], "rl": RLType.GRPO, "trl": trl, **more})


def make(model: Any, use_async: bool = False, **more: Any) -> Any:
    settings = {**training.COMMON, **training.ROLLOUTS, **training.LIGER, "beta": 0.0, **more}
    args = GRPOStrategy.get_training_args_class(use_async)(**settings)
    return GRPOStrategy.get_trainer_class(async_grpo=use_async)(
        model=model, reward_funcs=[training.reward], args=args,
        train_dataset=Dataset.from_dict({"prompt": training.texts()}),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip


def step(with_ours: bool, **more: Any) -> Run:
    cfg, manager = config(), PluginManager.get_instance()
    if with_ours:
        prepare_plugins(cfg)
        manager.pre_model_load(cfg)
    trainer = training.build(make, **more)
    if with_ours:
        manager.post_trainer_create(cfg, trainer)
    assert (type(trainer.liger_loss) is liger.LigerFusedLinearGRPOLoss) == with_ours
    return training.run(trainer)


def asked(**more: Any) -> Callable[[], None]:
    """Return what shows a config to the plugin."""

    def call() -> None:
        prepare_plugins(config())
        PluginManager.get_instance().pre_model_load(config(**more))

    return call


def built(family: str = "qwen2", **more: Any) -> Callable[[], None]:
    """Return what shows a trainer to the plugin."""

    def call() -> None:
        prepare_plugins(config())
        trainer = make(tiny_model(family), output_dir=tempfile.mkdtemp(), **more)
        PluginManager.get_instance().post_trainer_create(config(), trainer)

    return call


test_contract = contract_of(
    Adapter(
        package="axolotl",
        step=step,
        settings={
            "dapo": {"beta": 0.1},
            "grpo": {"loss_type": "grpo", "num_iterations": 2, "temperature": 0.7},
            "async": {"use_async": True, "loss_type": "grpo", "epsilon_high": 0.3},
        },
        default=training.DEFAULT,
        refused={
            "rl: expected grpo or gdpo with .*, got dpo": asked(rl=RLType.DPO),
            "trl.use_liger_loss: expected true .*; got None": asked(trl={}),
            "trainer: expected .* got AxolotlGRPOTrainer": built(use_liger_kernel=False),
            "off_policy_mask_threshold: expected None .*, got 0.5": built(
                use_async=True, off_policy_mask_threshold=0.5
            ),
            r"model: expected logits without .* \(gemma2": built("gemma2"),
        },
    )
)
