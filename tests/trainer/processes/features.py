"""Features that a run may have, each by a line: several processes must be one process with all.

A feature is settings of GRPOConfig and arguments of GRPOTrainer, the model by a function, or a
function that makes them anew for each run where they have a state of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from grpo_kernels.losses import LOSSES
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.engines import policy_weights
from grpo_trainer.policy import loading_whole, placement_of
from tests.support import tools, vision
from tests.support.placements import prepare, processes, rank
from tests.support.trainer import (
    BackgroundEngine,
    RoutedEngine,
    adapted,
    canned,
    lengths_reward,
    logged,
)

Changes = dict[str, Any]

ROWS = 16  # completions of a generation batch
STEPS = 2
_OWN = set(inspect.signature(GRPOTrainer).parameters)


def run(feature: str, placement: str, folder: str) -> dict[str, Any]:
    Path(folder).mkdir(exist_ok=True, parents=True)
    Path(folder, "completions").touch()  # where a folder of completions cannot be made
    trainer = make_trainer(feature, placement, folder)
    trainer.train()
    return {"log": logged(trainer), "weights": weights(trainer), "held": held(trainer)}


def make_trainer(feature: str, placement: str, folder: str | Path, **changes: Any) -> GRPOTrainer:
    """Return a trainer of a tiny policy with a feature, whose completions are canned."""
    settings = prepare(placement)
    made = FEATURES[feature]
    changes = (made() if callable(made) else made) | changes
    own = {name: changes.pop(name) for name in _OWN & changes.keys()}
    micro_batches = changes.get("gradient_accumulation_steps", 1)
    rows = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(20)])
    given: Changes = {
        "reward_funcs": lengths_reward,
        "train_dataset": rows,
        "eval_dataset": rows.select(range(4)),
        "processing_class": make_tokenizer(),
    }
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS // micro_batches // processes(),
        "per_device_eval_batch_size": ROWS // 2 // processes(),
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "write_report": False,
        "report_to": "none",
        "bf16": False,
        **settings,
    }
    args = GRPOConfig(**(settings | changes))  # before the model, which ZeRO-3 makes in shards
    own["model"] = own.get("model", plain)()
    trainer = GRPOTrainer(args=args, **(given | own))
    return trainer if "rollout_engine" in own else canned(trainer)


def weights(trainer: GRPOTrainer) -> dict[str, Tensor]:
    """Return a copy of the policy's whole weights."""
    found = policy_weights(trainer.model, placement_of(trainer.accelerator))
    return {name: value.detach().clone() for name, value in found}


def held(trainer: GRPOTrainer) -> float:
    """Return the share of the policy's numbers that this process keeps between steps."""
    placement = placement_of(trainer.accelerator)
    placement.at_rest(trainer.model)
    kept = sum(placement.local(value).numel() for value in trainer.model.parameters())
    return kept / sum(value.numel() for value in placement.described(trainer.model).values())


def rare_reward(prompts, completion_ids, **kwargs):
    """Reward the completions of every third prompt differently."""
    rewards = lengths_reward(completion_ids)
    return [
        value if int(prompt[:2]) % 3 == 0 else 1.0
        for prompt, value in zip(prompts, rewards, strict=True)
    ]


def longer_prompts(prompts, completions, rewards, metas):
    """Let the first prompt grow; the others make room for those of the dataset."""
    assert len(completions) == ROWS and len(set(rewards)) > 1
    return [f"1{prompt}" for prompt in prompts[:4]] + [None] * 4 + prompts[8:]


def stream() -> Changes:
    rows = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(20)])
    datasets = {"train_dataset": rows, "eval_dataset": rows.select(range(4))}
    return {name: rows.to_iterable_dataset() for name, rows in datasets.items()} | EVALUATED


def overlap() -> Changes:
    tokenizer = make_tokenizer()
    engine = BackgroundEngine(tokenizer, plain().eval(), rank())
    return {"generation_batches_ahead": 1, "rollout_engine": engine, **EVALUATED, "eval_steps": 1}


def plain() -> PreTrainedModel:
    return make_policy(make_tokenizer(), seed=0)


def unequal() -> Dataset:
    """Return prompts of which those of the first of two processes are longer."""
    return Dataset.from_list([{"prompt": "7" * (9 - 4 * (i % 4 // 2) - i % 2)} for i in range(20)])


def replayed() -> Changes:
    """Return a mixture of experts, and an engine that reports which of them it chose."""

    def mixture() -> PreTrainedModel:
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=14, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, pad_token_id=1,
            max_position_embeddings=64,
        )  # fmt: skip
        with loading_whole():  # in shards, ZeRO-3 draws other random weights
            return AutoModelForCausalLM.from_config(config)

    engine = RoutedEngine(make_tokenizer(), layers=2, experts=4, chosen=2, process=rank())
    return {
        "model": mixture, "rollout_engine": engine, "use_rollout_routing_replay": True,
        "num_iterations": 2, "gradient_checkpointing": True, "packing": "packed",
        "router_aux_loss_coef": 0.0,  # it is of each process's tokens
    }  # fmt: skip


def tied() -> PreTrainedModel:
    policy = plain()
    policy.config.tie_word_embeddings = True
    policy.tie_weights()
    return policy


def padded_teacher() -> PreTrainedModel:
    """Return another policy whose head has more rows than there are tokens."""
    teacher = make_policy(make_tokenizer(), seed=1)
    teacher.resize_token_embeddings(32, mean_resizing=False)
    return teacher


def with_trained_adapter() -> PreTrainedModel:
    policy = plain()
    torch.manual_seed(1)
    return adapted(policy, **LORA)


def agents() -> Changes:
    """Make no call, one, or one too many to fit: one process has ended while the other goes on."""

    def script(text: str, row: int) -> str:
        wanted, done = int(text.split("user\n")[1][0]), len(tools.results(text))
        mark = "abcd"[row % 4] if done == 0 else ""  # tells a group's completions apart
        return mark + (tools.call("add", a=1, b=1) if done < wanted else "end")

    def reward(completion_ids, **kwargs):
        return [float(len(ids) % 7 + row % 2) for row, ids in enumerate(completion_ids)]

    tokenizer = tools.make_tool_tokenizer()
    rows = Dataset.from_list([{"prompt": tools.question(str(n % 3))} for n in range(12)])
    return {
        "model": lambda: tools.make_small_policy(len(tokenizer)),
        "reward_funcs": reward,
        "train_dataset": rows,
        "eval_dataset": rows.select(range(4)),
        "processing_class": tokenizer,
        "tools": [tools.add],
        "rollout_engine": tools.ScriptedEngine(tokenizer, script, by_row=True),
        "max_completion_length": 120,
        **EVALUATED,
    }


def images() -> Changes:
    asked = [{"role": "user", "content": "?"}]
    rows = {"prompt": [asked] * 20, "image": [vision.picture(12 * n) for n in range(20)]}
    return {
        "model": lambda: vision.tiny_model("qwen3_vl"),
        "train_dataset": Dataset.from_dict(rows),
        "processing_class": vision.tiny_processor("qwen3_vl"),
        "beta": 0.05,
        "num_iterations": 2,
    }


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
DYNAMIC = {"dynamic_sampling": True, "max_resampling_rounds": 2, "reward_funcs": rare_reward}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]}
OF_MLP = LORA | {"target_modules": ["q_proj", "gate_proj", "down_proj"]}
LORA_ON_LAYERS = LORA | {"target_modules": ["q_proj", "v_proj"]}

FEATURES: dict[str, Changes | Callable[[], Changes]] = {
    "nothing": {},
    # one loss of each aggregation
    **{
        name: {"loss_type": name}
        for name in {LOSSES[name].aggregation: name for name in reversed(LOSSES)}.values()
    },
    "clipped": {"max_grad_norm": 0.1},
    "adam": {"optim": "adamw_torch", "learning_rate": 1e-3, "gradient_checkpointing": True},
    "accumulated": {"gradient_accumulation_steps": 2, "logging_steps": 2},
    "iterations": {"num_iterations": 2, "loss_type": "gspo", "logging_steps": 2},
    "reference": {
        "beta": 0.05, "gradient_accumulation_steps": 2, "sync_ref_model": True,
        "ref_model_sync_steps": 1,
    },
    # so small that what is left out of a small vocabulary is far below rounding
    "bounded": {"backward": "sparse", "backward_tolerance": 1e-6, "gradient_accumulation_steps": 2},
    "entropy bonus": {"loss_type": "bnpo", "entropy_coef": 0.3},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0},
    "masked": {"mask_truncated_completions": True, "loss_type": "bnpo"},
    "dynamic": DYNAMIC,
    "token budget": {
        "max_tokens_per_micro_batch": 26, "gradient_accumulation_steps": 2, "entropy_coef": 0.1,
        "loss_type": "grpo", "beta": 0.05, "train_dataset": unequal(), "shuffle_dataset": False,
    },
    # one process has all prompts with an advantage in a micro-batch, the other none
    **{
        f"without zero variance, {name}": {
            "loss_aggregation": name, "exclude_zero_variance": True, "reward_funcs": rare_reward,
            "gradient_accumulation_steps": 2,
        }
        for name in ("prompt_mean", "sequence_mean")
    },
    "groups over processes": {"num_generations": 16},
    "curriculum": {"dynamic_prompts_fn": longer_prompts},
    "stream": stream,
    "overlap": overlap,
    "two batches ahead": lambda: overlap() | {
        "generation_batches_ahead": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1,
    },
    # completions are logged to the folder that cannot be made
    "evaluation": {
        **EVALUATED, "eval_steps": 1, "log_completions": True, "num_completions_to_print": 0,
    },
    "tools": agents,
    "images": images,
    "packed": {"packing": "packed", "beta": 0.05, "gradient_checkpointing": True},
    "routing replay": replayed,
    "tiles": {"mlp_tile_tokens": 7, "beta": 0.05, "gradient_checkpointing": True},
    "tiles of all layers": lambda: {"mlp_tile_tokens": 7, "peft_config": LoraConfig(**OF_MLP)},
    "teacher": lambda: {"teacher": padded_teacher()},
    "tied": {"model": tied, "beta": 0.05},
    "lora": lambda: {"peft_config": LoraConfig(**LORA), "beta": 0.05},
    "trained adapter": {"model": with_trained_adapter, "beta": 0.05},
    "tokens": lambda: {
        "model": tied, "beta": 0.05,
        "peft_config": LoraConfig(**LORA_ON_LAYERS, trainable_token_indices=[3, 7, 9]),
    },
    "tokens of both ends": lambda: {
        "peft_config": LoraConfig(
            **LORA_ON_LAYERS, trainable_token_indices={"embed_tokens": [3, 7, 9], "lm_head": [7]}
        ),
    },
    "tied ends": lambda: {
        "model": tied, "beta": 0.05,
        "peft_config": LoraConfig(
            **LORA_ON_LAYERS, modules_to_save=["lm_head"], ensure_weight_tying=True
        ),
    },
}  # fmt: skip
