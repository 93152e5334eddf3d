"""TRL's trainers with our head, and with our loss at the head, log what they log with their own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import trl

from grpo_kernels.integrations import lazy_scorers
from grpo_kernels.integrations import trl as ours
from grpo_kernels.integrations.probe import differences
from grpo_kernels.integrations.trl_head import _TRAINERS
from tests.integrations import contract, trl_sharded
from tests.integrations import trl_training as training
from tests.integrations.contract import Adapter, Run
from tests.parity.canned import tiny_model
from tests.sharded.ranks import run_alone, run_on_ranks


def step(with_ours: bool, make: Callable[..., Any], **more: Any) -> Run:
    with ours.enabled() if with_ours else nullcontext():
        return training.run(training.build(make, **more))


def fused_step(with_ours: bool, make: Callable[..., Any] = training.grpo, **more: Any) -> Run:
    trainer = ours.FusedGRPOTrainer if with_ours else trl.GRPOTrainer
    return training.run(training.build(make, trainer=trainer, **more))


def async_step(with_ours: bool, bf16: bool = False) -> Run:
    with ours.enabled() if with_ours else nullcontext():
        return training.train_async(bf16)


PAIRS = {"chosen": training.texts(40), "rejected": training.texts(90)}
dpo = training.offline("DPO", PAIRS)
LABELS = {"completion": training.texts(40), "label": [True, False] * 8}
TRAINERS: dict[str, dict[str, Any]] = {
    "grpo": {"make": training.grpo},
    "grpo, entropy": {"make": training.grpo, "entropy_coef": 0.1, "temperature": 0.7},
    "grpo, fp32 head": {"make": training.grpo, "cast_lm_head_to_fp32": True},
    "rloo": {"make": training.rloo},
    "sft": {"make": training.offline("SFT", {"completion": training.texts(40)})},
    "dpo": {"make": dpo},
    "dpo, weighted": {"make": dpo, "use_weighting": True},
    "kto": {"make": training.offline("KTO", LABELS)},
    **{
        f"distillation, beta {beta}": {"make": training.distillation, "beta": beta, **more}
        for beta, more in {0.0: {}, 0.3: {"temperature": 0.7}, 1.0: {}}.items()
    },
}
_VESPO = {"vespo_k_pos": 2.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 3.0}
FUSED: dict[str, dict[str, Any]] = {
    "entropy bonus": {"entropy_coef": 0.1, "temperature": 0.7, "loss_type": "grpo"},
    "off-policy": {"num_iterations": 2, "loss_type": "dr_grpo", "epsilon_high": 0.3},
    "sequences": {"importance_sampling_level": "sequence", "loss_type": "bnpo", "beta": 0.0},
    "sums": {"importance_sampling_level": "sequence", "loss_type": "luspo", "num_iterations": 2},
    "few tokens": {"top_entropy_quantile": 0.3, "loss_type": "cispo", "epsilon_high": 2.0},
    "fp32 head": {
        "cast_lm_head_to_fp32": True, "loss_type": "sapo", "sapo_temperature_pos": 2.0,
        "sapo_temperature_neg": 0.5,
    },
    "vespo": {"loss_type": "vespo", "num_iterations": 2, **_VESPO},
    "two sides": {
        "delta": 1.3, "epsilon": 0.1, "num_iterations": 2, "use_bias_correction_kl": True,
        "learning_rate": 0.5,  # so that some are clipped
    },
    "no tokens": {"mask_truncated_completions": True, "epsilon_high": 0.3},  # in some steps
    "adaptive entropy": {  # both sides of the target, within the steps
        "use_adaptive_entropy": True, "entropy_target": 4.683, "entropy_coef_delta": 0.02,
        "entropy_coef_max": 0.03, "entropy_coef_min": 0.01, "max_steps": 10,
    },
    "steps of a generation": {"steps_per_generation": 4, "loss_type": "dapo"},
    **{
        f"vLLM, {mode}": {
            "make": training.corrected_grpo, "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 1.5, "vllm_importance_sampling_clip_min": 0.5,
            "off_policy_mask_threshold": 0.3,
        }
        for mode in ("token_truncate", "sequence_mask")
    },
}  # fmt: skip

# cases with clips, or with masks of the ratios to vLLM's log-probabilities
THRESHOLDS = ["off-policy", "sums", "few tokens", "two sides", "steps of a generation"]
THRESHOLDS += ["vLLM, token_truncate", "vLLM, sequence_mask"]


def records() -> dict[str, Adapter]:
    head = Adapter(
        package="trl", step=step, settings=TRAINERS, default=training.DEFAULT, switch=ours.SWITCH,
        # "dpo, weighted" reads more; test_trl_distillation has all betas in 16 bits
        fp32_only=["dpo", "distillation, beta 0.0", "distillation, beta 1.0"],
    )  # fmt: skip
    fused = Adapter(
        package="trl", step=fused_step, settings=FUSED, default=training.DEFAULT,
        fp32_only=THRESHOLDS,
    )  # fmt: skip
    alone = Adapter(
        package="trl", step=async_step, settings={"AsyncGRPO": {}}, default={"bf16": True}
    )
    return {"head": head, "loss": fused, "async": alone}


def cases() -> dict[str, Callable[[], None]]:
    found = {
        f"{kind}, {name}": case
        for kind, adapter in records().items()
        for name, case in contract.cases(adapter).items()
    }
    return found | {"an adapter on the head": check_adapter_on_head, "refused": check_refused}


def test_every_setting_of_their_loss_is_tried() -> None:
    """Hold the table against what TRL's loss reads, so that a setting of a new TRL is seen."""
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    read = set(re.findall(r"self\.(?:args\.)?(\w+)", source))
    settings = {field.name for field in fields(trl.GRPOConfig)} & (read | {"epsilon"})
    tried = {name for more in FUSED.values() for name in more}
    # a length that divides a loss is in all; vLLM and experts take more than a setting
    given = {"max_completion_length", "use_vllm", "vllm_importance_sampling_correction"}
    assert settings - tried == given | {"router_aux_loss_coef"}


def check_adapter_on_head() -> None:
    """TRL refuses it; with ours the loss and its gradients are those of the model's own logits."""
    from peft import LoraConfig

    lora = LoraConfig(target_modules=["lm_head", "q_proj"], r=3, init_lora_weights=False)
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        training.build(training.grpo, more={"peft_config": lora})
    for trainer in (trl.GRPOTrainer, ours.FusedGRPOTrainer):
        with ours.enabled():
            built = training.build(
                training.grpo, trainer=trainer, more={"peft_config": lora}, **training.DEFAULT
            )
            built.train()  # on completions of its own
    with ours.enabled():
        model = training.build(training.grpo, more={"peft_config": lora}).model
    ids = torch.randint(2, 190, (3, 7), generator=torch.Generator().manual_seed(0))
    trained = [x for x in model.parameters() if x.requires_grad]
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    exact = -logp.gather(-1, ids[:, 1:, None]).mean()
    found = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    torch.testing.assert_close(found, exact)
    gradients = (torch.autograd.grad(loss, trained) for loss in (found, exact))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=2e-6)


def check_refused() -> None:
    from peft import LoraConfig

    trainer = training.build(training.grpo)
    with pytest.raises(ValueError, match="expected no trainer of TRL yet"):
        ours.enable()
    del trainer
    changed, added = tiny_model(), tiny_model()
    lazy_scorers.defer_logits(changed)
    dropout, plain = (LoraConfig(target_modules=["lm_head"], lora_dropout=x) for x in (0.1, 0.0))
    make = partial(training.build, training.grpo)
    with ours.enabled():
        add = trl.trainer.utils.add_fused_lm_head
        add(added)
        for message, call in {
            "expected plain LoRA without dropout": partial(make, more={"peft_config": dropout}),
            "cast_lm_head_to_fp32: expected False with an adapt": partial(
                make, more={"peft_config": plain}, cast_lm_head_to_fp32=True
            ),
            r"outputs: expected any of .*got \['logits'\]": partial(
                add, tiny_model(), outputs=("logits",)
            ),
            "that only trl changes, got one that lazy_scorers has changed": partial(add, changed),
            "that only lazy_scorers changes, got one that trl has changed": partial(
                lazy_scorers.defer_logits, added
            ),
        }.items():
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.long
def test_trl() -> None:
    """In a process of its own, where no other trainer of TRL is."""
    contract.assert_passed(run_alone(cases))


@pytest.mark.slow
def test_sharded() -> None:
    contract.assert_passed(run_on_ranks(trl_sharded.cases, 2))


@pytest.mark.slow
@pytest.mark.deepspeed
def test_zero() -> None:
    pytest.importorskip("deepspeed")
    contract.assert_passed(run_on_ranks(trl_sharded.zero_cases, 2))


def test_it_works_without_peft(monkeypatch):
    modules = [import_module(f"trl.trainer.{name}_trainer") for name in _TRAINERS]
    for module in modules:  # which import it where PEFT is there
        monkeypatch.delattr(module, "BaseTunerLayer")
    differences.cache_clear()
    with pytest.raises(ImportError, match="trl.trainer.grpo_trainer.BaseTunerLayer: missing"):
        ours.enable()
    monkeypatch.setattr("transformers.utils.is_peft_available", lambda: False)
    differences.cache_clear()
    with ours.enabled():
        assert ours.SWITCH.on
    assert not any(hasattr(module, "BaseTunerLayer") for module in modules)
