"""Real vLLM, on whatever device there is: `make test-vllm` makes an environment that has it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
from accelerate import Accelerator  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from grpo_trainer.demo.policy import make_tokenizer  # noqa: E402
from grpo_trainer.engines import EngineContext, RolloutEngine, Sampler, Sampling  # noqa: E402
from grpo_trainer.vllm.engines import ColocatedVLLM, VLLMServer  # noqa: E402
from tests.vllm.vllm_helpers import (  # noqa: E402
    dequantized,
    layers_in_4_bits,
    make_config,
    make_model,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="no vLLM here; run `make test-vllm`"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def tied() -> bool:
    return True  # the head is a copy in vLLM, which goes stale unless it is sent as well


@pytest.fixture
def policy(tokenizer, tied) -> Qwen3ForCausalLM:
    return make_model(tokenizer, tied)


@pytest.fixture(scope="session")
def original(tmp_path_factory, tokenizer) -> str:
    """Return a folder of weights that 4 bits round."""
    folder = tmp_path_factory.mktemp("original")
    make_model(tokenizer, tied=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def rounded(original, tmp_path_factory, tokenizer) -> str:
    """Return a folder of weights in fp32 that are exact in 4 bits."""
    folder = str(tmp_path_factory.mktemp("rounded"))
    model = AutoModelForCausalLM.from_pretrained(original)
    for name, layer in layers_in_4_bits(original):
        model.get_submodule(name).weight.data = dequantized(layer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, layer in layers_in_4_bits(folder):
        assert dequantized(layer).equal(model.get_submodule(name).weight)
    return folder


@pytest.fixture
def dataset() -> Dataset:
    numbers = [f"{i * 37 % 1000:03d}" for i in range(24)]
    return Dataset.from_list([{"prompt": f"{n}=", "answer": n[::-1]} for n in numbers])


@pytest.fixture
def make_args(tmp_path):
    return partial(make_config, str(tmp_path / "out"))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[Any, RolloutEngine]]:
    """Keep the engines of a module up to its end: one that is closed takes along what others use.

    Tests share those that have a name.
    """
    made: dict[Any, RolloutEngine] = {}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture
def make_sampler(make_args, tokenizer, engines):
    """Make what samples by a policy as the trainer does, by an engine of its own or a shared one.

    A server's port among ``changes`` of the config makes it one by that server.
    """

    def make(policy, shared: str | None = None, **changes: Any) -> Sampler:
        args = make_args(**changes)
        context = EngineContext(
            policy=lambda: policy,
            processing_class=tokenizer,
            args=args,
            accelerator=Accelerator(cpu=args.use_cpu),
        )
        name = len(engines) if shared is None else shared
        if name not in engines:
            kind = VLLMServer if args.vllm_mode == "server" else ColocatedVLLM
            engines[name] = kind(context)
        sampling = Sampling(eos_token_ids=frozenset([tokenizer.eos_token_id]), max_tokens=8)
        return Sampler(engines[name], context, sampling, step=lambda: 0, name="vllm")

    return make
