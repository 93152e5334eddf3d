"""Axolotl's GRPO trainers log the same with our plugin as with Liger's loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integrations.hosts import need

need("axolotl")

from axolotl.cli.config import prepare_plugins
from axolotl.core.trainers.grpo import GRPOStrategy
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.enums import RLType
from datasets import Dataset

from grpo_kernels.integrations import liger
from tests.hf.test_families import tiny_model
from tests.integrations import trl_cases as cases
from tests.integrations.precision import assert_run_as_exact_as
from tests.parity.canned import tiny_tokenizer

NAME = "grpo_kernels.integrations.axolotl.GRPOKernelsPlugin"
# Liger's layers are Triton kernels without an interpreter
NO_LAYERS = dict.fromkeys(
    ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False
)
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "dapo": (False, {"beta": 0.1}),
    "grpo": (False, {"loss_type": "grpo", "num_iterations": 2, "temperature": 0.7}),
    "async trainer": (True, {"loss_type": "grpo", "epsilon_high": 0.3}),
}


@pytest.fixture(autouse=True)
def _no_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # Liger compiles its module
        yield


@pytest.fixture
def manager() -> Iterator[Any]:
    yield PluginManager.get_instance()
    PluginManager.get_instance().plugins.clear()


def config(**more: Any) -> Any:
    trl = {"use_liger_loss": True}
    return DictDefault({"plugins": [NAME], "rl": RLType.GRPO, "trl": trl, **more})


def make(model: Any, use_async: bool = False, **more: Any) -> Any:
    args = GRPOStrategy.get_training_args_class(use_async)(
        **{**cases._COMMON, "num_generations": 4, "max_completion_length": 6, "beta": 0.0}
        | {"use_liger_kernel": True, "liger_kernel_config": NO_LAYERS}
        | more
    )
    return GRPOStrategy.get_trainer_class(async_grpo=use_async)(
        model=model, reward_funcs=[cases._reward], args=args,
        train_dataset=Dataset.from_dict({"prompt": cases._texts(0, 16)}),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, manager: Any) -> None:
    use_async, more = CASES[name]
    more = {**more, "use_async": use_async}
    expected = cases._train(make, **more)
    cfg = config()
    prepare_plugins(cfg)
    manager.pre_model_load(cfg)
    trainer = cases._build(make, **more)
    manager.post_trainer_create(cfg, trainer)
    assert type(trainer.liger_loss) is liger.LigerFusedLinearGRPOLoss
    cases._compare(cases.run(trainer), expected)
    # without a trace in the next trainer
    assert type(cases._build(make, **more).liger_loss) is not liger.LigerFusedLinearGRPOLoss


def test_its_default_precision(manager: Any) -> None:
    more: dict[str, Any] = {"beta": 0.1}
    with cases.canned_completions():
        exact, theirs = cases._train(make, **more), cases._train(make, **more, **cases.DEFAULT)
        cfg = config()
        prepare_plugins(cfg)
        manager.pre_model_load(cfg)
        trainer = cases._build(make, **more, **cases.DEFAULT)
        manager.post_trainer_create(cfg, trainer)
        assert_run_as_exact_as(cases.run(trainer), theirs, exact)


def test_refused(manager: Any, tmp_path: Any) -> None:
    cfg = config()
    prepare_plugins(cfg)
    with pytest.raises(ValueError, match="rl: expected grpo or gdpo with .*, got dpo"):
        manager.pre_model_load(config(rl=RLType.DPO))
    with pytest.raises(ValueError, match=r"trl.use_liger_loss: expected true .*; got None"):
        manager.pre_model_load(config(trl={}))
    folder = {"output_dir": str(tmp_path)}
    plain = make(tiny_model("qwen2"), use_liger_kernel=False, **folder)
    with pytest.raises(ValueError, match="trainer: expected .* got AxolotlGRPOTrainer without"):
        manager.post_trainer_create(cfg, plain)
    masked = make(tiny_model("qwen2"), True, off_policy_mask_threshold=0.5, **folder)
    with pytest.raises(ValueError, match="off_policy_mask_threshold: expected None .*, got 0.5"):
        manager.post_trainer_create(cfg, masked)
    capped = make(tiny_model("gemma2"), **folder)
    with pytest.raises(ValueError, match=r"model: expected logits without .* \(gemma2"):
        manager.post_trainer_create(cfg, capped)
