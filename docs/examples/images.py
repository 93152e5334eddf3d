"""Images: a vision-language model with random weights learns which half of a picture is brighter.

The reward only says whether the word was correct; out/images/report.html shows pictures and words
over the run.
"""

from __future__ import annotations

import random

import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from grpo_trainer import GRPOConfig, GRPOTrainer

WORDS = ["<pad>", "<end>", "<image>", "<user>", "<assistant>", "brighter?", "left", "right", "top"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZE, PATCH, STEPS = 16, 4, 120  # pixels, pixels, optimizer steps


def picture(rng: random.Random) -> tuple[Image.Image, str]:
    """Return a picture with two gray halves, and which half is brighter."""
    dark, bright = rng.randrange(0, 96), rng.randrange(160, 256)
    answer = rng.choice(["left", "right"])
    left, right = (bright, dark) if answer == "left" else (dark, bright)
    image = Image.new("RGB", (SIZE, SIZE), (left,) * 3)
    image.paste((right,) * 3, (SIZE // 2, 0, SIZE, SIZE))
    return image, answer


def right_word(completions, answer, **columns):
    """Return 1 for each completion with the right word, else 0."""
    words = [completion[0]["content"].strip() for completion in completions]
    return [float(word == wanted) for word, wanted in zip(words, answer, strict=True)]


def make_processor() -> LlavaProcessor:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Split(Regex(r"<\w+>|[\w?]+"), behavior="isolated")
    words.add_special_tokens(["<pad>", "<end>", "<image>"])
    return LlavaProcessor(
        CLIPImageProcessorPil(
            size={"height": SIZE, "width": SIZE}, crop_size={"height": SIZE, "width": SIZE}
        ),
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_policy() -> LlavaForConditionalGeneration:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    ends = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**sizes, image_size=SIZE, patch_size=PATCH),
            text_config=LlamaConfig(
                **sizes, **ends, vocab_size=len(WORDS), max_position_embeddings=64,
                initializer_range=0.1, tie_word_embeddings=False,
            ),
            image_token_index=2,
            vision_feature_select_strategy="default",
            image_seq_length=(SIZE // PATCH) ** 2,
            **ends,
        )
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    rng = random.Random(0)
    images, answers = zip(*(picture(rng) for _ in range(256)), strict=True)
    asked = [{"role": "user", "content": "brighter?"}]
    trainer = GRPOTrainer(
        model=make_policy(),
        reward_funcs=right_word,
        args=GRPOConfig(
            output_dir="out/images",
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=2,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            entropy_coef=0.1,  # with less, some seeds converge to one word for all pictures
            max_steps=STEPS,
            logging_steps=10,
            log_completions=True,
            num_completions_to_print=0,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [asked] * len(images), "image": list(images), "answer": list(answers)}
        ),
        processing_class=make_processor(),
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"final reward {rewards[-1]:.3f}, at first {rewards[0]:.3f}")


if __name__ == "__main__":
    main()
