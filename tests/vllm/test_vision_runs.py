"""The trainer with images: vLLM sees what the policy is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.data import encode_prompts, model_inputs, open_images
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
    prompts = [open_images(row)["prompt"] for row in rows() for _ in range(2)]
    encoded = encode_prompts(prompts, trainer.processing_class)
    ids, images = map(list, zip(*encoded, strict=True))
    found = trainer.rollouts.generate(ids, images=images)

    def seen(prompt: int, length: int) -> dict[str, Any]:
        return model_inputs([images[prompt]], [length], length, torch.device("cpu"))

    never = trainer.rollouts.sampling.suppressed
    return difference(trainer.model, ids, found, SETTINGS["temperature"], never, seen)


def check(args: GRPOConfig) -> None:
    """Compare before the first step and after the last."""
    trainer = GRPOTrainer(
        tiny_model(FAMILY), drawn, args, rows(), processing_class=tiny_processor(FAMILY)
    )
    trainer.model.eval()
    try:
        before = apart(trainer)
        trainer.train()
        assert max(before, apart(trainer)) < CLOSE
    finally:
        trainer.rollouts.close()


# vLLM's code of llava and gemma3 imports torchvision, which this environment has no build of
FAMILY = "idefics3"


def test_colocated(make_args) -> None:
    check(make_args(vllm_engine_kwargs=ENGINE | {"max_model_len": 256}, **SETTINGS))


def test_by_a_server(tmp_path: Path) -> None:
    with serving(tmp_path, tiny_model(FAMILY), tiny_processor(FAMILY)) as server:
        args = make_config(str(tmp_path / "out"), vllm_server_port=server.port, **SETTINGS)
        check(args)
