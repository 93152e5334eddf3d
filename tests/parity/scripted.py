"""Runs TRL's GRPOTrainer and ours on the same model, data and scripted completions."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.rollout import Completions, Sampling, WeightSource
from tests.parity.accelerate_state import accelerate_state
from tests.parity.canned import EOS, tiny_tokenizer

STEPS = 10
GROUP, LONGEST = 4, 6
PROMPTS = ["w5 w6", "w9", "w40 w3 w8", "w77 w12", "w101", "w6 w6 w150", "w33", "w2 w190"]
SETTINGS: dict[str, Any] = dict(
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    max_steps=STEPS,
    logging_steps=1,
    per_device_train_batch_size=8,
    num_generations=GROUP,
    num_iterations=2,  # the second step of each generation is off-policy, so ratios clip
    max_completion_length=LONGEST,
    mask_truncated_completions=True,
    epsilon=0.02,
    temperature=0.8,
    shuffle_dataset=False,
    # a step is a multiple of the gradient: what differs between the two is not amplified
    optim="sgd",
    learning_rate=0.2,
)


def complete(prompt_ids: list[list[int]]) -> list[list[int]]:
    """Return completions that depend on the prompt and the row only; some are cut off."""
    completions = []
    for row, prompt in enumerate(prompt_ids):
        length = 1 + (sum(prompt) + row) % LONGEST
        ids = [3 + (7 * prompt[0] + 11 * row + 5 * i) % 190 for i in range(length)]
        completions.append(ids if length == LONGEST else [*ids, EOS])
    return completions


def two_rewards() -> list[Any]:
    def lengths(completion_ids: list[list[int]], **_: object) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    def first_token(completion_ids: list[list[int]], **_: object) -> list[float | None]:
        # not applicable to some
        return [None if ids[0] % 5 == 0 else ids[0] % 7 / 3 for ids in completion_ids]

    return [lengths, first_token]


def trl_logs(model: PreTrainedModel, folder: Path, **settings: Any) -> list[dict[str, float]]:
    """Return the logs of TRL's trainer, a row per step."""
    tokenizer = tiny_tokenizer()

    def rollout(prompts: list[str], trainer: Trainer) -> dict[str, Any]:
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        completions = complete(ids)
        unknown = [[0.0] * len(completion) for completion in completions]  # nothing corrects
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": unknown}

    kinds = (trl.GRPOTrainer, trl.GRPOConfig)
    return _logs(*kinds, model, folder, settings, rollout_func=rollout)


def our_logs(model: PreTrainedModel, folder: Path, **settings: Any) -> list[dict[str, float]]:
    """Return the logs of our trainer."""
    return _logs(GRPOTrainer, GRPOConfig, model, folder, settings, rollout_engine=_Script())


def _logs(
    trainer_kind: type[Trainer],
    config_kind: type[TrainingArguments],
    model: PreTrainedModel,
    folder: Path,
    settings: dict[str, Any],
    **completions: Any,
) -> list[dict[str, float]]:
    settings = SETTINGS | settings
    peft_config = settings.pop("peft_config", None)
    with accelerate_state({}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_kind(
            copy.deepcopy(model),
            reward_funcs=two_rewards(),
            args=config_kind(output_dir=str(folder), **settings),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny_tokenizer(),
            peft_config=peft_config,
            **completions,
        )
        start_at_same_adapter(trainer.model)
        trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


class _Script:
    """A rollout engine that says what the script says."""

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Completions:
        assert sampling.eos_token_ids == {EOS}
        return Completions(complete(prompt_ids))

    def update_weights(self, weights: WeightSource) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def start_at_same_adapter(model: torch.nn.Module) -> None:
    """Set the adapter, random when new, to the same weights in both runs."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A.default" in name and parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.2)
