"""Tiny vision-language models of random weights, each with its own processor."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from grpo_trainer.policy import loading_whole

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
PAD, BOS, END, START, IMAGE, VIDEO, BEGIN, STOP = (
    "<pad>", "<bos>", "<end>", "<start>", "<image>", "<video>", "<begin>", "<stop>",
)  # fmt: skip
# what Idefics writes around images
IDEFICS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
SPECIAL = (PAD, BOS, END, START, IMAGE, VIDEO, BEGIN, STOP, *IDEFICS)
WORDS = [PAD, BOS, END, *CHARACTERS, *SPECIAL[3:]]
IDS = {word: index for index, word in enumerate(WORDS)}
# what a template writes for an image
PLACES = {"gemma3": BEGIN, "llava": IMAGE, "idefics3": IMAGE}
QWENS = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
FAMILIES = (*PLACES, *QWENS)

TEXT = dict(
    vocab_size=len(WORDS), hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=32,
    max_position_embeddings=256, pad_token_id=IDS[PAD], bos_token_id=IDS[BOS],
    eos_token_id=IDS[END], initializer_range=0.1,
)  # fmt: skip
TOWER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    image_size=16, patch_size=4,
)  # fmt: skip
QWEN = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, out_hidden_size=32)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}


def picture(value: int | tuple[int, int, int], size: int = 16) -> Image.Image:
    """Return an image of one colour."""
    colour = (value,) * 3 if isinstance(value, int) else value
    return Image.new("RGB", (size, size), colour)


def user(*parts: Any) -> list[dict[str, Any]]:
    """Return a question of texts and images."""
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image", "image": part}
                for part in parts
            ],
        }
    ]


def tiny_processor(family: str) -> ProcessorMixin:
    if family == "gemma3":
        return Gemma3Processor(
            Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
            _tokenizer(boi_token=BEGIN, eoi_token=STOP, image_token=IMAGE),
            chat_template=_template(BEGIN),
            image_seq_length=4,
        )
    if family == "llava":
        return LlavaProcessor(
            CLIPImageProcessorPil(
                size={"height": 16, "width": 16}, crop_size={"height": 16, "width": 16}
            ),
            _tokenizer(image_token=IMAGE),
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=_template(IMAGE),
        )
    if family == "idefics3":
        return Idefics3Processor(
            Idefics3ImageProcessorPil(
                do_image_splitting=False,
                size={"longest_edge": 16},
                max_image_size={"longest_edge": 16},
            ),
            _tokenizer(),
            image_seq_len=4,
            chat_template=_template(IMAGE),
        )
    patch = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}
    tokenizer = _tokenizer(
        image_token=IMAGE, video_token=VIDEO, vision_bos_token=BEGIN, vision_eos_token=STOP
    )
    images = Qwen2VLImageProcessorPil(**patch)
    return _without_videos(QWENS[family])(
        images, tokenizer, None, chat_template=_template(BEGIN + IMAGE + STOP)
    )


def tiny_model(family: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**_config(family) | settings)
    with loading_whole():  # ZeRO-3 would draw each process's part by itself
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    if family == "gemma3":  # transformers leaves it at 0: images would have no effect
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def _config(family: str) -> dict[str, Any]:
    if family == "gemma3":
        text = {**TEXT, "sliding_window": 64, "query_pre_attn_scalar": 32}
        return {
            "text_config": text,
            "vision_config": {**TOWER, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": IDS[IMAGE],
            "boi_token_index": IDS[BEGIN],
            "eoi_token_index": IDS[STOP],
        }
    if family == "llava":
        return {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": IDS[IMAGE],
            "vision_feature_select_strategy": "default",
            "image_seq_length": 16,
        }
    if family == "idefics3":
        return {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": TOWER,
            "image_token_id": IDS[IMAGE],
            "scale_factor": 2,
            "tie_word_embeddings": False,
            "pad_token_id": IDS[PAD],
        }
    vision = {
        "qwen2_5_vl": {**QWEN, "hidden_size": 32, "intermediate_size": 48, "window_size": 16,
                       "fullatt_block_indexes": [1]},
        "qwen3_vl": {**QWEN, "hidden_size": 32, "intermediate_size": 48,
                     "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    }[family]  # fmt: skip
    rope = {**ROPE, "mrope_interleaved": True} if family == "qwen3_vl" else ROPE
    return {
        "text_config": {**TEXT, "rope_parameters": rope},
        "vision_config": vision,
        "image_token_id": IDS[IMAGE],
        "video_token_id": IDS[VIDEO],
        "vision_start_token_id": IDS[BEGIN],
        "vision_end_token_id": IDS[STOP],
    }


def _tokenizer(**tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(IDS, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[START, IMAGE, VIDEO, BEGIN, STOP, *IDEFICS],
        extra_special_tokens=tokens,
    )


def _template(place: str) -> str:
    return (
        BOS + "{% for message in messages %}" + START + "{{ message.role }}\n"
        "{% for part in message.content %}"
        "{% if part.type == 'image' %}" + place + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}" + END + "{% endfor %}"
        "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
    )


def _without_videos(kind: type) -> type:
    """Return a processor that needs no torchvision, as that of videos does."""

    class WithoutVideos(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name == "video_processor":
                return None
            return super().check_argument_for_proper_class(name, argument)

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos
