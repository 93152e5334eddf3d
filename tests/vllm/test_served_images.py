"""A vLLM server whose model sees: images beside texts, token ids and messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from grpo_trainer import VLLMClient
from grpo_trainer.rollout import ServerError
from tests.vllm.vllm_helpers import CLOSE, START, Server, change, free_port

PLACEHOLDER = "<image>"
SPECIAL = [PLACEHOLDER, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<image>' }}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
RED, BLUE = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
WORDS = 14  # tokens that are no placeholders, which the model could not read
DRAWN = {"n": 2, "max_tokens": 4, "seed": 3, "allowed_token_ids": list(range(WORDS))}


@pytest.fixture(scope="module")
def processor(tokenizer) -> Idefics3Processor:
    seeing = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token, additional_special_tokens=SPECIAL,
    )  # fmt: skip
    sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, **sizes)
    return Idefics3Processor(images, seeing, image_seq_len=4, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model(processor) -> Idefics3ForConditionalGeneration:
    tokenizer = processor.tokenizer
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128,
        "bos_token_id": None, "initializer_range": 0.2, **ends,
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "initializer_range": 0.2,
    }  # fmt: skip
    image = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=image, scale_factor=2,
        tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    return Idefics3ForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory, model, processor):
    folder: Path = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    server = Server(folder / "model", free_port(), folder / "log.txt")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(server):
    try:
        client = VLLMClient(server_port=server.port, connection_timeout=START)
    except ServerError as error:
        raise AssertionError(server.said()) from error
    yield client
    client.close()


def apart(answer, model, processor, text: str, image: Image.Image) -> float:
    """Return the largest difference to the model's own log-probabilities, in nats."""
    seen = processor(text=text, images=[image], return_tensors="pt")
    [prompt] = seen["input_ids"].tolist()
    assert answer["prompt_ids"] == [prompt]
    largest = 0.0
    for ids, logprobs in zip(answer["completion_ids"], answer["logprobs"], strict=True):
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([prompt + ids]), pixel_values=seen["pixel_values"]
            ).logits[0, len(prompt) - 1 : -1]
        own = logits[:, :WORDS].double().log_softmax(-1)[torch.arange(len(ids)), ids]
        largest = max(largest, (own - torch.tensor(logprobs)).abs().max().item())
    return largest


def test_the_model_sees_them(client, model, processor):
    text = f"1{PLACEHOLDER}2="
    for image in (RED, BLUE):
        answer = client.generate([text], images=[image], **DRAWN)
        assert apart(answer, model, processor, text, image) < CLOSE
    ids = processor.tokenizer(text)["input_ids"]
    assert client.generate([ids], images=[[BLUE]], **DRAWN) == answer
    parts = [{"type": "text", "text": "1"}, {"type": "image"}, {"type": "text", "text": "2"}]
    talk = [{"role": "user", "content": parts}]
    assert client.chat([talk], images=[BLUE], **DRAWN) == answer
    placed = [{"role": "user", "content": [parts[0], parts[1] | {"image": BLUE}, parts[2]]}]
    assert client.chat([placed], **DRAWN) == answer


def test_prompts_with_and_without(client, processor):
    texts = [f"{PLACEHOLDER}{PLACEHOLDER}=", "12="]
    answer = client.generate(texts, images=[[RED, BLUE], None], top_k=3, logprobs=3, **DRAWN)
    both = processor(text=texts[0], images=[[RED, BLUE]])["input_ids"][0]
    assert answer["prompt_ids"] == [both, processor.tokenizer(texts[1])["input_ids"]]
    assert len(answer["completion_ids"]) == 4
    assert all(len(left) == 3 for row in answer["sampling_mask"] for left in row)


def test_messages_without_images(client, processor):
    talk = [{"role": "user", "content": "12"}]
    answer = client.chat([talk, talk], **DRAWN)
    ids = processor.tokenizer("12=")["input_ids"]
    alone = client.generate([ids], **DRAWN)
    assert answer["prompt_ids"] == [ids] * 2
    assert answer["completion_ids"] == alone["completion_ids"] * 2
    template = "{{ messages[0]['content'] }}9"
    with pytest.raises(ServerError, match="chat template"):  # not trusted by default
        client.chat([talk], chat_template=template)


def test_an_image_without_its_place(client):
    with pytest.raises(ServerError, match="Failed to apply prompt replacement"):
        client.generate(["12="], images=[RED])


def test_new_weights_change_what_is_seen(client, model, processor, tmp_path):
    client.init_communicator("cpu", folder=tmp_path)
    text = f"1{PLACEHOLDER}2="
    change(model)
    assert apart(client.generate([text], images=[RED], **DRAWN), model, processor, text, RED) > 0.01
    client.update_model_params(model)
    assert (
        apart(client.generate([text], images=[RED], **DRAWN), model, processor, text, RED) < CLOSE
    )
    change(model)
    for name, value in model.named_parameters():
        client.update_named_param(name, value.data)
    client.reset_prefix_cache()
    assert (
        apart(client.generate([text], images=[RED], **DRAWN), model, processor, text, RED) < CLOSE
    )
