"""A vLLM server whose model sees: images next to texts and token ids."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel, ProcessorMixin

from grpo_trainer.engines import Completions, policy_weights
from grpo_trainer.vllm import ServerError
from tests.support.vision import CHARACTERS, IMAGE, picture, tiny_model, tiny_processor, user
from tests.vllm.vllm_helpers import CLOSE, change, difference, serving

RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))
WORDS = 3 + len(CHARACTERS)  # tokens that are no placeholders, which the model could not read
DRAWN = {"n": 2, "max_tokens": 4, "seed": 3, "allowed_token_ids": list(range(WORDS))}


@pytest.fixture(scope="module")
def processor() -> ProcessorMixin:
    return tiny_processor("idefics3")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("idefics3").eval()


@pytest.fixture(scope="module")
def client(tmp_path_factory, model, processor):
    with serving(tmp_path_factory.mktemp("seeing"), model, processor) as server:
        client = server.connected()
        yield client
        client.close()


def apart(client, model, processor, text: str, image) -> float:
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
        assert apart(client, model, processor, text, image) < CLOSE
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
    assert apart(*shown) > 0.01
    client.update_weights(lambda: policy_weights(model))
    assert apart(*shown) < CLOSE
