"""The fields of GRPOConfig: name, what it may be, default. ``help.txt`` describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import torch

from grpo_kernels import Bounded
from grpo_kernels.arguments import check_name, check_number
from grpo_kernels.backends import KINDS
from grpo_kernels.losses import CORRECTION_MODES
from grpo_trainer.masking import cut_at_secret, masked_url

Rule = Callable[[str, Any], None]  # takes the name of a field and its value


def number(low: float, high: float = math.inf, *, above: bool = False, whole: bool = False) -> Rule:
    """Return the rule of a number in [low, high], with ``above`` in (low, high]; or an integer."""
    expected = f"{'an integer' if whole else 'a number'} {'>' if above else '>='} {low:g}"
    if math.isfinite(high):
        expected += f" and <= {high:g}"

    def accepts(value: float) -> bool:
        if whole and not isinstance(value, int):
            return False
        return low <= value <= high and not (above and value == low)

    return lambda name, value: check_number(name, value, expected, accepts)


def choice(names: Collection[str]) -> Rule:
    """Return the rule of a field that is one of ``names``."""
    return lambda name, value: check_name(name, value, names)


def expect(expected: str, accepts: Callable[[Any], bool]) -> Rule:
    """Return the rule of a field whose value is accepted."""

    def check(name: str, value: Any) -> None:
        if not accepts(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")

    return check


def numbers(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a list of numbers."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}: expected a list of numbers, got {value!r}")
    for item in value:
        check_number(name, item)


def check_url(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is the URL of a web server."""
    try:
        parts = urlsplit(str(value))
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port
        good = False
    if not good:
        raise ValueError(f"{name}: expected http://host:port, got {masked_url(str(value))!r}")


def options(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return the dictionary of an option that the command line takes as JSON; empty for None.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(
        f"{name}: expected a dictionary, as JSON {{...}}, got {cut_at_secret(repr(value))}"
    )


def dtype_name(dtype: Any) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``, and for its name."""
    return str(dtype).removeprefix("torch.")


def loadable(name: str, value: Any) -> None:
    """Raise ValueError unless from_pretrained takes the dtype among its arguments."""
    dtype = options(name, value).get("dtype", "auto")
    if dtype is None or dtype == "auto" or isinstance(dtype, dict):  # one for each part
        return
    known = getattr(torch, dtype_name(dtype), None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise ValueError(
            f"{name}['dtype']: expected auto or a floating-point dtype of torch such as bfloat16, "
            f"got {dtype!r}"
        )


AtLeastOne = Annotated[int, number(1, whole=True)]
AtLeastTwo = Annotated[int, number(2, whole=True)]
Count = Annotated[int, number(0, whole=True)]
Port = Annotated[int, number(1, 65535, whole=True)]
NotNegative = Annotated[float, number(0)]
Positive = Annotated[float, number(0, above=True)]
Fraction = Annotated[float, number(0, 1)]
Share = Annotated[float, number(0, 1, above=True)]
Text = Annotated[str, expect("a text", lambda value: isinstance(value, str))]
Folder = Annotated[
    str, expect("a folder", lambda value: isinstance(value, str) and Path(value).is_dir())
]
Tolerance = Annotated[
    float,
    lambda name, value: check_number(name, value, "a number in (0, 1)", lambda x: 0 < x < 1),
]
Options = Annotated[dict[str, Any] | str | None, options]

# settings of vLLM in one of its modes
T = TypeVar("T")
EITHER = "colocate or server"
Colocated = Annotated[T, "colocate"]
Served = Annotated[T, "server"]

# the advantages have a function for each of them
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")

PromptsFunction = Annotated[
    Callable[..., Any] | str,
    expect("a function or its import path", lambda fn: isinstance(fn, str) or callable(fn)),
]


@dataclass
class GRPOFields:
    """What GRPO adds to the arguments of transformers, beside the loss."""

    # other defaults than those of transformers
    learning_rate: NotNegative = 1e-6
    logging_steps: float = 10
    gradient_checkpointing: bool | None = None  # on
    gradient_checkpointing_kwargs: Options = None
    # their names in newer versions of transformers
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: Options = None
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
    packing: Annotated[str, choice(("auto", "padded", "packed"))] = "auto"
    max_tokens_per_micro_batch: AtLeastOne | None = None
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
    generation_batches_ahead: Count = 0
    use_sampling_mask: bool = False
    use_vllm: bool = False
    vllm_mode: Annotated[str, choice(("colocate", "server"))] = "colocate"
    vllm_model_impl: Colocated[Annotated[str, choice(("auto", "vllm", "transformers"))]] = "vllm"
    vllm_enable_sleep_mode: Colocated[bool] = False
    vllm_structured_outputs_regex: Annotated[Text | None, EITHER] = None
    vllm_server_base_url: Served[Annotated[str | None, check_url]] = None
    vllm_server_host: Served[Text] = "127.0.0.1"
    vllm_server_port: Served[Port] = 8000
    vllm_server_timeout: Served[Positive] = 240.0  # seconds
    vllm_request_timeout: Served[Positive] = 1800.0  # seconds
    vllm_group_port: Served[Port] = 51216
    vllm_weight_transfer: Served[Annotated[str, choice(("auto", "file", "nccl"))]] = "auto"
    vllm_lora_transfer: Annotated[str, EITHER, choice(("auto", "adapter", "merged"))] = "auto"
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

    teacher: Text | None = None
    distillation: Annotated[str, choice(("logprobs", *KINDS))] = "logprobs"
    distillation_coef: Positive = 1.0
    distillation_beta: Tolerance = 0.5

    # the gradients of the LM head, as linear_policy_loss computes them
    backward: Annotated[str, choice(("exact", "sparse"))] = "exact"
    backward_tolerance: Tolerance = Bounded().tolerance
    backward_exact_weight: bool = True
    activation_bytes: Count | None = None

    loss_kwargs: Options = None

    log_completions: bool = False
    num_completions_to_print: Count | None = None
    log_unique_prompts: bool = False
    log_multimodal: bool = True
    overwrite_output_dir: bool = False
    write_report: bool = True

    # OLD_NAMES; each is None after construction
    wandb_log_unique_prompts: bool | None = None
    use_liger_loss: bool | None = None
    vllm_guided_decoding_regex: str | None = None


@cache
def annotated_fields(config: type) -> dict[str, tuple[Any, list[Any]]]:
    """Return the type of each field, and what ``Annotated`` says of it or of a part of it."""
    kinds = get_type_hints(config)
    return {
        name: (kinds[name], _marks(annotation))
        for name, annotation in get_type_hints(config, include_extras=True).items()
    }


def fields_with(mark: Any, config: type) -> list[str]:
    """Return the names of the fields whose annotation has ``mark``."""
    return [name for name, (_, marks) in annotated_fields(config).items() if mark in marks]


def _marks(annotation: Any) -> list[Any]:
    inner = [mark for part in get_args(annotation) for mark in _marks(part)]
    return [*getattr(annotation, "__metadata__", ()), *inner]
