"""The fields of GRPOConfig for tools and for prompts that change during a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from grpo_trainer.config.checks import check_choice, check_number, setting

PROMPT_FORMS = ("samples", "groups")  # dynamic_prompts_fn has one entry for each of them


@dataclass
class ToolFields:
    """How long completions go on with tools, and where the next prompts come from."""

    max_tool_calling_iterations: int | None = setting(
        None,
        "How often a completion may call tools and go on with their answers. Default: until "
        "max_completion_length.",
    )
    tool_timeout: float | None = setting(
        60.0,
        "Seconds that a tool may take; then it answers with an error. Plain functions run in a "
        "thread of their own for that; null in the file: no limit, and no other thread.",
    )
    dynamic_prompts_fn: Callable[..., Any] | str | None = setting(
        None,
        "Import path of a function (prompts, completions, rewards, metas) that returns the "
        "prompts of the next generation batch, each text, messages, or None: the dataset's "
        "next.",
    )
    dynamic_prompts_form: str = setting(
        "samples",
        "What dynamic_prompts_fn is given and returns: samples (one entry per completion, with "
        "the dataset's prompt) or groups (one per prompt, with all its completions).",
    )


def check_tools(args: TrainingArguments) -> None:
    """Raise ValueError unless they are in range, and possible with the rest."""
    if args.tool_timeout is not None:
        check_number("tool_timeout", args.tool_timeout, 0, above=True)
    function = args.dynamic_prompts_fn
    if function is not None and not isinstance(function, str) and not callable(function):
        raise ValueError(
            f"dynamic_prompts_fn: expected a function or its import path, got {function!r}"
        )
    form = args.dynamic_prompts_form
    check_choice("dynamic_prompts_form", form, PROMPT_FORMS)
    if function is None and form != "samples":
        raise ValueError(
            f"dynamic_prompts_form: expected only with dynamic_prompts_fn, got {form!r}"
        )
    if function is not None and args.overlap_generation:
        raise ValueError(
            "dynamic_prompts_fn: expected None with overlap_generation, which needs the next "
            "prompts before the current completions are scored"
        )


def import_path(function: Callable[..., Any] | str | None) -> str | None:
    """Return the import path of a function, where only text can stand."""
    if function is None or isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"
