"""vLLM with a model that sees: images next to texts and token ids, and the trainer with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, ProcessorMixin

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.data import encode_prompts, model_inputs, open_images
from grpo_trainer.engines import Completions, policy_weights
from grpo_trainer.vllm import ServerError
from tests.support.vision import CHARACTERS, IMAGE, picture, tiny_model, tiny_processor, user
from tests.vllm.vllm_helpers import CLOSE, ENGINE, change, difference, serving

# vLLM's code of llava and gemma3 imports torchvision, which this environment has no build of
FAMILY = "idefics3"

RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))
WORDS = 3 + len(CHARACTERS)  # tokens that are no placeholders, which the model could not read
DRAWN = {"n": 2, "max_tokens": 4, "seed": 3, "allowed_token_ids": list(range(WORDS))}


@pytest.fixture(scope="module")
def processor() -> ProcessorMixin:
    return tiny_processor(FAMILY)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(FAMILY).eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory, model, processor):
    with serving(tmp_path_factory.mktemp("seeing"), model, processor) as server:
        yield server


@pytest.fixture
def client(server):
    client = server.connected()
    yield client
    client.close()


def difference_for(client, model, processor, text: str, image) -> float:
    """Return the largest difference to the model's own log-probabilities, in nats."""
    answer = client.generate([text], images=[image], **DRAWN)
    shown = processor(text=text, images=[image], return_tensors="pt")
    [prompt] = shown["input_ids"].tolist()
    assert answer["prompt_ids"] == [prompt]
    found = Completions(answer["completion_ids"], answer["logprobs"])
    never = range(WORDS, model.config.text_config.vocab_size)
    seen = {"pixel_values": shown["pixel_values"]}
    return difference(model, [prompt] * 2, found, never=never, seen=lambda *_: seen)


def as_text(processor, talk) -> str:
    return processor.apply_chat_template(talk, add_generation_prompt=True)


def test_the_model_sees_them(client, model, processor):
    text = as_text(processor, user("1", RED, "2"))
    for image in (RED, BLUE):
        assert difference_for(client, model, processor, text, image) < CLOSE
    answer = client.generate([text], images=[BLUE], **DRAWN)
    ids = processor.tokenizer(text)["input_ids"]
    assert client.generate([ids], images=[[BLUE]], **DRAWN) == answer


def test_prompts_with_and_without(client, processor):
    texts = [f"{IMAGE}{IMAGE}=", "12="]
    answer = client.generate(texts, images=[[RED, BLUE], None], top_k=3, logprobs=3, **DRAWN)
    both = processor(text=texts[0], images=[[RED, BLUE]])["input_ids"][0]
    assert answer["prompt_ids"] == [both, processor.tokenizer(texts[1])["input_ids"]]
    assert all(len(left) == 3 for row in answer["sampling_mask"] for left in row)
    with pytest.raises(ServerError, match="Failed to apply prompt replacement"):
        client.generate(["12="], images=[RED])


def test_new_weights_change_what_is_seen(client, model, processor, tmp_path):
    client.init_communicator("cpu", folder=tmp_path)
    shown = (client, model, processor, f"1{IMAGE}2=", RED)
    change(model)
    assert difference_for(*shown) > 0.01
    client.update_weights(lambda: policy_weights(model))
    assert difference_for(*shown) < CLOSE


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


def test_training_with_an_engine_in_this_process(make_args) -> None:
    check(make_args(vllm_engine_kwargs=ENGINE | {"max_model_len": 256}, **SETTINGS))


def test_training_with_a_server(server, make_args) -> None:
    check(make_args(vllm_server_port=server.port, **SETTINGS))
