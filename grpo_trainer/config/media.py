"""The fields of GRPOConfig for the images of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import TrainingArguments

from grpo_trainer.config.checks import FLAG, check_choice, setting

BAD_IMAGES = ("error", "skip")


@dataclass
class MediaFields:
    """Which images rows may name, and what becomes of a row whose images cannot be read."""

    allow_remote_images: bool | None = setting(
        None,
        "Whether rows may name images by URLs. Default: yes, but not where grpo-train loads a "
        "dataset of the hub.",
        **FLAG,
    )
    allowed_media_path: str | None = setting(
        None,
        "Folder whose files rows may name as images. Default: any file, but where grpo-train loads "
        "a dataset of the hub only the files that came with it.",
    )
    on_bad_image: str = setting(
        "error",
        "What a training row does whose images cannot be read: error, or skip, which logs it and "
        "takes the next row.",
    )


def check_media(args: TrainingArguments) -> None:
    """Raise ValueError unless there is such a folder, and rows can be skipped."""
    path = args.allowed_media_path
    if path is not None and not (isinstance(path, str) and Path(path).is_dir()):
        raise ValueError(f"allowed_media_path: expected a folder, got {path!r}")
    check_choice("on_bad_image", args.on_bad_image, BAD_IMAGES)
    if args.on_bad_image == "skip" and args.overlap_generation:
        raise ValueError(
            "on_bad_image: expected error with overlap_generation, which draws the rows of a "
            "checkpoint's completions once more and has to find the same ones, got skip"
        )
