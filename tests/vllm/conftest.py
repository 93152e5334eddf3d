"""Real vLLM, on whatever device there is: `make test-vllm` makes an environment that has it."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with other tests
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_API_KEY": "secret",  # of servers and clients
}
INSTALLED = importlib.util.find_spec("vllm") is not None
if INSTALLED:  # else this is collected among other tests, to which the settings would apply
    os.environ.update(SETTINGS)

import pytest  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM  # noqa: E402

from grpo_trainer.demo.policy import make_tokenizer  # noqa: E402
from tests.vllm.vllm_helpers import make_config, make_model  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="no vLLM here; run `make test-vllm`"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def policy(tokenizer, tied) -> Qwen3ForCausalLM:
    return make_model(tokenizer, tied)


@pytest.fixture
def dataset() -> Dataset:
    numbers = [f"{i * 37 % 1000:03d}" for i in range(24)]
    return Dataset.from_list([{"prompt": f"{n}=", "answer": n[::-1]} for n in numbers])


@pytest.fixture
def make_args(tmp_path):
    return partial(make_config, str(tmp_path / "out"))
