"""What the trainer refuses before it loads anything, and how it loads."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ProcessorMixin,
    TrainingArguments,
)

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import digits_reversal_reward

REWARD = digits_reversal_reward


class Processor(ProcessorMixin):
    """Of images and text."""

    def __init__(self) -> None: ...


@pytest.mark.parametrize(
    ("argument", "given", "message"),
    [
        ("args", {"output_dir": "out"}, "expected a grpo_trainer.GRPOConfig, got a builtins.dict"),
        ("args", TrainingArguments("out", use_cpu=True), "got a transformers.TrainingArguments"),
        ("processing_class", "gpt2", "a tokenizer or a processor, got a builtins.str"),
        ("processing_class", Processor(), "a processor with a tokenizer, got a Processor"),
        ("train_dataset", None, "prompts to train on .* got None"),
    ],
)
def test_wrong_kinds(policy, make_args, tokenizer, dataset, argument, given, message):
    own = {"args": make_args(), "train_dataset": dataset, "processing_class": tokenizer}
    with pytest.raises(ValueError, match=f"{argument}: .*{message}"):
        GRPOTrainer(policy, REWARD, **own | {argument: given}).train()


def messages(*parts: dict[str, str]) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


NO_PROCESSOR = "train_dataset: expected no images without a processor as processing_class, got"
TEXT, IMAGE = {"type": "text", "text": "1="}, {"type": "image", "text": ""}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1=", "image": "a"}] * 2, NO_PROCESSOR),
        ([{"prompt": "1=", "images": ["a"]}] * 2, NO_PROCESSOR),
        ([{"prompt": messages(TEXT, IMAGE)}] * 2, NO_PROCESSOR),
        (
            [{"prompt": messages(TEXT)}, {"prompt": messages(IMAGE)}],
            "images: expected 1, one for each place in the messages, got 0 in row 1",
        ),
    ],
)
def test_images_are_refused(make_trainer, chat_tokenizer, rows, message):
    chat_tokenizer.chat_template = "{{ messages[0]['content'][0]['text'] }}"
    with pytest.raises(ValueError, match=message):
        make_trainer(
            lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list(rows),
            shuffle_dataset=False,
            learning_rate=0.0,
        ).train()


def test_a_vision_language_model_trains_on_text(make_trainer, tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 2
    text = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    vision = CLIPVisionConfig(image_size=28, patch_size=14, **sizes)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))
    trainer = make_trainer(model=model, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["completions/mean_length"] >= 1


@pytest.mark.parametrize(
    "given",
    [
        {"torch_dtype": "bfloat16"},
        {"torch_dtype": torch.bfloat16, "dtype": "bfloat16"},
    ],
)
def test_the_old_name_of_dtype(make_args, dataset, tmp_path, given):
    write_policy(tmp_path / "model", seed=0)
    with pytest.warns(FutureWarning, match=r"model_init_kwargs\['torch_dtype'\]: Deprecated"):
        args = make_args(model_init_kwargs=given)
    assert args.model_init_kwargs.keys() == {"dtype"} and "torch_dtype" in given
    trainer = GRPOTrainer(str(tmp_path / "model"), REWARD, args, dataset)
    assert trainer.model.dtype == torch.bfloat16
