"""GRPOConfig: transformers' TrainingArguments plus what GRPO adds, checked on construction."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, ClassVar, Self

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from grpo_trainer.common import hint, masked
from grpo_trainer.config.checks import (
    FLAG,
    AtLeastOne,
    Count,
    Folder,
    Fraction,
    NotNegative,
    OldNames,
    Options,
    Positive,
    Share,
    adopt_old_names,
    check_fields,
    check_inherited,
    check_model_dtype,
    choice,
    expect,
    integer,
    numbers,
    parse_json_fields,
    repository,
    set_generation_batch,
    set_padding,
    setting,
)
from grpo_trainer.config.engines import RolloutFields, check_engine
from grpo_trainer.config.loss import (
    BackwardFields,
    LossFields,
    backward_options,
    check_level,
    loss_config,
)

# the advantages have a function for each of them
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
PROMPT_FORMS = ("samples", "groups")  # dynamic_prompts_fn has one entry for each of them

PromptsFunction = Annotated[
    Callable[..., Any] | str,
    expect("a function or its import path", lambda fn: isinstance(fn, str) or callable(fn)),
]

_on_disk = ContextVar("_on_disk", default=False)


@contextmanager
def pickled_without_secrets() -> Iterator[None]:
    """Leave tokens and passwords out of what is pickled inside: transformers pickles its arguments.

    Elsewhere a pickle has them, since it may be on its way to another process of the run.
    """
    before = _on_disk.set(True)
    try:
        yield
    finally:
        _on_disk.reset(before)


class NamedFields:
    """Says which field was meant, as the command line does, where the constructor knows none."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        parameters = inspect.signature(cls.__init__).parameters
        takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        for name in values:
            if name not in parameters and not takes_all:
                raise TypeError(
                    f"{cls.__name__}.__init__() got an unexpected keyword argument {name!r}"
                    f"{hint(name, parameters)}"
                )
        return super().__new__(cls)


@dataclass
class ToolFields:
    """How long completions go on with tools, and where the next prompts come from."""

    max_tool_calling_iterations: Count | None = setting(
        None,
        "How often a completion may call tools and go on with their answers. Default: until "
        "max_completion_length.",
    )
    tool_timeout: Positive | None = setting(
        60.0,
        "Seconds that a tool may take; then it answers with an error. Plain functions run in a "
        "thread of their own for that; null in the file: no limit, and no other thread.",
    )
    dynamic_prompts_fn: PromptsFunction | None = setting(
        None,
        "Import path of a function (prompts, completions, rewards, metas) that returns the "
        "prompts of the next generation batch, each text, messages, or None: the dataset's "
        "next.",
    )
    dynamic_prompts_form: Annotated[str, choice(PROMPT_FORMS)] = setting(
        "samples",
        "What dynamic_prompts_fn is given and returns: samples (one entry per completion, with "
        "the dataset's prompt) or groups (one per prompt, with all its completions).",
    )


@dataclass
class MediaFields:
    """Which images rows may name, and what becomes of a row whose images cannot be read."""

    allow_remote_images: bool | None = setting(
        None,
        "Whether rows may name images by URLs. Default: yes, but not where grpo-train loads a "
        "dataset of the hub.",
        **FLAG,
    )
    allowed_media_path: Folder | None = setting(
        None,
        "Folder whose files rows may name as images. Default: any file, but where grpo-train loads "
        "a dataset of the hub only the files that came with it.",
    )
    on_bad_image: Annotated[str, choice(("error", "skip"))] = setting(
        "error",
        "What a training row does whose images cannot be read: error, or skip, which logs it and "
        "takes the next row.",
    )


@dataclass
class GRPOConfig(
    LossFields,
    BackwardFields,
    RolloutFields,
    ToolFields,
    MediaFields,
    OldNames,
    NamedFields,
    TrainingArguments,
):
    """How to train.

    The arguments of :class:`~grpo_trainer.GRPOTrainer`. Beside the fields below it has those of
    ``transformers.TrainingArguments`` and those of :class:`grpo_kernels.LossConfig`. Batch sizes
    count completions, not prompts.

    Raises:
        TypeError: there is no such argument; the message says which one was meant.
        ValueError: values are out of range or do not fit together.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "loss_kwargs",
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
        "vllm_engine_kwargs",
    ]

    learning_rate: NotNegative = setting(1e-6, "Initial learning rate.")
    logging_steps: float = setting(10, "Log every so many steps, or this share if below 1.")
    gradient_checkpointing: bool | None = setting(True, "Recompute activations in backward.")
    bf16: bool | None = setting(
        None,
        "bf16 mixed precision. Default: on where the GPU has it, unless fp16 is set.",
        **FLAG,
    )
    logging_nan_inf_filter: bool = setting(
        False, "Leave NaN and infinite losses out of the log; costs a wait in every step."
    )
    remove_unused_columns: bool = setting(
        False, "Drop all columns but `prompt`; reward functions then do not see the others."
    )

    model_init_kwargs: Annotated[Options, check_model_dtype] = setting(
        None,
        "Arguments of from_pretrained for the model and reward models that are given by name. The "
        "model's dtype is float32 by default.",
    )
    trust_remote_code: bool = setting(False, "Run model code that comes with the checkpoint.")
    disable_dropout: bool = setting(False, "Set every dropout probability to 0.")
    cast_lm_head_to_fp32: bool = setting(
        False,
        "Keep an untied LM head in float32 and multiply float32 hidden states with it, under "
        "mixed precision too (ScaleRL, arXiv:2510.13786). Without it the products have the "
        "inputs' precision; they are summed in float32 and not rounded either way.",
    )
    shuffle_dataset: bool = setting(True, "Shuffle the training prompts in every epoch.")
    num_generations: Annotated[int, integer(2)] = setting(
        8, "Completions per prompt: the group size."
    )
    num_generations_eval: AtLeastOne | None = setting(
        None, "The same in evaluation. Default: the same."
    )
    max_prompt_length: AtLeastOne | None = setting(
        None, "Keep only the last so many prompt tokens."
    )
    max_completion_length: AtLeastOne = setting(512, "Longest completion, in tokens.")
    pad_to_multiple_of: int | str | None = setting(
        "auto", "Pad sequences to a multiple of this length; auto: 128 on Neuron, none elsewhere."
    )

    generation_batch_size: AtLeastOne | None = setting(
        None, "Completions generated at once, over all processes. Excludes steps_per_generation."
    )
    steps_per_generation: AtLeastOne | None = setting(
        None, "Micro-batches per generation. Default: gradient_accumulation_steps."
    )
    top_p: Share = setting(1.0, "Nucleus sampling: keep the likeliest tokens up to this mass.")
    top_k: Count = setting(0, "Sample from the so many likeliest tokens; 0: from all.")
    min_p: Fraction | None = setting(
        None, "Least probability, as a share of the likeliest token's."
    )
    repetition_penalty: Positive = setting(1.0, "Above 1 makes tokens that occurred less likely.")
    generation_kwargs: Options = setting(
        None, "More transformers GenerationConfig fields; they override the ones above."
    )
    chat_template_kwargs: Options = setting(
        None, "Arguments of apply_chat_template for conversational prompts."
    )

    ds3_gather_for_generation: bool = setting(
        True,
        "While transformers generates with a policy that is sharded (ZeRO-3, FSDP2), hold all of "
        "its parameters on every process. Without it each is gathered for each token.",
    )
    cache_implementation: str | None = setting(
        None, "Kind of key-value cache, as in transformers' generation."
    )

    num_iterations: AtLeastOne = setting(1, "Passes over each generation batch.")
    mask_truncated_completions: bool = setting(
        False, "Leave completions out of the loss that ended without an end-of-sequence token."
    )
    dynamic_sampling: bool = setting(
        False,
        "Replace groups of equal rewards by those of the next prompts (DAPO, arXiv:2503.14476).",
    )
    max_resampling_rounds: AtLeastOne = setting(
        10, "How often dynamic_sampling tries; then groups of equal rewards fill the batch."
    )
    use_adaptive_entropy: bool = setting(
        False,
        "Let entropy_coef, from where it starts, rise by entropy_coef_delta after each step at "
        "or below entropy_target and fall after others; the bonus applies after the former "
        "(Skywork-OR1, arXiv:2505.22312).",
    )
    entropy_coef_min: NotNegative = setting(0.0, "Least coefficient of use_adaptive_entropy.")
    entropy_coef_max: float = setting(1.0, "Largest coefficient of use_adaptive_entropy.")
    entropy_coef_delta: NotNegative = setting(
        0.005, "How far use_adaptive_entropy moves the coefficient."
    )
    entropy_target: NotNegative = setting(
        0.2, "Entropy per token, in nats, that use_adaptive_entropy keeps."
    )
    router_aux_loss_coef: NotNegative | None = setting(
        None, "Weight of a mixture-of-experts model's load-balancing loss. Default: its config's."
    )
    reward_weights: Annotated[list[float] | None, numbers] = setting(
        None, "One per reward function. Default: all 1."
    )
    scale_rewards: Annotated[str, choice(SCALES)] = setting(
        "group", f"Divide advantages by a standard deviation: {', '.join(SCALES)}."
    )
    multi_objective_aggregation: Annotated[str, choice(AGGREGATIONS)] = setting(
        "sum_then_normalize", f"How several rewards are joined: {', '.join(AGGREGATIONS)}."
    )

    sync_ref_model: bool = setting(False, "Let the reference model of beta != 0 follow the policy.")
    ref_model_mixup_alpha: Fraction = setting(
        0.6, "Share of the policy in the reference after a sync."
    )
    ref_model_sync_steps: AtLeastOne = setting(512, "Optimizer steps from one sync to the next.")

    log_completions: bool = setting(
        False, "Print completions when logging and write them to output_dir/completions."
    )
    num_completions_to_print: Count | None = setting(
        None, "How many of them to print. Default: all."
    )
    log_unique_prompts: bool = setting(False, "Of each prompt print and write one completion only.")
    log_multimodal: bool = setting(
        True, "Keep small copies of a prompt's images with its completions, for the report."
    )
    log_completions_hub_repo: Annotated[str | None, repository] = setting(
        None,
        "Hub dataset, made if there is none, that the files of completions are uploaded to during "
        "the run. It is public unless hub_private_repo is set.",
    )
    overwrite_output_dir: bool = setting(
        False,
        "Train in a folder with the model or checkpoints of another run, and write over them.",
    )
    write_report: bool = setting(
        True, "Write output_dir/report.html with every checkpoint and at the end."
    )

    def __post_init__(self) -> None:
        parse_json_fields(self)
        adopt_old_names(self)
        scale = str(self.scale_rewards).lower()
        self.scale_rewards = {"true": "group", "false": "none"}.get(scale, scale)
        check_fields(self)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        if getattr(self, "activation_checkpointing", True) is None:  # its name since 5.2x
            self.activation_checkpointing = self.gradient_checkpointing
        super().__post_init__()
        set_padding(self)
        check_inherited(self)
        set_generation_batch(self)
        if self.eval_strategy != "no":
            self.check_eval_batch()
        loss = loss_config(self)
        check_level(self, loss)
        backward_options(self)  # which checks the seed
        check_engine(self, loss)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, and without secrets, those in dictionaries too."""
        path = {"dynamic_prompts_fn": import_path(self.dynamic_prompts_fn)}
        return masked(super().to_dict() | path)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"{type(self).__name__}({shown})"

    __str__ = __repr__

    def __getstate__(self) -> dict[str, Any]:
        # a checkpoint holds a pickle of the arguments, which a function may not have
        state = self.__dict__ | {"dynamic_prompts_fn": import_path(self.dynamic_prompts_fn)}
        return masked(state, named=False) if _on_disk.get() else state

    def changed(self, name: str, value: Any) -> GRPOConfig:
        """Return a copy with another value of a field of the loss or of sampling.

        Raises:
            ValueError: it is out of range, or does not go with the other fields.
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
        """Different prompts of a generation batch, over all processes."""
        assert self.generation_batch_size is not None  # set on construction
        return self.generation_batch_size // self.num_generations

    @property
    def micro_steps_per_generation(self) -> int:
        """How many micro-batches a generation batch serves."""
        assert self.steps_per_generation is not None  # set on construction
        return self.steps_per_generation * self.num_iterations

    @property
    def policy_moves_within_generation(self) -> bool:
        """Whether a micro-batch can be used by a later policy than the one that generated it."""
        return self.gradient_accumulation_steps % self.micro_steps_per_generation != 0

    def check_eval_batch(self) -> None:
        """Raise ValueError unless an evaluation batch holds whole groups."""
        size, group = self.per_device_eval_batch_size, self.eval_group_size
        if size * self.world_size % group:
            step = group // math.gcd(group, self.world_size)
            around = ", ".join(map(str, range(step, size + 2 * step, step)[-3:]))
            raise ValueError(
                f"per_device_eval_batch_size: expected a size such as {around} that "
                f"over all processes ({self.world_size}) makes whole groups of {group} "
                f"completions per prompt, got {size}"
            )


def check_arguments(args: Any, processing_class: Any) -> None:
    """Raise ValueError unless they are a configuration of this trainer, and what makes tokens."""
    if not isinstance(args, GRPOConfig):
        raise ValueError(f"args: expected a grpo_trainer.GRPOConfig, got a {type(args)}")
    kinds = (PreTrainedTokenizerBase, ProcessorMixin, NoneType)
    if not isinstance(processing_class, kinds):
        raise ValueError(
            f"processing_class: expected a tokenizer or a processor, got a {type(processing_class)}"
        )


def import_path(function: Callable[..., Any] | str | None) -> str | None:
    """Return the import path of a function, where only text can stand."""
    if function is None or isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"
