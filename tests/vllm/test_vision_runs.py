"""The trainer with images: vLLM sees what the policy is trained on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.data import encode_prompts, model_inputs, with_images
from tests.support.vision import picture, tiny_model, tiny_processor
from tests.vllm.vllm_helpers import CLOSE, ENGINE, difference, make_config, serving

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

    def seen(prompt: int, length: int) -> dict[str, Any]:
        return model_inputs([images[prompt]], [length], length, torch.device("cpu"))

    never = trainer.rollouts.sampling.suppressed
    return difference(trainer.model, ids, found, SETTINGS["temperature"], never, seen)


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
    with serving(tmp_path, tiny_model(family), tiny_processor(family)) as server:
        args = make_config(str(tmp_path / "out"), vllm_server_port=server.port, **SETTINGS)
        check(family, args)
