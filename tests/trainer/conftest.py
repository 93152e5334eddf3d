"""A tiny policy, a tokenizer and a dataset, made on the spot."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.demo.task import digits_reversal_reward
from tests.support.vllm_stub import StubServer
from tests.trainer import features
from tests.trainer.features import SETTINGS

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def uncompiled():
    """Run what is compiled as it is written: torchao's steps for each shape would take a minute."""
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
        usual = {"output_dir": str(tmp_path / "out"), "num_generations": 4}
        return GRPOConfig(**(SETTINGS | usual | changes))

    return make


@pytest.fixture
def make_trainer(tmp_path, policy, tokenizer, dataset):
    """Make a trainer; ``changes`` are of its own arguments, and of those of its config."""

    def make(
        reward_funcs=digits_reversal_reward, model=None, engine=None, kind=GRPOTrainer, **changes
    ) -> GRPOTrainer:
        usual = {
            "reward_funcs": reward_funcs,
            "model": policy if model is None else model,
            "train_dataset": dataset,
            "eval_dataset": dataset.select(range(4)),
            "processing_class": tokenizer,
            "rollout_engine": engine,
            "num_generations": 4,
        }
        return features.make_trainer(tmp_path / "out", usual | changes, kind)

    return make
