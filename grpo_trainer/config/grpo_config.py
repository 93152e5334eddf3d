"""GRPOConfig: transformers' TrainingArguments plus what GRPO adds, checked on construction."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from grpo_trainer.common import masked
from grpo_trainer.config.checks import (
    AGGREGATIONS,
    FLAG,
    SCALES,
    NamedFields,
    check_accelerator,
    check_booleans,
    check_config,
    check_inherited,
    leave_the_head_to_us,
    parse_json_fields,
    set_generation_batch,
    set_padding,
    setting,
)
from grpo_trainer.config.engines import RolloutFields, check_rollout
from grpo_trainer.config.loss import (
    BackwardFields,
    LossFields,
    backward_options,
    check_level,
    loss_config,
)
from grpo_trainer.config.media import MediaFields, check_media
from grpo_trainer.config.old_names import OldNames, adopt_old_names
from grpo_trainer.config.tools import ToolFields, check_tools, import_path

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

    learning_rate: float = setting(1e-6, "Initial learning rate.")
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

    model_init_kwargs: dict[str, Any] | str | None = setting(
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
    num_generations: int = setting(8, "Completions per prompt: the group size.")
    num_generations_eval: int | None = setting(None, "The same in evaluation. Default: the same.")
    max_prompt_length: int | None = setting(None, "Keep only the last so many prompt tokens.")
    max_completion_length: int = setting(512, "Longest completion, in tokens.")
    pad_to_multiple_of: int | str | None = setting(
        "auto", "Pad sequences to a multiple of this length; auto: 128 on Neuron, none elsewhere."
    )

    generation_batch_size: int | None = setting(
        None, "Completions generated at once, over all processes. Excludes steps_per_generation."
    )
    steps_per_generation: int | None = setting(
        None, "Micro-batches per generation. Default: gradient_accumulation_steps."
    )
    top_p: float = setting(1.0, "Nucleus sampling: keep the likeliest tokens up to this mass.")
    top_k: int = setting(0, "Sample from the so many likeliest tokens; 0: from all.")
    min_p: float | None = setting(None, "Least probability, as a share of the likeliest token's.")
    repetition_penalty: float = setting(1.0, "Above 1 makes tokens that occurred less likely.")
    generation_kwargs: dict[str, Any] | str | None = setting(
        None, "More transformers GenerationConfig fields; they override the ones above."
    )
    chat_template_kwargs: dict[str, Any] | str | None = setting(
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

    num_iterations: int = setting(1, "Passes over each generation batch.")
    mask_truncated_completions: bool = setting(
        False, "Leave completions out of the loss that ended without an end-of-sequence token."
    )
    dynamic_sampling: bool = setting(
        False,
        "Replace groups of equal rewards by those of the next prompts (DAPO, arXiv:2503.14476).",
    )
    max_resampling_rounds: int = setting(
        10, "How often dynamic_sampling tries; then groups of equal rewards fill the batch."
    )
    use_adaptive_entropy: bool = setting(
        False,
        "Let entropy_coef, from where it starts, rise by entropy_coef_delta after each step at "
        "or below entropy_target and fall after others; the bonus applies after the former "
        "(Skywork-OR1, arXiv:2505.22312).",
    )
    entropy_coef_min: float = setting(0.0, "Least coefficient of use_adaptive_entropy.")
    entropy_coef_max: float = setting(1.0, "Largest coefficient of use_adaptive_entropy.")
    entropy_coef_delta: float = setting(
        0.005, "How far use_adaptive_entropy moves the coefficient."
    )
    entropy_target: float = setting(
        0.2, "Entropy per token, in nats, that use_adaptive_entropy keeps."
    )
    router_aux_loss_coef: float | None = setting(
        None, "Weight of a mixture-of-experts model's load-balancing loss. Default: its config's."
    )
    reward_weights: list[float] | None = setting(None, "One per reward function. Default: all 1.")
    scale_rewards: str = setting(
        "group", f"Divide advantages by a standard deviation: {', '.join(SCALES)}."
    )
    multi_objective_aggregation: str = setting(
        "sum_then_normalize", f"How several rewards are joined: {', '.join(AGGREGATIONS)}."
    )

    sync_ref_model: bool = setting(False, "Let the reference model of beta != 0 follow the policy.")
    ref_model_mixup_alpha: float = setting(
        0.6, "Share of the policy in the reference after a sync."
    )
    ref_model_sync_steps: int = setting(512, "Optimizer steps from one sync to the next.")

    log_completions: bool = setting(
        False, "Print completions when logging and write them to output_dir/completions."
    )
    num_completions_to_print: int | None = setting(None, "How many of them to print. Default: all.")
    log_unique_prompts: bool = setting(False, "Of each prompt print and write one completion only.")
    log_multimodal: bool = setting(
        True, "Keep small copies of a prompt's images with its completions, for the report."
    )
    log_completions_hub_repo: str | None = setting(
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
        check_booleans(self)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        if getattr(self, "activation_checkpointing", True) is None:  # its name since 5.2x
            self.activation_checkpointing = self.gradient_checkpointing
        parse_json_fields(self)
        check_accelerator(self)
        super().__post_init__()
        adopt_old_names(self)
        booleans = {"true": "group", "false": "none"}
        scale = str(self.scale_rewards).lower()
        self.scale_rewards = booleans.get(scale, scale)
        set_padding(self)
        check_config(self)
        check_inherited(self)
        leave_the_head_to_us(self)
        set_generation_batch(self)
        if self.eval_strategy != "no":
            self.check_eval_batch()
        loss = loss_config(self)
        check_level(self, loss)
        backward_options(self)  # which checks them
        check_rollout(self, loss)
        check_tools(self)
        check_media(self)

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
        check_config(args)
        check_rollout(args, loss_config(args))
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
        raise ValueError(f"args: expected a grpo_trainer.GRPOConfig, got a {_kind(args)}")
    kinds = (PreTrainedTokenizerBase, ProcessorMixin)
    if processing_class is not None and not isinstance(processing_class, kinds):
        raise ValueError(
            "processing_class: expected a tokenizer or a processor, got a "
            f"{_kind(processing_class)}"
        )


def _kind(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
