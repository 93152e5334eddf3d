"""Features that a run may have, each by a line: a resumed run must be the straight run with all.

A feature is settings of GRPOConfig and arguments of GRPOTrainer, or a function that makes them anew
for each run where they have a state of their own.
"""

from __future__ import annotations

import inspect
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, interleave_datasets
from peft import LoraConfig
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, MixtralConfig

from grpo_kernels import linear_logprobs
from grpo_trainer import GRPOConfig, GRPOTrainer, Term
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.monitor import value_metric
from tests.support import tools, vision
from tests.support.trainer import BackgroundEngine, RoutedEngine, adapted

Changes = dict[str, Any]

_OWN = set(inspect.signature(GRPOTrainer).parameters)
STEPS, SAVED = 7, 4  # of a run, and the step that it is resumed from
SETTINGS: Changes = dict(
    max_steps=STEPS, per_device_train_batch_size=4, per_device_eval_batch_size=4,
    num_generations=2, max_completion_length=4, learning_rate=1e-2, lr_scheduler_type="constant",
    logging_steps=1, log_completions=True, num_completions_to_print=0, save_strategy="steps",
    save_steps=SAVED, gradient_checkpointing=False, use_cpu=True, disable_tqdm=True,
    write_report=False,
)  # fmt: skip


def noisy_reward(completion_ids, **kwargs):
    """Return rewards that depend on the states of both random generators."""
    noise = random.random() + np.random.random()
    return [noise * (len(ids) + ids[0] % 3 + ids[-1] % 5) for ids in completion_ids]


def alike(completions, **kwargs):
    """Return rewards whose mean is the same in each step."""
    return [float(row) for row, _ in enumerate(completions)]


def trainer(changes: Changes, folder: Path) -> GRPOTrainer:
    """Return a trainer of a tiny policy on eleven prompts, with what a feature changes."""
    tokenizer = make_tokenizer()
    rows = Dataset.from_list([{"prompt": f"{i}="} for i in range(11)])
    given = {
        "reward_funcs": noisy_reward,
        "train_dataset": rows,
        "eval_dataset": rows.select(range(2)),
        "processing_class": tokenizer,
    } | {name: value for name, value in changes.items() if name in _OWN}
    given.setdefault("model", make_policy(tokenizer, seed=0))
    settings = SETTINGS | {name: value for name, value in changes.items() if name not in _OWN}
    return GRPOTrainer(args=GRPOConfig(output_dir=str(folder), **settings), **given)


def engine(
    masks: bool = False, noise: float = 0.0, takes_adapter: bool = False, **changes: Any
) -> Changes:
    """Return an engine with weights of its own."""
    tokenizer = make_tokenizer()
    model = make_policy(tokenizer, seed=0).eval()
    made = BackgroundEngine(tokenizer, model, masks=masks, group=2)
    made.noise, made.takes_adapter = noise, takes_adapter
    return {"rollout_engine": made} | changes


def adapter(trained: bool = False, **changes: Any) -> Changes:
    """Return an adapter of the policy, a new one or one that was trained before."""
    names = [name for name in changes if name in LoraConfig.__dataclass_fields__]
    lora = {"r": 2, "target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    lora |= {name: changes.pop(name) for name in names}
    if not trained:
        return {"peft_config": LoraConfig(**lora)} | changes
    torch.manual_seed(3)
    return {"model": adapted(make_policy(make_tokenizer(), seed=0), **lora)} | changes


def tied_adapter(**changes: Any) -> Changes:
    """Return an adapter of a policy whose head has the weight of its embeddings."""
    model = make_policy(make_tokenizer(), seed=0)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return adapter(target_modules=["q_proj"], model=model, **changes)


def experts() -> Changes:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=14, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, pad_token_id=1,
    )  # fmt: skip
    return {"model": AutoModelForCausalLM.from_config(config), "router_aux_loss_coef": 0.5}


def replayed(**changes: Any) -> Changes:
    engine = RoutedEngine(make_tokenizer(), layers=2, experts=4, chosen=2, group=2)
    routing = {"rollout_engine": engine, "use_rollout_routing_replay": True}
    return experts() | routing | changes


def dropout(**changes: Any) -> Changes:
    model = make_policy(make_tokenizer(), seed=0)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return {"model": model} | changes


def rounded(**changes: Any) -> Changes:
    model = make_policy(make_tokenizer(), seed=0).bfloat16()
    return {"model": model, "optim_args": "bf16_stochastic_round=True"} | changes


def stream(**changes: Any) -> Changes:
    rows = Dataset.from_list([{"prompt": f"{i}="} for i in range(6)])
    return {"train_dataset": rows.to_iterable_dataset().shuffle(7, buffer_size=4)} | changes


def mixed() -> Changes:
    """Return rows drawn by chance from two streams."""
    parts = [[{"prompt": f"{i}{end}="} for i in range(9)] for end in (1, 2)]
    streams = [Dataset.from_list(part).to_iterable_dataset() for part in parts]
    return {"train_dataset": interleave_datasets(streams, probabilities=[0.7, 0.3], seed=1)}


def talking(completions, log_extra, log_metric, luck, **kwargs):
    """Return rewards, and log something beside them."""
    rewards = [len(text) + chance for text, chance in zip(completions, luck, strict=True)]
    log_extra("noted", rewards)
    log_metric("talked", rewards[0])
    return rewards


def hint(prompts, completions, rewards, metas):
    """Prefix prompts that went badly with one number, those that went well with another."""
    return [f"{1 + (r > 4)}{prompt}" for r, prompt in zip(rewards, prompts, strict=True)]


def first_token_counts(batch, policy):
    """Add to the advantage of each completion's first token."""
    first = (batch.target >= 0).long().cumsum(1) == 1
    batch.add_to_advantages(0.3 * first)


class Likelihood(Term):
    """Adds the log-likelihood of all completions."""

    def on_head(self, batch, policy):
        def loss(hidden, head):
            value = linear_logprobs(hidden, head, batch.target).logprobs.sum() / batch.num_items
            return 0.1 * value, value_metric("likelihood", value, hidden.device)

        return loss


def agents(reports: bool = False, **changes: Any) -> Changes:
    """Return a policy that calls a tool as often as the prompt says; every fourth call fails."""

    def script(text: str, row: int) -> str:
        wanted, done = int(text.split("user\n")[1][0]), len(tools.results(text))
        if done == wanted:
            return "sum " + str(len(text) * row % 7)
        return tools.call("add", a=done, b=1) if done % 4 < 3 else tools.call("gone")

    tokenizer = tools.make_tool_tokenizer()
    rows = [{"prompt": tools.question(f"{n % 3}{n}"), "start": n} for n in range(8)]
    return {
        "model": tools.make_small_policy(len(tokenizer)),
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "rollout_engine": tools.ScriptedEngine(tokenizer, script, reports, by_row=True),
        "max_completion_length": 250,
    } | changes


class Counter:
    """Counts from its row's number; the start and the reward are also by chance."""

    def reset(self, start: int, **row: object) -> str:
        self._value = start + random.randrange(3)
        return f" at {self._value}"

    def add(self, a: int, b: int) -> int:
        """Count.

        Args:
            a: one number.
            b: the other.
        """
        self._value += a + b
        return self._value

    def get_reward(self) -> float:
        return self._value + random.random()


def completed(prompts, trainer):
    """Return completions by chance, half of whose tokens are somebody else's."""
    ids = [[3 + random.randrange(9), 4, 5, 1] for _ in prompts]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": ids,
        "logprobs": [[-1.0, None, -1.0, None]] * len(ids),
        "env_mask": [[1, 0, 1, 0]] * len(ids),
        "luck": [random.random() for _ in ids],
    }


def sampled(prompts, trainer):
    """Return completions of the engine, in two turns of which the second is somebody else's."""
    ids = trainer.processing_class(prompts)["input_ids"]
    completions = trainer.rollouts.generate(ids)
    return {
        "prompt_ids": ids,
        "completion_ids": [[*own[:3], 4] for own in completions.token_ids],
        "logprobs": [[*own[:3], None] for own in completions.logprobs],
        "env_mask": [[1] * len(own[:3]) + [0] for own in completions.token_ids],
        "turns": [2] * len(prompts),
    }


def encoded(picture) -> bytes:
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def images(bad: int = 0, **changes: Any) -> Changes:
    """Return questions with an image; those of the last ``bad`` rows cannot be read."""
    asked = [{"role": "user", "content": "bright?"}]
    found = [encoded(vision.picture(30 * n)) for n in range(7)]
    found[7 - bad :] = [b"none"] * bad
    rows = Dataset.from_dict({"prompt": [asked] * 7, "image": [{"bytes": one} for one in found]})
    return {
        "model": vision.tiny_model("llava"),
        "train_dataset": rows,
        "eval_dataset": rows.select(range(2)),
        "processing_class": vision.tiny_processor("llava"),
    } | changes


def taught(kind: str, **changes: Any) -> Changes:
    """Return a teacher whose tokens, or whole distributions, the policy learns from."""
    return {"teacher": make_policy(make_tokenizer(), seed=5), "distillation": kind} | changes


OVERLAP = {"generation_batches_ahead": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
FILTERS = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8}
SYNCED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3}
BEST = {"metric_for_best_model": "eval_reward", "greater_is_better": True}

FEATURES: dict[str, Changes | Callable[[], Changes]] = {
    # which part of what is taken next: step 4 is in the middle of it
    "nothing": {},
    "iterations": {"num_iterations": 3, "logging_steps": 3},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "beta": 0.1},
    "a long generation": {"steps_per_generation": 3, "num_iterations": 2, "logging_steps": 3},
    "token budget": {
        "max_tokens_per_micro_batch": 14, "gradient_accumulation_steps": 2, "beta": 0.1,
        "steps_per_generation": 4, "num_iterations": 3, "logging_steps": 3,
    },
    "token budget across generations": {
        "max_tokens_per_micro_batch": 14, "gradient_accumulation_steps": 2,
        "steps_per_generation": 3, "use_adaptive_entropy": True, "entropy_target": 2.4,
    },
    "part of an epoch": {"generation_batch_size": 12, "num_generations": 4},
    "length in epochs": {"num_train_epochs": 7 / 4, "max_steps": -1, "generation_batch_size": 8},
    "a teacher's log-probabilities": lambda: taught("logprobs", steps_per_generation=3),
    "a teacher's distributions": lambda: taught("jsd", steps_per_generation=3),
    "columns and terms": {
        "columns": [first_token_counts], "terms": [Likelihood()], "num_iterations": 2,
    },
    "a mean over prompts": {"loss_aggregation": "prompt_mean", "steps_per_generation": 3},
    "another comparison": {"advantages": "reinforce_plus_plus"},
    "the dataset's order": {"shuffle_dataset": False},
    "streamed rows": stream,
    "streamed rows, replaced": lambda: stream(dynamic_sampling=True, num_iterations=2),
    "mixed streams": mixed,
    "dynamic sampling": {"dynamic_sampling": True, "max_resampling_rounds": 3, "logging_steps": 3},
    "curriculum": {"dynamic_prompts_fn": hint, "num_iterations": 4},
    "curriculum, replaced": {"dynamic_prompts_fn": hint, "dynamic_sampling": True},
    # what generates
    "sampling mask": FILTERS | {"use_sampling_mask": True, "beta": 0.1, "num_iterations": 2},
    "rollout correction": lambda: engine(noise=0.2, vllm_importance_sampling_mode="token_truncate"),
    "an adapter that is sent alone": lambda: engine(
        takes_adapter=True, **adapter(target_modules=["q_proj"]), **EVALUATED
    ),
    "overlap, an adapter alone": lambda: engine(
        takes_adapter=True, **adapter(target_modules=["q_proj"]), **OVERLAP
    ),
    "overlap": lambda: engine(**OVERLAP),
    "overlap, iterated": lambda: engine(**OVERLAP, num_iterations=2, logging_steps=3),
    "overlap, replaced": lambda: engine(**OVERLAP, dynamic_sampling=True),
    "overlap, evaluated": lambda: engine(**OVERLAP, **EVALUATED),
    "overlap, streamed": lambda: engine(**OVERLAP, **stream()),
    "three batches ahead": lambda: engine(generation_batches_ahead=3, **EVALUATED),
    "two ahead, streamed, replaced": lambda: engine(
        generation_batches_ahead=2, **stream(dynamic_sampling=True)
    ),
    "overlap, masked": lambda: engine(
        masks=True, **OVERLAP, use_sampling_mask=True, top_k=5, steps_per_generation=2
    ),
    "tools": lambda: agents(tools=[tools.add], num_iterations=3, logging_steps=3),
    "tools, ahead": lambda: agents(tools=[tools.add], generation_batches_ahead=2, reports=True),
    "environments": lambda: agents(environment_factory=Counter, reward_funcs=None),
    "a function that completes, ahead": lambda: engine(**OVERLAP, rollout_func=sampled),
    "a function that completes, a reward that logs": {
        "rollout_func": completed, "reward_funcs": talking, "num_iterations": 2, "logging_steps": 3,
    },
    "images": lambda: images(num_iterations=2, beta=0.1),
    "images, some skipped": lambda: images(bad=2, on_bad_image="skip"),
    # rewards, the loss and its schedules
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 2.4, "logging_steps": 3},
    "mixture of experts": experts,
    "routing replay": lambda: replayed(num_iterations=2, beta=0.1, packing="packed"),
    "routing replay, overlap": lambda: replayed(**OVERLAP),
    "bounded backward": {"backward": "sparse"},
    "packed rows": {"packing": "packed", "num_iterations": 2, "beta": 0.1},
    # what else moves
    "synced reference": SYNCED,
    "decay": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
    "plateau": EVALUATED | BEST | {"lr_scheduler_type": "reduce_lr_on_plateau"},
    "adafactor": {"optim": "adafactor"},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "a class of optimizer": {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 1e-2})},
    "8-bit states": {"optim": "adamw_8bit"},
    "8-bit states of torchao": {"optim": "adamw_torch_8bit"},
    "bf16 weights, rounded at random": lambda: rounded(optim="adamw_torch_4bit"),
    "bf16": {"bf16": True},
    "dropout": lambda: dropout(gradient_checkpointing=True, num_iterations=2),
    "noise": {"neftune_noise_alpha": 5.0},
    "evaluation": EVALUATED,
    "the best model": EVALUATED | BEST | {"eval_steps": 1, "load_best_model_at_end": True},
    "patience": lambda: {
        **EVALUATED, **BEST, "eval_steps": 1, "callbacks": [EarlyStoppingCallback(99)],
        "restore_callback_states_from_checkpoint": True, "reward_funcs": alike,
    },
    "counted tokens": {"include_num_input_tokens_seen": True, "log_unique_prompts": True},
    # adapters
    "adapter": adapter,
    "adapter with dropout": lambda: adapter(lora_dropout=0.3, target_modules=["q_proj"], beta=0.1),
    "pissa": lambda: adapter(init_lora_weights="pissa", beta=0.1),
    "dora": lambda: adapter(use_dora=True, target_modules=["q_proj"], beta=0.1),
    "adapter, whole head": lambda: adapter(target_modules=".*q_proj", modules_to_save=["lm_head"]),
    "a trained adapter": lambda: adapter(trained=True, beta=0.1),
    "single tokens": lambda: adapter(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3], "lm_head": [3, 7]}
    ),
    "single tokens, tied": lambda: tied_adapter(trainable_token_indices=[3, 7], beta=0.1),
    "a tied head": lambda: tied_adapter(modules_to_save=["lm_head"], ensure_weight_tying=True),
}  # fmt: skip
