"""What a run may have: the one builder of trainers, and the parts that the tables are made of.

A feature is settings of GRPOConfig and arguments of GRPOTrainer, or a function that makes them anew
for each run where they have a state of their own.
"""

from __future__ import annotations

import inspect
import io
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, interleave_datasets
from peft import LoraConfig
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from grpo_kernels import linear_logprobs
from grpo_trainer import GRPOConfig, GRPOTrainer, Term
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.monitor import value_metric
from grpo_trainer.policy import loading_whole
from tests.support import tools, vision
from tests.support.placements import rank
from tests.support.trainer import BackgroundEngine, RoutedEngine, adapted

Changes = dict[str, Any]

SETTINGS: Changes = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_completion_length": 4,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "write_report": False,
}
STEPS, SAVED = 7, 4  # of a run, and the step that it is resumed from
RESUMABLE: Changes = {
    "max_steps": STEPS,
    "save_steps": SAVED,
    "save_strategy": "steps",
    "num_generations": 2,
    "lr_scheduler_type": "constant",
    "log_completions": True,
    "num_completions_to_print": 0,
}
_OWN = set(inspect.signature(GRPOTrainer).parameters)


def make_trainer(
    folder: str | Path, changes: Changes, kind: type[GRPOTrainer] = GRPOTrainer
) -> GRPOTrainer:
    """Return a trainer of a tiny policy, with arguments of its own and of its config changed."""
    own = _OWN & changes.keys()
    if isinstance(changes.get("rollout_engine"), str):  # a field of the config, too
        own.remove("rollout_engine")
    settings = {name: value for name, value in changes.items() if name not in own}
    args = GRPOConfig(**{"output_dir": str(folder), **SETTINGS, **settings})
    arguments: Changes = {"args": args, "processing_class": make_tokenizer(), "model": policy}
    arguments |= {name: changes[name] for name in own}
    model = arguments["model"]
    if callable(model) and not isinstance(model, torch.nn.Module):
        arguments["model"] = model()  # after its config, under which ZeRO-3 makes it in shards
    return kind(**arguments)


def resumable(changes: Changes, folder: Path) -> GRPOTrainer:
    """Return a trainer on eleven prompts that saves a checkpoint on its way."""
    rows = prompts(11)
    usual = {"reward_funcs": noisy_reward, "train_dataset": rows, "eval_dataset": rows.take(2)}
    return make_trainer(folder, RESUMABLE | usual | changes)


def made(feature: Changes | Callable[[], Changes]) -> Changes:
    return feature() if callable(feature) else feature


def prompts(count: int) -> Dataset:
    return Dataset.from_list([{"prompt": f"{i}="} for i in range(count)])


# models


def policy() -> PreTrainedModel:
    return make_policy(make_tokenizer(), seed=0)


def tied_policy() -> PreTrainedModel:
    """Return a policy whose head has the weight of its embeddings."""
    model = policy()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def teacher(rows: int = 32) -> PreTrainedModel:
    """Return another policy whose head has more rows than there are tokens."""
    model = make_policy(make_tokenizer(), seed=5)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def mixture() -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=14, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, pad_token_id=1,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    with loading_whole():  # in shards, ZeRO-3 draws other random weights
        return AutoModelForCausalLM.from_config(config)


def with_trained_adapter(**lora: Any) -> PreTrainedModel:
    model = policy()
    torch.manual_seed(3)
    return adapted(model, **lora)


# features


def engine(
    group: int = 2,
    masks: bool = False,
    noise: float = 0.0,
    takes_adapter: bool = False,
    **changes: Any,
) -> Changes:
    """Return an engine with weights of its own."""
    made = BackgroundEngine(make_tokenizer(), policy().eval(), rank(), masks=masks, group=group)
    made.noise, made.takes_adapter = noise, takes_adapter
    return {"rollout_engine": made} | changes


def adapter(trained: bool = False, **changes: Any) -> Changes:
    """Return an adapter of the policy, a new one or one that was trained before."""
    names = LoraConfig.__dataclass_fields__.keys() & changes.keys()
    lora = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
    lora |= {"task_type": "CAUSAL_LM"} | {name: changes.pop(name) for name in names}
    if trained:
        return {"model": partial(with_trained_adapter, **lora)} | changes
    return {"peft_config": LoraConfig(**lora)} | changes


def replayed(group: int = 2, **changes: Any) -> Changes:
    """Return a mixture of experts, and an engine that reports which of them it chose."""
    engine = RoutedEngine(
        make_tokenizer(), layers=2, experts=4, chosen=2, process=rank(), group=group
    )
    routing = {"rollout_engine": engine, "use_rollout_routing_replay": True}
    return {"model": mixture, "router_aux_loss_coef": 0.5} | routing | changes


def dropout(**changes: Any) -> Changes:
    model = policy()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return {"model": model} | changes


def stream(count: int = 6, **changes: Any) -> Changes:
    rows = prompts(count).to_iterable_dataset()
    return {"train_dataset": rows.shuffle(7, buffer_size=4)} | changes


def mixed() -> Changes:
    """Return rows drawn by chance from two streams."""
    parts = [[{"prompt": f"{i}{end}="} for i in range(9)] for end in (1, 2)]
    streams = [Dataset.from_list(part).to_iterable_dataset() for part in parts]
    return {"train_dataset": interleave_datasets(streams, probabilities=[0.7, 0.3], seed=1)}


def agents(reports: bool = False, **changes: Any) -> Changes:
    """Return a policy that calls a tool as often as the prompt says; every fourth call fails."""

    def script(text: str, row: int) -> str:
        wanted, done = int(text.split("user\n")[1][0]), len(tools.results(text))
        mark = "abcd"[row % 4] if done == 0 else ""  # tells a group's completions apart
        if done == wanted:
            return f"{mark}sum {len(text) * (row % 4) % 7}"
        return mark + (tools.call("add", a=done, b=1) if done % 4 < 3 else tools.call("gone"))

    tokenizer = tools.make_tool_tokenizer()
    rows = [{"prompt": tools.question(f"{n % 3}{n}"), "start": n} for n in range(8)]
    return {
        "model": partial(tools.make_small_policy, len(tokenizer)),
        "train_dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:4]),
        "processing_class": tokenizer,
        "rollout_engine": tools.ScriptedEngine(tokenizer, script, reports, by_row=True),
        "max_completion_length": 250,
    } | changes


def images(family: str = "llava", count: int = 7, bad: int = 0, **changes: Any) -> Changes:
    """Return questions with an image; those of the last ``bad`` rows cannot be read."""
    asked = [{"role": "user", "content": "bright?"}]
    files = [encoded(vision.picture(210 // count * n)) for n in range(count - bad)] + [
        b"none"
    ] * bad
    column = [{"bytes": file} for file in files]
    rows = Dataset.from_dict({"prompt": [asked] * count, "image": column})
    return {
        "model": partial(vision.tiny_model, family),
        "train_dataset": rows,
        "eval_dataset": rows.take(2),
        "processing_class": vision.tiny_processor(family),
    } | changes


def encoded(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def taught(kind: str, **changes: Any) -> Changes:
    """Return a teacher whose tokens, or whole distributions, the policy learns from."""
    return {"teacher": teacher(), "distillation": kind} | changes


# functions of the user's


def noisy_reward(completion_ids, **kwargs):
    """Return rewards that depend on the states of both random generators."""
    noise = random.random() + np.random.random()
    return [noise * (len(ids) + ids[0] % 3 + ids[-1] % 5) for ids in completion_ids]


def alike(completions, **kwargs):
    """Return rewards whose mean is the same in each step."""
    return [float(row) for row, _ in enumerate(completions)]


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
    """Add to the advantage of each completion's first token, and set a column."""
    first = (batch.target >= 0).long().cumsum(1) == 1
    batch.mine = 0.3 * first
    batch.add_to_advantages(batch.mine)


class Likelihood(Term):
    """Adds the log-likelihood of all completions, and reads the column."""

    def on_head(self, batch, policy):
        assert batch.mine.shape == batch.target.shape

        def loss(hidden, head):
            value = linear_logprobs(hidden, head, batch.target).logprobs.sum() / batch.num_items
            return 0.1 * value, value_metric("likelihood", value, hidden.device)

        return loss


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
