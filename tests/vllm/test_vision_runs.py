"""The trainer with images: vLLM sees what the policy is trained on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.data import encode_prompts, model_inputs, with_images
from tests.support.vision import picture, tiny_model, tiny_processor
from tests.vllm.vllm_helpers import CLOSE, ENGINE, Server, free_port, make_config

SETTINGS = {"max_completion_length": 4, "learning_rate": 1e-2, "temperature": 0.8}


def rows() -> Dataset:
    """Return questions with two images, one or none."""
    images = [[picture(40 * n), picture(9)] if n % 3 == 0 else [picture(40 * n)] for n in range(6)]
    images += [[], []]
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "?"}]] * len(images), "images": images}
    )


def drawn(prompts, completion_ids, **columns) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def apart(trainer: GRPOTrainer) -> float:
    """Return the largest difference between log-probabilities of the engine and of the policy."""
    prompts = [with_images(row) for row in rows() for _ in range(2)]
    encoded = encode_prompts(prompts, trainer.processing_class)
    ids, images = map(list, zip(*encoded, strict=True))
    found = trainer.rollouts.generate(ids, images=images)
    never = sorted(trainer.rollouts.sampling.suppressed)
    largest = 0.0
    for prompt, image, row, logprobs in zip(ids, images, *found[:2], strict=True):
        whole = torch.tensor([prompt + row])
        length = whole.shape[1]
        more = model_inputs([image], [length], length, torch.device("cpu"))
        with torch.no_grad():
            logits = trainer.model(input_ids=whole, **more).logits[0, len(prompt) - 1 : -1]
        logits[:, never] = -torch.inf
        own = (logits.double() / 0.8).log_softmax(-1)[torch.arange(len(row)), row]
        largest = max(largest, (own - torch.tensor(logprobs)).abs().max().item())
    return largest


def check(family: str, args: GRPOConfig) -> None:
    """Compare before the first step and after the last."""
    trainer = GRPOTrainer(
        tiny_model(family), drawn, args, rows(), processing_class=tiny_processor(family)
    )
    trainer.model.eval()
    try:
        before = apart(trainer)
        trainer.train()
        assert max(before, apart(trainer)) < CLOSE
    finally:
        trainer.rollouts.close()


# vLLM's code of the others imports torchvision, which this environment has no build of
FAMILIES = [
    pytest.param(
        family,
        marks=pytest.mark.skipif(
            family != "idefics3" and find_spec("torchvision") is None,
            reason=f"NOT TESTED: {family}, whose code in vLLM needs torchvision",
        ),
    )
    for family in ("idefics3", "llava", "gemma3")
]


@pytest.mark.parametrize("family", FAMILIES)
def test_colocated(family: str, make_args) -> None:
    check(family, make_args(vllm_engine_kwargs=ENGINE | {"max_model_len": 256}, **SETTINGS))


@pytest.mark.parametrize("family", FAMILIES)
def test_by_a_server(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model(family).save_pretrained(folder)
    tiny_processor(family).save_pretrained(folder)
    server = Server(folder, free_port(), tmp_path / "log.txt")
    try:
        args = make_config(str(tmp_path / "out"), vllm_server_port=server.port, **SETTINGS)
        check(family, args)
    except Exception as error:
        raise AssertionError(server.said()) from error
    finally:
        server.kill()
