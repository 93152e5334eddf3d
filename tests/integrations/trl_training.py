"""TRL's trainers on a tiny model, for hosts that are TRL or build on it."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import Qwen2ForCausalLM

from tests.integrations.contract import Run
from tests.parity.canned import EOS, VOCABULARY, tiny_model, tiny_tokenizer

STEPS = 6
COMMON: dict[str, Any] = {
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
ROLLOUTS: dict[str, Any] = {"num_generations": 4, "max_completion_length": 6}
DEFAULT: dict[str, Any] = {"bf16": None, "gradient_checkpointing": True}  # TRL's
# Liger's layers are Triton kernels without an interpreter
LIGER: dict[str, Any] = {
    "use_liger_kernel": True,
    "liger_kernel_config": dict.fromkeys(
        ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"), False
    ),
}
_NOT_COMPARED = ("time", "runtime", "per_second", "flos")


def texts(first: int = 0) -> list[str]:
    return [
        " ".join(f"w{2 + (7 * i + 3 * j) % 190}" for j in range(2 + i % 5))
        for i in range(first, first + 16)
    ]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 4 for text in completions]


def grpo(model: Any, trainer: Any = trl.GRPOTrainer, peft: Any = None, **more: Any) -> Any:
    args = trl.GRPOConfig(**{**COMMON, **ROLLOUTS, "beta": 0.1, **more})
    data = Dataset.from_dict({"prompt": texts()})
    return trainer(
        model, reward, args, data, processing_class=tiny_tokenizer(), peft_config=peft
    )  # fmt: skip


def corrected_grpo(model: Any, trainer: Any = trl.GRPOTrainer, **more: Any) -> Any:
    """Make one of completions that vLLM is said to have drawn, at log-probabilities of its own."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        g = torch.Generator().manual_seed(sum(map(sum, ids)))
        drawn = torch.randint(2, VOCABULARY, (len(ids), 6), generator=g).tolist()
        logprobs = (torch.randn(len(ids), 6, generator=g) * 0.5 - 5.3).tolist()
        return {"prompt_ids": ids, "completion_ids": drawn, "logprobs": logprobs}

    args = trl.GRPOConfig(**{**COMMON, **ROLLOUTS, **more})
    data = Dataset.from_dict({"prompt": texts()})
    made = trainer(
        model, reward, args, data, processing_class=tiny_tokenizer(), rollout_func=rollout
    )  # fmt: skip
    made.use_vllm, made._last_loaded_step = True, -1
    made.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return made


def rloo(model: Any, **more: Any) -> Any:
    args = trl.RLOOConfig(**{**COMMON, **ROLLOUTS, **more})
    data = Dataset.from_dict({"prompt": texts()})
    return trl.RLOOTrainer(model, reward, args, data, processing_class=tiny_tokenizer())


def distillation(model: Any, peft: Any = None, **more: Any) -> Any:
    """Make one whose teacher is the model that was not trained, with noise on its head."""
    args = trl.DistillationConfig(**{**COMMON, "max_completion_length": 6, **more})
    teacher, data = copy.deepcopy(model), Dataset.from_dict({"prompt": texts()})
    with torch.no_grad():
        teacher.lm_head.weight += 0.3 * torch.randn(teacher.lm_head.weight.shape)
    return trl.DistillationTrainer(
        model, teacher, args, data, processing_class=tiny_tokenizer(), peft_config=peft
    )  # fmt: skip


def offline(kind: str, columns: dict[str, list[Any]]) -> Callable[..., Any]:
    """Return what makes a trainer that learns from given completions."""

    def make(model: Any, **more: Any) -> Any:
        args = getattr(trl, f"{kind}Config")(**{**COMMON, **more})
        data = Dataset.from_dict({"prompt": texts(), **columns})
        trainer = getattr(trl, f"{kind}Trainer")
        return trainer(model, args=args, train_dataset=data, processing_class=tiny_tokenizer())

    return make


def build(make: Callable[..., Any], **more: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = tiny_model()
        model.save_pretrained(folder)  # a reference model is loaded from there
        return make(type(model).from_pretrained(folder), output_dir=f"{folder}/out", **more)


def run(trainer: Any) -> Run:
    """Train on canned completions, in which runs of another precision would differ."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Qwen2ForCausalLM, "generate", _generate)
        trainer.train()
    log = [
        {n: x for n, x in row.items() if not any(word in n for word in _NOT_COMPARED)}
        for row in trainer.state.log_history
    ]
    assert len(log) > STEPS and "loss" in log[0]
    return Run(log, copy.deepcopy(trainer.model.state_dict()))


def _generate(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
    g = torch.Generator().manual_seed(int(input_ids.sum()))  # a step has prompts of its own
    drawn = torch.randint(2, VOCABULARY, (len(input_ids), 6), generator=g)
    drawn[torch.rand(drawn.shape, generator=g) < 0.04] = EOS
    return torch.cat([input_ids, drawn], dim=1)
