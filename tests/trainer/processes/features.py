"""What several processes may train with: a trainer of each, and the table, each line a run.

The lines are as few as there can be: a feature joins one that it does not touch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor

from grpo_trainer import GRPOTrainer
from grpo_trainer.engines import policy_weights
from grpo_trainer.policy import placement_of
from tests.support import tools
from tests.support.placements import prepare, processes
from tests.support.trainer import canned, lengths_reward, logged
from tests.trainer.features import (
    Changes,
    adapter,
    agents,
    engine,
    images,
    made,
    make_trainer,
    replayed,
    taught,
    tied_policy,
)

ROWS = 16  # completions of a generation batch
STEPS = 2
SHARDED = ("fsdp2", "zero3")
PROMPTS = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(20)])
# prompts of which those of the first of two processes are longer
UNEQUAL = Dataset.from_list([{"prompt": "7" * (9 - 4 * (i % 4 // 2) - i % 2)} for i in range(20)])


def trainer_of(feature: str, placement: str, folder: str | Path, **changes: Any) -> GRPOTrainer:
    """Return a trainer of a tiny policy with a feature, whose completions are canned."""
    settings = {
        "reward_funcs": lengths_reward,
        "train_dataset": PROMPTS,
        "eval_dataset": PROMPTS.take(4),
        "num_generations": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "bf16": False,
        **prepare(placement),
        **made(FEATURES[feature]),
        **changes,
    }
    micro_batches = settings.get("gradient_accumulation_steps", 1)
    settings["per_device_train_batch_size"] = ROWS // micro_batches // processes()
    settings["per_device_eval_batch_size"] = ROWS // 2 // processes()
    trainer = make_trainer(folder, settings)
    return trainer if "rollout_engine" in settings else canned(trainer)


def run(feature: str, placement: str, folder: str) -> dict[str, Any]:
    """Train with a feature; return the log and the weights."""
    Path(folder).mkdir(exist_ok=True, parents=True)
    Path(folder, "completions").touch()  # where a folder of completions cannot be made
    trainer = trainer_of(feature, placement, folder)
    trainer.train()
    log = logged(trainer)
    steps = [row for row in log if "loss" in row]
    assert len(steps) == STEPS // trainer.args.logging_steps
    assert {"reward", "grad_norm", "entropy"} <= set(steps[0])
    assert SHOWN.get(feature, lambda *log: True)(*log), log
    share = 1 / processes() if placement in SHARDED else 1.0
    assert abs(held(trainer) - share) < 0.03
    return {"log": log, "weights": weights(trainer)}


def weights(trainer: GRPOTrainer) -> dict[str, Tensor]:
    """Return a copy of the policy's whole weights."""
    whole = policy_weights(trainer.model, placement_of(trainer.accelerator))
    return {name: value.detach().clone() for name, value in whole}


def held(trainer: GRPOTrainer) -> float:
    """Return the share of the policy's numbers that this process keeps between steps."""
    placement = placement_of(trainer.accelerator)
    placement.at_rest(trainer.model)
    kept = sum(placement.local(value).numel() for value in trainer.model.parameters())
    whole = sum(value.numel() for value in placement.described(trainer.model).values())
    return kept / whole


def rare_reward(prompts, completion_ids, **kwargs):
    """Reward the completions of every third prompt differently."""
    rewards = lengths_reward(completion_ids)
    pairs = zip(prompts, rewards, strict=True)
    return [value if int(prompt[:2]) % 3 == 0 else 1.0 for prompt, value in pairs]


def uneven_reward(completion_ids, **kwargs):
    return [float(len(ids) % 7 + row % 2) for row, ids in enumerate(completion_ids)]


def longer_prompts(prompts, completions, rewards, metas):
    """Let the first prompt grow; the others make room for those of the dataset."""
    assert len(completions) == ROWS and len(set(rewards)) > 1
    return [f"1{prompt}" for prompt in prompts[:4]] + [None] * 4 + prompts[8:]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
DYNAMIC = {"dynamic_sampling": True, "max_resampling_rounds": 2, "reward_funcs": rare_reward}
# one process has all prompts with an advantage in a micro-batch, the other none
WITHOUT_ZERO_VARIANCE = {
    "exclude_zero_variance": True, "reward_funcs": rare_reward, "gradient_accumulation_steps": 2,
}  # fmt: skip
STREAMED = {
    "train_dataset": PROMPTS.to_iterable_dataset(),
    "eval_dataset": PROMPTS.take(4).to_iterable_dataset(),
}
ON_LAYERS = ["q_proj", "v_proj"]

# the losses are one of each aggregation
FEATURES: dict[str, Changes | Callable[[], Changes]] = {
    "nothing": {},
    "clipped, groups over processes": {
        "max_grad_norm": 0.1, "num_generations": 16, "loss_type": "luspo",
    },
    "adam, a stream": {
        "optim": "adamw_torch", "learning_rate": 1e-3, "gradient_checkpointing": True,
        **STREAMED, **EVALUATED,
    },
    "accumulated, iterations": {
        "gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "gspo",
        "logging_steps": 2,
    },
    "reference": {
        "beta": 0.05, "gradient_accumulation_steps": 2, "sync_ref_model": True,
        "ref_model_sync_steps": 1,
    },
    # so small that what is left out of a small vocabulary is far below rounding; completions are
    # logged to the folder that cannot be made
    "bounded, evaluated": {
        "backward": "sparse", "backward_tolerance": 1e-6, "gradient_accumulation_steps": 2,
        **EVALUATED, "eval_steps": 1, "log_completions": True, "num_completions_to_print": 0,
    },
    "adaptive entropy, tied": {
        "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0,
        "loss_type": "dr_grpo", "model": tied_policy, "beta": 0.05,
    },
    "dynamic": DYNAMIC,
    "token budget": {
        "max_tokens_per_micro_batch": 26, "gradient_accumulation_steps": 2, "entropy_coef": 0.1,
        "loss_type": "grpo", "beta": 0.05, "train_dataset": UNEQUAL, "shuffle_dataset": False,
    },
    "a mean over prompts, trained adapter": lambda: adapter(
        trained=True, beta=0.05, loss_aggregation="prompt_mean", **WITHOUT_ZERO_VARIANCE
    ),
    "a mean over sequences, tiles of all layers": lambda: adapter(
        target_modules=["gate_proj", "down_proj"], mlp_tile_tokens=7,
        loss_aggregation="sequence_mean", **WITHOUT_ZERO_VARIANCE,
    ),
    "curriculum, teacher": lambda: taught("logprobs", dynamic_prompts_fn=longer_prompts),
    "two batches ahead": lambda: engine(
        group=4, generation_batches_ahead=2, gradient_accumulation_steps=2, steps_per_generation=1,
        **EVALUATED | {"eval_steps": 1},
    ),
    # no call, one, or one too many to fit: one process has ended while the other goes on
    "tools": lambda: agents(
        tools=[tools.add], reward_funcs=uneven_reward, max_completion_length=120, **EVALUATED
    ),
    "images": lambda: images("qwen3_vl", 20, beta=0.05, num_iterations=2),
    "packed, tiles": {
        "packing": "packed", "mlp_tile_tokens": 7, "beta": 0.05, "gradient_checkpointing": True,
    },
    "routing replay": lambda: replayed(
        group=4, num_iterations=2, gradient_checkpointing=True, packing="packed",
        router_aux_loss_coef=0.0,  # it is of each process's tokens
    ),
    "lora": lambda: adapter(
        beta=0.05, mask_truncated_completions=True, loss_type="bnpo", entropy_coef=0.3
    ),
    "tokens": lambda: adapter(
        model=tied_policy, beta=0.05, target_modules=ON_LAYERS, trainable_token_indices=[3, 7, 9]
    ),
    "tokens of both ends": lambda: adapter(
        target_modules=ON_LAYERS,
        trainable_token_indices={"embed_tokens": [3, 7, 9], "lm_head": [7]},
    ),
    "tied ends": lambda: adapter(
        model=tied_policy, beta=0.05, target_modules=ON_LAYERS, modules_to_save=["lm_head"],
        ensure_weight_tying=True,
    ),
}  # fmt: skip


def staleness(log: tuple[dict[str, float], ...]) -> list[float]:
    return [row["sampling/staleness"] for row in log if "loss" in row]


# of the rows of a log: that the feature was there
SHOWN: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(["reference", "packed, tiles", "lora", "images"], lambda *log: "kl" in log[-1]),
    **dict.fromkeys(
        ["bounded, evaluated", "adam, a stream", "tools"], lambda *log: "eval_reward" in log[-1]
    ),
    "clipped, groups over processes": lambda first, *rest: first["grad_norm"] > 0.1,
    "dynamic": lambda first, *rest: first["dynamic_sampling/discarded_groups"] > 0,
    "token budget": lambda first, *rest: first["micro_batches/number"] > 1,
    "adaptive entropy, tied": lambda first, last: (
        first["entropy_coef"] < last["entropy_coef"] and "kl" in last
    ),
    "routing replay": lambda first, *rest: 0 < first["sampling/routing_difference"] < 1,
    "two batches ahead": lambda *log: staleness(log) == [0, 0.5],  # two in a step
}
