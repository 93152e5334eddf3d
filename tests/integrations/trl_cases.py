"""TRL's own trainers, with its head and with ours."""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import Qwen2ForCausalLM

from grpo_kernels.integrations import lazy_logits
from grpo_kernels.integrations import trl as ours
from tests.integrations import trl_async_cases
from tests.integrations.precision import assert_run_as_exact_as
from tests.parity.canned import VOCABULARY, tiny_model, tiny_tokenizer

STEPS = 10
_COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 1,
    "max_steps": STEPS,
    "learning_rate": 0.05,
    "optim": "sgd",  # Adam's steps are as large where a gradient is nothing but rounding
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "disable_tqdm": True,
}

DEFAULT: dict[str, Any] = {"bf16": None, "gradient_checkpointing": True}  # TRL's


def _texts(first: int, count: int) -> list[str]:
    return [" ".join(f"w{2 + (7 * i + 3 * j) % 190}" for j in range(2 + i % 5)) for i in
            range(first, first + count)]  # fmt: skip


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 4 for text in completions]


def _grpo(model: Any, trainer: Any = trl.GRPOTrainer, peft: Any = None, **more: Any) -> Any:
    own = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
    args = trl.GRPOConfig(**{**_COMMON, **own, **more})
    return trainer(
        model, _reward, args, Dataset.from_dict({"prompt": _texts(0, 16)}),
        processing_class=tiny_tokenizer(), peft_config=peft,
    )  # fmt: skip


def _rloo(model: Any, **more: Any) -> Any:
    args = trl.RLOOConfig(**{**_COMMON, "num_generations": 4, "max_completion_length": 6, **more})
    return trl.RLOOTrainer(
        model, _reward, args, Dataset.from_dict({"prompt": _texts(0, 16)}),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip


def _sft(model: Any, **more: Any) -> Any:
    args = trl.SFTConfig(**{**_COMMON, **more})
    data = Dataset.from_dict({"prompt": _texts(0, 16), "completion": _texts(40, 16)})
    return trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tiny_tokenizer())


def _dpo(model: Any, **more: Any) -> Any:
    args = trl.DPOConfig(**{**_COMMON, **more})
    data = {"prompt": _texts(0, 16), "chosen": _texts(40, 16), "rejected": _texts(90, 16)}
    return trl.DPOTrainer(
        model, args=args, train_dataset=Dataset.from_dict(data), processing_class=tiny_tokenizer()
    )


def _kto(model: Any, **more: Any) -> Any:
    args = trl.KTOConfig(**{**_COMMON, **more})
    data = {"prompt": _texts(0, 16), "completion": _texts(40, 16), "label": [True, False] * 8}
    return trl.KTOTrainer(
        model, args=args, train_dataset=Dataset.from_dict(data), processing_class=tiny_tokenizer()
    )


TRAINERS = {"grpo": _grpo, "rloo": _rloo, "sft": _sft, "dpo": _dpo, "kto": _kto}
GRPO: dict[str, dict[str, Any]] = {
    "entropy bonus": {"entropy_coef": 0.1, "temperature": 0.7, "loss_type": "grpo"},
    "off-policy": {"num_iterations": 2, "loss_type": "dr_grpo", "epsilon_high": 0.3},
    "sequences": {"importance_sampling_level": "sequence", "loss_type": "bnpo", "beta": 0.0},
    # of a half, rounding to bf16 chooses another token
    "few tokens": {"top_entropy_quantile": 0.3, "loss_type": "cispo", "epsilon_high": 2.0},
    "fp32 head": {"cast_lm_head_to_fp32": True, "loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "no tokens": {"mask_truncated_completions": True, "epsilon_high": 0.3},  # in most steps
    "adaptive entropy": {  # both sides of the target, within the steps
        "use_adaptive_entropy": True,
        "entropy_target": 4.683,
        "entropy_coef_delta": 0.02,
        "entropy_coef_max": 0.03,
    },
}
_NOT_COMPARED = ("time", "runtime", "per_second", "flos")


def cases() -> dict[str, Callable[[], None]]:
    return dict(_cases())


def _cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, make in TRAINERS.items():
        yield name, partial(check_parity, make)
        yield f"{name}, TRL's default", partial(check_default, make)
    for name, more in GRPO.items():
        yield f"grpo, {name}", partial(check_parity, _grpo, **more)
        yield f"fused grpo, {name}", partial(check_fused_parity, **more)
        yield f"fused grpo, TRL's default, {name}", partial(check_fused_default, **more)
    yield "dpo, weighted", partial(check_parity, _dpo, use_weighting=True)
    yield "async grpo", check_async
    yield "async grpo, TRL's default", check_async_default
    yield "an adapter on the head", check_adapter_on_head
    yield "refused", check_refused


def check_parity(make: Callable[..., Any], **more: Any) -> None:
    """Compare every number that is logged, and the weights after all steps."""
    theirs = _train(make, **more)
    with ours.enabled():
        found = _train(make, **more)
    assert _train(make, **more)[0] == theirs[0]  # off again without a trace
    _compare(found, theirs)


def check_fused_parity(**more: Any) -> None:
    """Compare the trainer whose loss is at the head with TRL's."""
    _compare(_train(_grpo, trainer=ours.FusedGRPOTrainer, **more), _train(_grpo, **more))


def check_default(make: Callable[..., Any], **more: Any) -> None:
    """Compare with what TRL's own bf16 makes of its fp32 run."""
    with canned_completions():
        exact, theirs = _train(make, **more), _train(make, **more, **DEFAULT)
        with ours.enabled():
            found = _train(make, **more, **DEFAULT)
    assert_run_as_exact_as(found, theirs, exact)


def check_fused_default(**more: Any) -> None:
    with canned_completions():
        exact, theirs = _train(_grpo, **more), _train(_grpo, **more, **DEFAULT)
        found = _train(_grpo, trainer=ours.FusedGRPOTrainer, **more, **DEFAULT)
    assert_run_as_exact_as(found, theirs, exact)


@contextmanager
def canned_completions() -> Iterator[None]:
    """Have the same tokens drawn, in which runs of other precision would differ."""

    def generate(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
        seed = int(input_ids.sum())  # a step has prompts of its own
        g = torch.Generator().manual_seed(seed)
        drawn = torch.randint(2, VOCABULARY, (len(input_ids), 6), generator=g)
        return torch.cat([input_ids, drawn], dim=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2ForCausalLM, "generate", generate)
        yield


def _compare(
    found: Any, theirs: Any, names: Collection[str] = frozenset({"loss", "grad_norm"})
) -> None:
    assert len(found[0]) == len(theirs[0])
    assert set(names) <= found[0][0].keys()
    for row, expected in zip(found[0], theirs[0], strict=True):
        close = partial(pytest.approx, rel=1e-4, abs=2e-6)
        assert row == {n: x if x is None else close(x) for n, x in expected.items()}
    torch.testing.assert_close(found[1], theirs[1], rtol=0, atol=2e-6)


def check_async() -> None:
    """Compare the loss and metrics of AsyncGRPO, and the weights after all steps."""
    theirs = trl_async_cases.train()
    with ours.enabled():
        _compare(trl_async_cases.train(), theirs, names={"loss", "kl", "entropy"})


def check_async_default() -> None:
    exact, theirs = trl_async_cases.train(), trl_async_cases.train(bf16=True)
    with ours.enabled():
        assert_run_as_exact_as(trl_async_cases.train(bf16=True), theirs, exact)


def check_adapter_on_head() -> None:
    """TRL refuses it; with ours the loss and its gradients are those of the model's own logits."""
    from peft import LoraConfig

    lora = LoraConfig(target_modules=["lm_head", "q_proj"], r=3, init_lora_weights=False)
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        _train(_grpo, peft=lora)
    for trainer, more in itertools.product((trl.GRPOTrainer, ours.FusedGRPOTrainer), ({}, DEFAULT)):
        with ours.enabled():
            log, _ = _train(_grpo, trainer=trainer, peft=lora, **more)
        assert len([row for row in log if "loss" in row]) == STEPS
    with ours.enabled():
        model = _build(_grpo, peft=lora).model
    ids = torch.randint(2, 190, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = labels[2] = -100
    trained = {n: x for n, x in model.named_parameters() if x.requires_grad}
    assert any("lm_head" in name for name in trained)
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    exact = logp.gather(-1, ids[:, 1:, None]).squeeze(-1) * (labels[:, 1:] != -100)
    exact = -exact.sum() / (labels[:, 1:] != -100).sum()
    found = model(input_ids=ids, labels=labels, fused_lm_head=True).loss
    torch.testing.assert_close(found, exact)
    gradients = (torch.autograd.grad(loss, list(trained.values())) for loss in (found, exact))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def check_refused() -> None:
    from peft import LoraConfig

    trainer = _build(_grpo)
    with pytest.raises(ValueError, match="expected no trainer of TRL yet"):
        ours.enable()
    del trainer
    ours.enable()
    ours.enable()  # again, without effect
    utils = trl.trainer.utils
    mine = utils.add_fused_lm_head
    utils.add_fused_lm_head = print
    with pytest.raises(ValueError, match="undo what has replaced it first"):
        ours.disable()
    utils.add_fused_lm_head = mine
    lora = LoraConfig(target_modules=["lm_head"], lora_dropout=0.1)
    with pytest.raises(ValueError, match="expected plain LoRA without dropout"):
        _build(_grpo, peft=lora)
    lora = LoraConfig(target_modules=["lm_head"])
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32: expected False with an adapter"):
        _build(_grpo, peft=lora, cast_lm_head_to_fp32=True)
    with pytest.raises(ValueError, match=r"outputs: expected some of .*got \['logits'\]"):
        utils.add_fused_lm_head(tiny_model(), outputs=("logits",))
    model = tiny_model()
    lazy_logits.enable(model)
    with pytest.raises(ValueError, match="for trl alone, got one that lazy_logits has changed"):
        utils.add_fused_lm_head(model)
    lazy_logits.disable(model)
    utils.add_fused_lm_head(model)
    with pytest.raises(ValueError, match="for lazy_logits alone, got one that trl has changed"):
        lazy_logits.enable(model)
    del model
    ours.disable()
    ours.disable()
    assert utils.add_fused_lm_head is not mine
    assert trl.trainer.sft_trainer.add_fused_lm_head is utils.add_fused_lm_head


def _build(make: Callable[..., Any], **more: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = tiny_model()
        model.save_pretrained(folder)  # a reference model is loaded from there
        return make(type(model).from_pretrained(folder), output_dir=f"{folder}/out", **more)


def _train(make: Callable[..., Any], **more: Any) -> tuple[list[dict[str, float]], Any]:
    return run(_build(make, **more))


def run(trainer: Any) -> tuple[list[dict[str, float]], Any]:
    """Train, and return the log, without times, and the weights."""
    trainer.train()
    log = [
        {n: x for n, x in row.items() if not any(word in n for word in _NOT_COMPARED)}
        for row in trainer.state.log_history
    ]
    return log, copy.deepcopy(trainer.model.state_dict())
