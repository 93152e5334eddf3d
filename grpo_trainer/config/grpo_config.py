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
from typing import Annotated, Any, Self

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from grpo_kernels.losses import CORRECTION_MODES
from grpo_trainer.common import describe_fields, hint, masked
from grpo_trainer.config.checks import (
    adopt_old_names,
    check_engine,
    check_fields,
    check_inherited,
    parse_json_fields,
    set_generation_batch,
    set_padding,
)
from grpo_trainer.config.loss import LossFields, backward_options, check_level, loss_config
from grpo_trainer.config.rules import (
    AtLeastOne,
    AtLeastTwo,
    Colocated,
    Count,
    EitherMode,
    Folder,
    Fraction,
    NotNegative,
    Options,
    Port,
    Positive,
    Served,
    Share,
    Text,
    Tolerance,
    check_url,
    choice,
    expect,
    loadable,
    numbers,
    repository,
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
class GRPOConfig(LossFields, NamedFields, TrainingArguments):
    """How to train.

    The arguments of :class:`~grpo_trainer.GRPOTrainer`. Beside the fields below, which
    ``grpo-train --help`` describes, it has those of ``transformers.TrainingArguments`` and those of
    :class:`grpo_kernels.LossConfig`. Batch sizes count completions, not prompts.

    Raises:
        TypeError: there is no such argument; the message says which one was meant.
        ValueError: values are out of range or do not fit together.
    """

    # other defaults than those of transformers
    learning_rate: NotNegative = 1e-6
    logging_steps: float = 10
    gradient_checkpointing: bool | None = True
    bf16: bool | None = None  # on where the GPU has it, unless fp16 is set
    logging_nan_inf_filter: bool = False
    remove_unused_columns: bool = False

    model_init_kwargs: Annotated[Options, loadable] = None
    trust_remote_code: bool = False
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False

    shuffle_dataset: bool = True
    num_generations: AtLeastTwo = 8
    num_generations_eval: AtLeastOne | None = None
    max_prompt_length: AtLeastOne | None = None
    max_completion_length: AtLeastOne = 512
    pad_to_multiple_of: int | str | None = "auto"
    chat_template_kwargs: Options = None

    # images that rows may name
    allow_remote_images: bool | None = None
    allowed_media_path: Folder | None = None
    on_bad_image: Annotated[str, choice(("error", "skip"))] = "error"

    generation_batch_size: AtLeastOne | None = None
    steps_per_generation: AtLeastOne | None = None
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Fraction | None = None
    repetition_penalty: Positive = 1.0
    generation_kwargs: Options = None

    # the engine
    rollout_engine: Text | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: Options = None
    ds3_gather_for_generation: bool = True
    cache_implementation: str | None = None
    overlap_generation: bool = False
    use_sampling_mask: bool = False
    use_vllm: bool = False
    vllm_mode: Annotated[str, choice(("colocate", "server"))] = "colocate"
    vllm_model_impl: Colocated[Annotated[str, choice(("auto", "vllm", "transformers"))]] = "vllm"
    vllm_enable_sleep_mode: Colocated[bool] = False
    vllm_structured_outputs_regex: EitherMode[Text | None] = None
    vllm_server_base_url: Served[Annotated[str | None, check_url]] = None
    vllm_server_host: Served[Text] = "127.0.0.1"
    vllm_server_port: Served[Port] = 8000
    vllm_server_timeout: Served[Positive] = 240.0  # seconds
    vllm_request_timeout: Served[Positive] = 1800.0  # seconds
    vllm_group_port: Served[Port] = 51216
    vllm_weight_transfer: Served[Annotated[str, choice(("auto", "file", "nccl"))]] = "auto"
    vllm_weights_folder: Served[Text | None] = None
    vllm_gpu_memory_utilization: Colocated[Share] = 0.3
    vllm_max_model_length: Colocated[AtLeastOne | None] = None
    vllm_tensor_parallel_size: Colocated[AtLeastOne] = 1
    vllm_engine_kwargs: Colocated[Options] = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: Annotated[str, choice(CORRECTION_MODES)] = "sequence_mask"
    vllm_importance_sampling_clip_max: Positive | None = 3.0
    vllm_importance_sampling_clip_min: NotNegative | None = None

    # tools, and a curriculum
    max_tool_calling_iterations: Count | None = None
    tool_timeout: Positive | None = 60.0  # seconds
    dynamic_prompts_fn: PromptsFunction | None = None
    dynamic_prompts_form: Annotated[str, choice(PROMPT_FORMS)] = "samples"

    reward_weights: Annotated[list[float] | None, numbers] = None
    scale_rewards: Annotated[str, choice(SCALES)] = "group"
    multi_objective_aggregation: Annotated[str, choice(AGGREGATIONS)] = "sum_then_normalize"
    mask_truncated_completions: bool = False
    dynamic_sampling: bool = False
    max_resampling_rounds: AtLeastOne = 10

    num_iterations: AtLeastOne = 1
    use_adaptive_entropy: bool = False
    entropy_coef_min: NotNegative = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: NotNegative = 0.005
    entropy_target: NotNegative = 0.2  # nats per token
    router_aux_loss_coef: NotNegative | None = None
    sync_ref_model: bool = False
    ref_model_mixup_alpha: Fraction = 0.6
    ref_model_sync_steps: AtLeastOne = 512

    # the gradients of the LM head, as linear_policy_loss computes them
    backward_tolerance: Tolerance | None = None
    backward_exact_weight: bool = True
    activation_bytes: Count | None = None

    loss_kwargs: Options = None

    log_completions: bool = False
    num_completions_to_print: Count | None = None
    log_unique_prompts: bool = False
    log_multimodal: bool = True
    log_completions_hub_repo: Annotated[str | None, repository] = None
    overwrite_output_dir: bool = False
    write_report: bool = True

    # OLD_NAMES; each is None after construction
    wandb_log_unique_prompts: bool | None = None
    use_liger_loss: bool | None = None
    use_transformers_paged: bool | None = None
    vllm_guided_decoding_regex: str | None = None
    vllm_importance_sampling_cap: float | None = None

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


describe_fields(GRPOConfig)


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
