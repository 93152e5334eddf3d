"""A tiny policy, a tokenizer and a dataset, made on the spot."""

from __future__ import annotations

import inspect

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.demo.task import digits_reversal_reward
from tests.support.vllm_stub import StubServer

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def uncompiled():
    """Run torchao's steps as they are written: to compile them for each shape takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def stub(monkeypatch):
    """Return a stand-in for a vLLM server without a key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = StubServer()
    yield server
    server.close()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def chat_tokenizer(tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def policy(tokenizer) -> Qwen3ForCausalLM:
    return make_policy(tokenizer, seed=0)


@pytest.fixture
def dataset() -> Dataset:
    numbers = [f"{i * 37 % 1000:03d}" for i in range(24)]
    rows = [{"prompt": f"{n}=", "answer": n[::-1]} for n in numbers]
    # prompts of different lengths, so that padding matters
    return Dataset.from_list([*rows, {"prompt": "1=", "answer": "1"}])


@pytest.fixture
def chat_dataset(dataset, chat_tokenizer) -> Dataset:
    return dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"][:-1]}]})


@pytest.fixture
def make_args(tmp_path):
    def make(**changes) -> GRPOConfig:
        settings = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "num_generations": 4,
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
        return GRPOConfig(**(settings | changes))

    return make


@pytest.fixture
def make_trainer(make_args, policy, tokenizer, dataset):
    """Make a trainer; ``changes`` are of its own arguments, and of those of its config."""
    own = set(inspect.signature(GRPOTrainer).parameters)

    def make(
        reward_funcs=digits_reversal_reward, model=None, engine=None, kind=GRPOTrainer, **changes
    ) -> GRPOTrainer:
        given = {
            "train_dataset": dataset,
            "eval_dataset": dataset.select(range(4)),
            "processing_class": tokenizer,
            "rollout_engine": engine,
        }
        named = isinstance(changes.get("rollout_engine"), str)  # a field of the config, too
        taken = (own - {"rollout_engine"} if named else own) & changes.keys()
        given |= {name: changes.pop(name) for name in taken}
        given.setdefault("args", make_args(**changes))
        return kind(model if model is not None else policy, reward_funcs, **given)

    return make
