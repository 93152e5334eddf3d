"""GRPOConfig: transformers' TrainingArguments plus what GRPO adds, checked on construction."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, get_type_hints

from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from grpo_kernels import LossConfig
from grpo_trainer.advantages import AGGREGATIONS, SCALES

# The correction needs log-probabilities of the rollout engine; the transformers engine gives none.
_NEEDS_ROLLOUT_LOGPROBS = "rollout_correction_"


def _loss_fields() -> list[dataclasses.Field]:
    return [
        item
        for item in dataclasses.fields(LossConfig)
        if not item.name.startswith(_NEEDS_ROLLOUT_LOGPROBS)
    ]


def _loss_help() -> dict[str, str]:
    """Field name to help, from the ``Args:`` section of LossConfig's docstring."""
    section = (LossConfig.__doc__ or "").partition("Args:")[2].partition("\n\n")[0]
    entries = re.split(r"\n {8}(?=\w)", section)
    texts = (entry.partition(":") for entry in entries)
    return {
        name.strip(): " ".join(text.split()).replace("%", "%%")
        for names, _, text in texts
        for name in names.split(",")
    }


def _mirrored_field(item: dataclasses.Field, text: str) -> tuple[str, type, Any]:
    hint = get_type_hints(LossConfig)[item.name]
    return item.name, hint, field(default=item.default, metadata={"help": text})


# Every field of LossConfig, with its name, type and default: the loss is configured in one place.
_LossFields = make_dataclass(
    "_LossFields",
    [_mirrored_field(item, _loss_help().get(item.name, "")) for item in _loss_fields()],
)


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass
class GRPOConfig(_LossFields, TrainingArguments):  # type: ignore[valid-type, misc]
    """Arguments of :class:`~grpo_trainer.GRPOTrainer`.

    Beside the fields below it has those of ``transformers.TrainingArguments`` and those of
    :class:`grpo_kernels.LossConfig`. Batch sizes count completions, not prompts.

    Raises:
        ValueError: values are out of range or do not fit together.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    learning_rate: float = field(default=1e-6, metadata=_help("Initial learning rate."))
    logging_steps: float = field(
        default=10, metadata=_help("Log every so many steps, or this share if below 1.")
    )
    gradient_checkpointing: bool | None = field(
        default=True, metadata=_help("Recompute activations in backward.")
    )
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "bf16 mixed precision. Default: on where the GPU has it, unless fp16 is set.",
            "nargs": "?",
            "const": True,
        },
    )
    remove_unused_columns: bool = field(
        default=False,
        metadata=_help(
            "Drop all columns but `prompt`; reward functions then do not see the others."
        ),
    )

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata=_help(
            "Arguments of from_pretrained when the model is given by name. dtype is float32."
        ),
    )
    trust_remote_code: bool = field(
        default=False, metadata=_help("Run model code that comes with the checkpoint.")
    )
    disable_dropout: bool = field(
        default=False, metadata=_help("Set every dropout probability to 0.")
    )
    shuffle_dataset: bool = field(
        default=True, metadata=_help("Shuffle the training prompts in every epoch.")
    )
    num_generations: int = field(
        default=8, metadata=_help("Completions per prompt: the group size.")
    )
    num_generations_eval: int | None = field(
        default=None, metadata=_help("The same in evaluation. Default: the same.")
    )
    max_prompt_length: int | None = field(
        default=None, metadata=_help("Keep only the last so many prompt tokens.")
    )
    max_completion_length: int = field(
        default=512, metadata=_help("Longest completion, in tokens.")
    )
    pad_to_multiple_of: int | None = field(
        default=None, metadata=_help("Pad sequences to a multiple of this length.")
    )

    generation_batch_size: int | None = field(
        default=None,
        metadata=_help(
            "Completions generated at once, over all processes. Excludes steps_per_generation."
        ),
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata=_help("Micro-batches per generation. Default: gradient_accumulation_steps."),
    )
    top_p: float = field(
        default=1.0, metadata=_help("Nucleus sampling: keep the likeliest tokens up to this mass.")
    )
    top_k: int = field(
        default=0, metadata=_help("Sample from the so many likeliest tokens; 0: from all.")
    )
    min_p: float | None = field(
        default=None, metadata=_help("Least probability, as a share of the likeliest token's.")
    )
    repetition_penalty: float = field(
        default=1.0, metadata=_help("Above 1 makes tokens that occurred less likely.")
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata=_help("More transformers GenerationConfig fields; they override the ones above."),
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=_help("Arguments of apply_chat_template for conversational prompts.")
    )

    num_iterations: int = field(default=1, metadata=_help("Passes over each generation batch."))
    mask_truncated_completions: bool = field(
        default=False,
        metadata=_help(
            "Leave completions out of the loss that ended without an end-of-sequence token."
        ),
    )
    reward_weights: list[float] | None = field(
        default=None, metadata=_help("One per reward function. Default: all 1.")
    )
    scale_rewards: str = field(
        default="group",
        metadata=_help(f"Divide advantages by a standard deviation: {', '.join(SCALES)}."),
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata=_help(f"How several rewards are joined: {', '.join(AGGREGATIONS)}."),
    )

    log_completions: bool = field(
        default=False,
        metadata=_help("Print completions when logging and write them to output_dir/completions."),
    )
    num_completions_to_print: int | None = field(
        default=None, metadata=_help("How many of them to print. Default: all.")
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        if getattr(self, "activation_checkpointing", True) is None:  # its name since 5.2x
            self.activation_checkpointing = self.gradient_checkpointing
        super().__post_init__()
        booleans = {"true": "group", "false": "none"}
        scale = str(self.scale_rewards).lower()
        self.scale_rewards = booleans.get(scale, scale)
        self._check_choices()
        self._check_groups()
        for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
            options(name, getattr(self, name))
        self._leave_the_head_to_us()
        self._set_generation_batch()
        if self.eval_strategy != "no":
            self.check_eval_batch()
        loss_config(self)

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

    def check_eval_batch(self) -> None:
        """Raises ValueError unless an evaluation batch holds whole groups."""
        batch = self.per_device_eval_batch_size * self.world_size
        if batch % self.eval_group_size:
            raise ValueError(
                "per_device_eval_batch_size: expected the evaluation batch of all processes to be "
                f"a multiple of the {self.eval_group_size} completions per prompt, got {batch}"
            )

    def _leave_the_head_to_us(self) -> None:
        """Liger's patch of the head would replace the forward that computes our loss."""
        if not self.use_liger_kernel:
            return
        patches: dict[str, Any] = dict(self.liger_kernel_config or {})  # type: ignore[has-type]
        for name in ("fused_linear_cross_entropy", "cross_entropy"):
            if patches.setdefault(name, False):
                raise ValueError(
                    f"liger_kernel_config[{name!r}]: expected False, got True: the loss of this "
                    "trainer is fused already"
                )
        self.liger_kernel_config = patches

    def _check_choices(self) -> None:
        for name, known in (
            ("scale_rewards", SCALES),
            ("multi_objective_aggregation", AGGREGATIONS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {value!r}")

    def _check_groups(self) -> None:
        at_least = {
            "num_generations": 2,
            "num_generations_eval": 1,
            "num_iterations": 1,
            "max_prompt_length": 1,
            "max_completion_length": 1,
            "pad_to_multiple_of": 1,
            "steps_per_generation": 1,
            "generation_batch_size": 1,
            "num_completions_to_print": 0,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size: expected False (a smaller batch would split groups), "
                "got True"
            )

    def _set_generation_batch(self) -> None:
        """Fills in whichever of generation_batch_size and steps_per_generation is missing."""
        step = self.per_device_train_batch_size * self.world_size
        size, steps = self.generation_batch_size, self.steps_per_generation
        if size is not None and steps is not None:
            raise ValueError(
                "generation_batch_size, steps_per_generation: expected at most one of them, "
                f"got {size} and {steps}"
            )
        if size is not None and size % step:
            raise ValueError(
                f"generation_batch_size: expected a multiple of {step}, the batch of one step over "
                f"all processes, got {size}"
            )
        if size is None:
            size = step * (steps or self.gradient_accumulation_steps)
        if size % self.num_generations:
            valid = [n for n in range(2, size + 1) if size % n == 0]
            raise ValueError(
                f"num_generations: expected a divisor of the generation batch of {size} "
                f"completions ({', '.join(map(str, valid))}), got {self.num_generations}"
            )
        self.generation_batch_size = size
        self.steps_per_generation = size // step


def options(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """The dictionary of an option that the command line takes as JSON; empty for None.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(f"{name}: expected a dictionary, as JSON {{...}}, got {value!r}")


def loss_config(args: GRPOConfig) -> LossConfig:
    """The loss that ``args`` describes."""
    return LossConfig(**{item.name: getattr(args, item.name) for item in _loss_fields()})
