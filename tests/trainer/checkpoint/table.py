"""What a run may have that is resumed, in as few runs as there can be: each line is one.

A setting, or a part with a state, joins a line that does not touch it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import EarlyStoppingCallback

from tests.support import tools
from tests.trainer.features import (
    Changes,
    Counter,
    Likelihood,
    adapter,
    agents,
    alike,
    completed,
    dropout,
    engine,
    first_token_counts,
    hint,
    images,
    mixed,
    policy,
    replayed,
    sampled,
    stream,
    talking,
    taught,
    tied_policy,
)
from tests.trainer.test_extensions import Replay

OVERLAP = {"generation_batches_ahead": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
DYNAMIC = {"dynamic_sampling": True}
FILTERS = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8}
SYNCED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3}
BEST = {"metric_for_best_model": "eval_reward", "greater_is_better": True}
BUDGET = {"max_tokens_per_micro_batch": 14, "gradient_accumulation_steps": 2}
LOGGED_LATE = {"logging_steps": 3}

FEATURES: dict[str, Changes | Callable[[], Changes]] = {
    # which part of what is taken next: step 4 is in the middle of it
    "iterations, a synced reference, decay": SYNCED | LOGGED_LATE | {
        "num_iterations": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
    },
    "accumulation, a mean over prompts in the dataset's order, momentum": {
        "gradient_accumulation_steps": 2, "steps_per_generation": 3, "shuffle_dataset": False,
        "loss_aggregation": "prompt_mean", "optim": "sgd", "optim_args": "momentum=0.9",
    },
    "a long generation, packed rows, counted tokens, adafactor": LOGGED_LATE | {
        "steps_per_generation": 3, "num_iterations": 2, "packing": "packed", "beta": 0.1,
        "include_num_input_tokens_seen": True, "log_unique_prompts": True, "optim": "adafactor",
    },
    "token budget, 8-bit states": BUDGET | LOGGED_LATE | {
        "steps_per_generation": 4, "num_iterations": 3, "beta": 0.1, "optim": "adamw_8bit",
    },
    "token budget across generations, adaptive entropy, adapter": lambda: adapter(
        **BUDGET, steps_per_generation=3, use_adaptive_entropy=True, entropy_target=2.4
    ),
    "part of an epoch, another comparison, a trained adapter": lambda: adapter(
        trained=True, generation_batch_size=12, num_generations=4, beta=0.1,
        advantages="reinforce_plus_plus",
    ),
    "length in epochs, noise, bounded backward, a class of optimizer": {
        "num_train_epochs": 7 / 4, "max_steps": -1, "generation_batch_size": 8,
        "neftune_noise_alpha": 5.0, "backward": "sparse",
        "optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 1e-2}),
    },
    "a teacher's log-probabilities, columns and terms": lambda: taught(
        "logprobs", num_iterations=3, columns=[first_token_counts], terms=[Likelihood()]
    ),
    "a teacher's distributions, bf16": lambda: taught("jsd", steps_per_generation=3, bf16=True),
    # which prompts come next
    "streamed rows, 8-bit states of torchao": lambda: stream(optim="adamw_torch_8bit"),
    "streamed rows, replaced; adapter, whole head": lambda: adapter(
        target_modules=".*q_proj", modules_to_save=["lm_head"],
        **stream(num_iterations=3), **DYNAMIC,
    ),
    "mixed streams, evaluation, single tokens": lambda: adapter(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3], "lm_head": [3, 7]},
        **mixed(), **EVALUATED,
    ),
    "dynamic sampling, plateau, single tokens, tied": lambda: adapter(
        model=tied_policy, target_modules=["q_proj"], trainable_token_indices=[3, 7], beta=0.1,
        max_resampling_rounds=3, lr_scheduler_type="reduce_lr_on_plateau",
        **DYNAMIC, **EVALUATED, **BEST, **LOGGED_LATE,
    ),
    "curriculum, dora": lambda: adapter(
        use_dora=True, target_modules=["q_proj"], beta=0.1, num_iterations=4,
        dynamic_prompts_fn=hint,
    ),
    "curriculum, replaced; pissa": lambda: adapter(
        init_lora_weights="pissa", beta=0.1, dynamic_prompts_fn=hint, **DYNAMIC
    ),
    # what generates
    "sampling mask, a tied head": lambda: adapter(
        model=tied_policy, target_modules=["q_proj"], modules_to_save=["lm_head"],
        ensure_weight_tying=True, use_sampling_mask=True, beta=0.1, num_iterations=3, **FILTERS,
    ),
    "an adapter sent without its base, rollout correction, replayed groups": lambda: engine(
        noise=0.2, vllm_importance_sampling_mode="token_truncate", takes_adapter=True,
        prompts=Replay, **adapter(target_modules=["q_proj"]), **EVALUATED,
    ),
    "overlap, iterated, streamed, an adapter alone": lambda: engine(
        takes_adapter=True, **adapter(target_modules=["q_proj"]), **OVERLAP,
        **stream(num_iterations=3), **LOGGED_LATE,
    ),
    "overlap, replaced, evaluated": lambda: engine(**OVERLAP, **DYNAMIC, **EVALUATED),
    "three batches ahead, evaluated": lambda: engine(generation_batches_ahead=3, **EVALUATED),
    "two ahead, streamed, replaced": lambda: engine(
        generation_batches_ahead=2, **stream(), **DYNAMIC
    ),
    "overlap, masked": lambda: engine(
        masks=True, use_sampling_mask=True, top_k=5, steps_per_generation=3, **OVERLAP
    ),
    "tools": lambda: agents(tools=[tools.add], num_iterations=3, **LOGGED_LATE),
    "tools, ahead": lambda: agents(tools=[tools.add], generation_batches_ahead=2, reports=True),
    "environments": lambda: agents(environment_factory=Counter, reward_funcs=None),
    "a function that completes, ahead": lambda: engine(rollout_func=sampled, **OVERLAP),
    "a function that completes, a reward that logs": LOGGED_LATE | {
        "rollout_func": completed, "reward_funcs": talking, "num_iterations": 3,
    },
    "images, some skipped": lambda: images(
        bad=2, on_bad_image="skip", num_iterations=3, beta=0.1
    ),
    "routing replay, overlap": lambda: replayed(
        num_iterations=3, beta=0.1, packing="packed", **OVERLAP
    ),
    # what else moves
    "bf16 weights, rounded at random": lambda: {
        "model": policy().bfloat16(), "optim": "adamw_torch_4bit",
        "optim_args": "bf16_stochastic_round=True",
    },
    "dropout, the best model": lambda: dropout(
        gradient_checkpointing=True, num_iterations=3, load_best_model_at_end=True,
        **EVALUATED | BEST | {"eval_steps": 1},
    ),
    "adapter with dropout, patience": lambda: adapter(
        lora_dropout=0.3, target_modules=["q_proj"], beta=0.1, reward_funcs=alike,
        callbacks=[EarlyStoppingCallback(99)], restore_callback_states_from_checkpoint=True,
        **EVALUATED | BEST | {"eval_steps": 1},
    ),
}  # fmt: skip
