"""TRL's trainers on a tiny model: how they are built and run, for parity and for hosts."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from accelerate.utils import convert_outputs_to_fp32
from datasets import Dataset
from torch import Tensor
from transformers import Qwen2ForCausalLM

from tests.integrations.contract import Run
from tests.parity.canned import EOS, VOCABULARY, tiny_model, tiny_tokenizer

STEPS = 4
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


def grpo(
    model: Any,
    trainer: Any = trl.GRPOTrainer,
    config: Any = trl.GRPOConfig,
    reward_funcs: Any = reward,
    prompts: list[str] | None = None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Make a trainer of ``settings``; ``more`` are its own arguments."""
    args = config(**{**COMMON, **ROLLOUTS, "beta": 0.1, **settings})
    data = Dataset.from_dict({"prompt": texts() if prompts is None else prompts})
    return trainer(
        model, reward_funcs, args, data, processing_class=tiny_tokenizer(), **(more or {})
    )


def corrected_grpo(model: Any, **settings: Any) -> Any:
    """Make one of completions that vLLM is said to have drawn, at log-probabilities of its own."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        g = torch.Generator().manual_seed(sum(map(sum, ids)))
        drawn = torch.randint(2, VOCABULARY, (len(ids), 6), generator=g).tolist()
        logprobs = (torch.randn(len(ids), 6, generator=g) * 0.5 - 5.3).tolist()
        return {"prompt_ids": ids, "completion_ids": drawn, "logprobs": logprobs}

    made = grpo(model, more={"rollout_func": rollout}, **{"beta": 0.0, **settings})
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


def build(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = tiny_model()
        model.save_pretrained(folder)  # a reference model is loaded from there
        model = type(model).from_pretrained(folder, dtype=dtype)
        return make(model, output_dir=f"{folder}/out", **more)


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


# AsyncGRPO's trainer needs a vLLM server: its loss, on rows that are packed by hand
ASYNC_STEPS = 10
LENGTHS = (7, 4, 6)
PROMPT = 2


def train_async(bf16: bool = False) -> Run:
    """Take steps by its own ``compute_loss``; return the metrics of each, and the weights.

    Args:
        bf16: as accelerate prepares a model, which is TRL's default.
    """
    from trl.experimental.async_grpo import async_grpo_trainer  # TRL 1.16

    model = tiny_model()
    # by its own name, which is what is replaced
    async_grpo_trainer.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    if bf16:
        rounded = torch.autocast("cpu", torch.bfloat16)(model.forward)
        model.forward = convert_outputs_to_fp32(rounded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = []
    for step in range(ASYNC_STEPS):
        trainer = _async_trainer()
        loss = async_grpo_trainer.AsyncGRPOTrainer.compute_loss(trainer, model, _packed(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
        log.append({"loss": loss.item(), **metrics})
    return Run(log, copy.deepcopy(model.state_dict()))


def _async_trainer() -> Any:
    """Make what ``compute_loss`` reads of a trainer on one process."""
    counters = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    return SimpleNamespace(
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        epsilon_low=0.2,
        epsilon_high=0.28,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=2,
        _metrics={"train": defaultdict(list)},
        **{f"_step_{name}": 0.0 for name in counters},
    )


def _packed(step: int) -> dict[str, Tensor]:
    """Pack sequences into a row, each with a prompt, without trees."""
    g = torch.Generator().manual_seed(step)
    total = sum(LENGTHS)
    ids = torch.randint(2, VOCABULARY, (1, total), generator=g)
    position = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    trained = position[0].roll(-1) >= PROMPT  # what follows is of a completion
    trained[-1] = False
    (index,) = trained.nonzero(as_tuple=True)
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[index]
    advantages = torch.randn(len(LENGTHS), generator=g)[segment]
    count = torch.tensor([float(len(index))])
    return {
        "attention_mask": torch.ones_like(ids), "input_ids": ids, "position_ids": position,
        "shift_labels": torch.where(trained, ids.roll(-1), -100),
        "token_index": index, "segment_id": segment, "advantages": advantages,
        "old_log_probs": torch.randn(len(index), generator=g) * 0.3 - 5,
        **{f"tree_{name}": torch.full((1,), -1) for name in
           ("kv_index", "cu_seqlens_q", "cu_seqlens_k")},
        "tree_max_seqlens": torch.zeros(1, 2, dtype=torch.int64),
        "global_n_tokens": count, "global_n_forward_tokens": count,
        "mean_seq_len": torch.tensor([total / len(LENGTHS)]),
    }  # fmt: skip
