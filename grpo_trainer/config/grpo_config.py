"""GRPOConfig: transformers' TrainingArguments plus GRPO's arguments, checked on construction."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from grpo_kernels import LossConfig
from grpo_trainer.common import hint
from grpo_trainer.config.checkpointing import check_checkpointing, keep_not_reentrant
from grpo_trainer.config.checks import (
    adopt_old_names,
    check_engine,
    check_fields,
    check_inherited,
    check_token_budget,
    join_newer_names,
    parse_json_fields,
    set_generation_batch,
    set_padding,
)
from grpo_trainer.config.fields import GRPOFields, fields_with, options
from grpo_trainer.config.loss import (
    LossFields,
    check_backward,
    check_level,
    check_unused,
    loss_config,
)
from grpo_trainer.config.optimizers import optimizer_of
from grpo_trainer.masking import masked

_on_disk = ContextVar("_on_disk", default=False)

# fields for sampling, and all fields that can change during a run
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
CHANGEABLE = (
    *OF_SAMPLING,
    *("beta", "epsilon", "epsilon_high"),
    *("entropy_coef", "off_policy_mask_threshold", "top_entropy_quantile"),
)


@contextmanager
def pickled_without_secrets() -> Iterator[None]:
    """Leave secrets out of pickles made inside: transformers pickles its arguments.

    Other pickles include them, since they may go to another process of the run.
    """
    before = _on_disk.set(True)
    try:
        yield
    finally:
        _on_disk.reset(before)


@dataclass
class GRPOConfig(GRPOFields, LossFields, TrainingArguments):
    """The settings of a run.

    It has the fields that GRPO adds, which ``grpo-train --help-all`` describes, and the fields of
    :class:`grpo_kernels.LossConfig` and ``transformers.TrainingArguments``. Batch sizes count
    completions, not prompts.

    Raises:
        TypeError: an argument is unknown; the message suggests a similar name.
        ValueError: values are out of range or do not fit together.
    """

    # dictionaries that may be JSON text; subclasses may add more, as in transformers and TRL
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *dict.fromkeys([*TrainingArguments._VALID_DICT_FIELDS, *fields_with(options, GRPOFields)]),
    ]

    def __post_init__(self) -> None:
        parse_json_fields(self)
        adopt_old_names(self)
        check_checkpointing(self)
        join_newer_names(self)
        keep_not_reentrant(self)
        scale = str(self.scale_rewards).lower()
        self.scale_rewards = {"true": "group", "false": "none"}.get(scale, scale)
        check_fields(self)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        super().__post_init__()
        set_padding(self)
        check_token_budget(self)
        check_inherited(self)
        optimizer_of(self)
        set_generation_batch(self)
        if self.eval_strategy != "no":
            self.check_eval_batch()
        loss = loss_config(self)
        check_level(self, loss)
        check_unused(self)
        check_backward(self, loss)
        check_engine(self, loss)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, without secrets, also in dictionaries."""
        path = {"dynamic_prompts_fn": import_path(self.dynamic_prompts_fn)}
        return masked(super().to_dict() | path)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"{type(self).__name__}({shown})"

    __str__ = __repr__

    def __getstate__(self) -> dict[str, Any]:
        # a checkpoint holds a pickle of the arguments, and not every function can be pickled
        state = self.__dict__ | {"dynamic_prompts_fn": import_path(self.dynamic_prompts_fn)}
        return masked(state, named=False) if _on_disk.get() else state

    def changed(self, name: str, value: Any) -> GRPOConfig:
        """Return a copy with another value for a field of the loss or of sampling.

        Raises:
            ValueError: it is out of range, or does not fit the other fields.
        """
        args = copy.copy(self)
        setattr(args, name, value)
        check_fields(args)
        check_engine(args, loss_config(args))
        return args

    @property
    def eval_group_size(self) -> int:
        """Completions per prompt in evaluation."""
        return self.num_generations_eval or self.num_generations

    @property
    def prompts_per_generation(self) -> int:
        """Distinct prompts per generation batch, over all processes."""
        assert self.generation_batch_size is not None  # set on construction
        return self.generation_batch_size // self.num_generations

    @property
    def micro_steps_per_generation(self) -> int:
        """Micro-batches that use one generation batch."""
        assert self.steps_per_generation is not None  # set on construction
        return self.steps_per_generation * self.num_iterations

    @property
    def policy_moves_within_generation(self) -> bool:
        """Whether a micro-batch can train a later policy than the one that generated it."""
        return self.gradient_accumulation_steps % self.micro_steps_per_generation != 0

    def check_eval_batch(self) -> None:
        """Raise ValueError unless an evaluation batch holds whole groups."""
        size, group = self.per_device_eval_batch_size, self.eval_group_size
        if size * self.world_size % group:
            step = group // math.gcd(group, self.world_size)
            around = ", ".join(map(str, range(step, size + 2 * step, step)[-3:]))
            raise ValueError(
                f"per_device_eval_batch_size: expected a size such as {around} with whole "
                f"groups of {group} completions per prompt over all processes "
                f"({self.world_size}), got {size}"
            )


def check_arguments(args: Any, processing_class: Any) -> None:
    """Raise ValueError unless they are a GRPOConfig, and a tokenizer or a processor."""
    if not isinstance(args, GRPOConfig):
        raise ValueError(f"args: expected a grpo_trainer.GRPOConfig, got a {type(args)}")
    # a field may have been set since construction
    check_checkpointing(args)
    join_newer_names(args)
    keep_not_reentrant(args)
    kinds = (PreTrainedTokenizerBase, ProcessorMixin, NoneType)
    if not isinstance(processing_class, kinds):
        raise ValueError(
            f"processing_class: expected a tokenizer or a processor, got a {type(processing_class)}"
        )


def import_path(function: Callable[..., Any] | str | None) -> str | None:
    """Return the import path of a function, for places that hold only text."""
    if function is None or isinstance(function, str):
        return function
    function = getattr(function, "func", function)  # a partial's function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


class Settings:
    """The arguments of a run, and the loss that they describe.

    Changes take effect with the next generation batch, so that completions are trained on with the
    values they were sampled with. Checkpoints store them.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self._began = args
        self.args = args  # with all changes
        self.in_effect = args
        self.loss = _loss_of(args)  # in effect
        self._changed: dict[str, Any] = {}
        self._changed_in_effect: dict[str, Any] = {}

    def change(self, **values: Any) -> None:
        """Change fields, starting with the next generation batch.

        Raises:
            ValueError: the run cannot continue with a value, or a field cannot change; then none
                changes.
        """
        args = self.args
        for name, value in values.items():
            self._check(name, value)
            args = args.changed(name, value)
        self.args, self._changed = args, self._changed | values

    def take_effect(self) -> None:
        """Apply the changes, before a generation batch."""
        if self.in_effect is not self.args:
            self.in_effect, self._changed_in_effect = self.args, self._changed
            self.loss = _loss_of(self.args)

    def state(self) -> dict[str, Any]:
        return {"set": self._changed, "in_effect": self._changed_in_effect}

    def restore(self, state: dict[str, Any]) -> None:
        self.args, self._changed = self._began, {}
        self.change(**state["in_effect"])
        self.take_effect()
        self.change(**state["set"])

    def _check(self, name: str, value: Any) -> None:
        if name not in CHANGEABLE:
            raise ValueError(
                f"{name}: expected one of {', '.join(CHANGEABLE)}, which can change during a run"
                f"{hint(name, CHANGEABLE)}"
            )
        if name in OF_SAMPLING and self.args.generation_batches_ahead:
            raise ValueError(
                f"{name}: expected no change with generation_batches_ahead, whose next completions "
                f"are already being sampled, got {value!r}"
            )
        if name == "beta" and value != 0 and self._began.beta == 0:
            raise ValueError(
                "beta: expected 0, since the run started with 0 and has no reference, got "
                f"{value!r}"
            )
        if name == "entropy_coef" and self.args.use_adaptive_entropy:
            raise ValueError(
                f"entropy_coef: expected no change with use_adaptive_entropy, got {value!r}"
            )


def _loss_of(args: GRPOConfig) -> LossConfig:
    loss = loss_config(args)
    # with adaptive entropy each batch has its coefficient: the config stays the same
    return replace(loss, entropy_coef=1.0) if args.use_adaptive_entropy else loss
