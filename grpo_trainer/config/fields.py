"""The fields of GRPOConfig: name, allowed values, default, and its text in ``--help-all``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import torch

from grpo_kernels import Bounded
from grpo_kernels.backends import KINDS
from grpo_kernels.common import check_name, check_number
from grpo_kernels.losses import CORRECTION_MODES
from grpo_trainer.common import hint, setting
from grpo_trainer.masking import cut_at_secret, masked_url

Rule = Callable[[str, Any], None]  # (name of a field, its value)


def number(low: float, high: float = math.inf, *, above: bool = False, whole: bool = False) -> Rule:
    """Return the rule for a number (``whole``: an integer) in [low, high]; ``above``: (low,
    high]."""
    expected = f"{'an integer' if whole else 'a number'} {'>' if above else '>='} {low:g}"
    if math.isfinite(high):
        expected += f" and <= {high:g}"

    def accepts(value: float) -> bool:
        if whole and not isinstance(value, int):
            return False
        return low <= value <= high and not (above and value == low)

    return lambda name, value: check_number(name, value, expected, accepts)


def choice(names: Collection[str]) -> Rule:
    """Return the rule for a field with one of ``names`` as its value."""
    return lambda name, value: check_name(name, value, names)


def expect(expected: str, accepts: Callable[[Any], bool]) -> Rule:
    """Return the rule for a field that ``accepts`` checks."""

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
    """Return the dictionary of an option that may be JSON on the command line; empty for None.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(
        f"{name}: expected a dictionary, as JSON {{...}}, got {cut_at_secret(repr(value))}"
    )


def dtype_name(dtype: Any) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16`` or its name."""
    return str(dtype).removeprefix("torch.")


def loadable(name: str, value: Any) -> None:
    """Raise ValueError unless from_pretrained accepts the dtype in these arguments."""
    dtype = options(name, value).get("dtype", "auto")
    if dtype is None or dtype == "auto" or isinstance(dtype, dict):  # a dtype for each part
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

# vLLM settings for one of the modes
T = TypeVar("T")
EITHER = "colocate or server"
Colocated = Annotated[T, "colocate"]
Served = Annotated[T, "server"]

# the advantages have a function for each name
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")

PromptsFunction = Annotated[
    Callable[..., Any] | str,
    expect("a function or its import path", lambda fn: isinstance(fn, str) or callable(fn)),
]


@dataclass
class GRPOFields:
    """The arguments that GRPO adds to transformers' arguments, except the loss."""

    # defaults that differ from transformers
    learning_rate: NotNegative = setting(1e-6, "Initial learning rate.")
    logging_steps: float = setting(
        10, "Log every this many steps; below 1: a fraction of all steps."
    )
    gradient_checkpointing: bool | None = setting(None, "Recompute activations; None: on.")
    gradient_checkpointing_kwargs: Options = setting(
        None, "Arguments of torch.utils.checkpoint, plus offload and every_n_layers."
    )
    activation_checkpointing: bool | None = setting(None, "Newer name of gradient_checkpointing.")
    activation_checkpointing_kwargs: Options = setting(
        None, "Newer name of gradient_checkpointing_kwargs."
    )
    mlp_tile_tokens: AtLeastOne | None = setting(
        None, "Run MLPs in tiles of this many tokens, recomputed in the backward; None: no tiles."
    )
    bf16: bool | None = setting(None, "bf16 mixed precision; None: on if the GPU supports it.")
    logging_nan_inf_filter: bool = setting(
        False, "Leave NaN and infinite losses out of the log; synchronizes the device every step."
    )
    remove_unused_columns: bool = setting(
        False, "Drop all columns except `prompt`, for rewards too."
    )

    # the model
    model_init_kwargs: Annotated[Options, loadable] = setting(
        None,
        "Arguments of from_pretrained, also for reward models; the default dtype is float32.",
    )
    trust_remote_code: bool = setting(False, "Run model code from the checkpoint.")
    disable_dropout: bool = setting(False, "Set every dropout probability to 0.")
    cast_lm_head_to_fp32: bool = setting(
        False, "Keep an untied LM head and its inputs in float32 (ScaleRL, arXiv:2510.13786)."
    )

    # prompts and batches
    shuffle_dataset: bool = setting(
        True, "Shuffle the prompts in every epoch; streams use a buffer of 1,000 rows."
    )
    num_generations: AtLeastTwo = setting(8, "Completions per prompt: the group size.")
    num_generations_eval: AtLeastOne | None = setting(
        None, "Completions per prompt in evaluation; None: num_generations."
    )
    max_prompt_length: AtLeastOne | None = setting(
        None, "Keep only the last tokens of a prompt, this many; None: all."
    )
    max_completion_length: AtLeastOne = setting(512, "Longest completion, in tokens.")
    pad_to_multiple_of: int | str | None = setting(
        "auto", "Pad sequences to a multiple of this; auto: 128 on Neuron, else none."
    )
    packing: Annotated[str, choice(("auto", "padded", "packed"))] = setting(
        "auto",
        "How rows run through the body: padded, packed, or auto: packed if that works and helps.",
    )
    max_tokens_per_micro_batch: AtLeastOne | None = setting(
        None, "Limit micro-batches to this many tokens, prompts and padding included."
    )
    chat_template_kwargs: Options = setting(None, "Arguments of apply_chat_template.")
    generation_batch_size: AtLeastOne | None = setting(
        None, "Completions generated at once, over all processes; not with steps_per_generation."
    )
    steps_per_generation: AtLeastOne | None = setting(
        None, "Micro-batches per generation batch; None: gradient_accumulation_steps."
    )

    # images that rows may name
    allow_remote_images: bool | None = setting(
        None, "Rows may name images by URL; None: yes, except in hub datasets of grpo-train."
    )
    allowed_media_path: Folder | None = setting(
        None, "Folder of images that rows may name; None: any; for hub datasets only their own."
    )
    on_bad_image: Annotated[str, choice(("error", "skip"))] = setting(
        "error", "What to do with a training row with an unreadable image: error or skip."
    )

    # sampling
    top_p: Share = setting(1.0, "Nucleus sampling: keep the likeliest tokens up to this mass.")
    top_k: Count = setting(0, "Sample from this many likeliest tokens; 0: from all.")
    min_p: Fraction | None = setting(None, "Smallest probability, relative to the likeliest token.")
    repetition_penalty: Positive = setting(
        1.0, "Above 1: tokens that have occurred become less likely."
    )
    generation_kwargs: Options = setting(
        None, "More fields of transformers' GenerationConfig; they override top_p and so on."
    )

    # the engine
    rollout_engine: Text | None = setting(None, "A registered engine; None: use_vllm decides.")
    ds3_gather_for_generation: bool = setting(
        True, "Gather a sharded policy on every process while transformers generates (faster)."
    )
    cache_implementation: str | None = setting(None, "Kind of key-value cache in transformers.")
    generation_batches_ahead: Count = setting(
        0, "Generation batches to sample ahead during training, with an engine like a vLLM server."
    )
    max_staleness: Count | None = setting(
        None,
        "With a number: weights reach the engine while it generates, unfinished groups continue, "
        "and tokens older than this many optimizer steps are left out of the loss.",
    )
    use_sampling_mask: bool = setting(
        False, "With top_k: normalize probabilities over the ids that top_k, top_p and min_p keep."
    )
    use_rollout_routing_replay: bool = setting(
        False,
        "Send tokens through the experts that the engine chose (R3); for mixture-of-experts "
        "models.",
    )
    use_vllm: bool = setting(False, "Generate with vLLM.")
    vllm_mode: Annotated[str, choice(("colocate", "server"))] = setting(
        "colocate", "colocate: in the training processes; server: started by `grpo-train serve`."
    )
    vllm_model_impl: Colocated[Annotated[str, choice(("auto", "vllm", "transformers"))]] = setting(
        "vllm", "Which model implementation vLLM runs."
    )
    vllm_enable_sleep_mode: Colocated[bool] = setting(False, "Free vLLM's memory when idle.")
    vllm_structured_outputs_regex: Annotated[Text | None, EITHER] = setting(
        None, "Regular expression that every completion must match."
    )
    vllm_server_base_url: Served[Annotated[str | None, check_url]] = setting(
        None, "URL of the server, instead of host and port."
    )
    vllm_server_host: Served[Text] = setting("127.0.0.1", "Host of the server.")
    vllm_server_port: Served[Port] = setting(8000, "Port of the server.")
    vllm_server_timeout: Served[Positive] = setting(240.0, "Seconds to wait for a server to start.")
    vllm_request_timeout: Served[Positive] = setting(
        1800.0, "Time limit for one generation batch, in seconds."
    )
    vllm_group_port: Served[Port] = setting(51216, "Port for sending weights to a server by NCCL.")
    vllm_weight_transfer: Served[Annotated[str, choice(("auto", "file", "nccl"))]] = setting(
        "auto",
        "How weights reach the server: nccl, file (a shared folder), or auto: nccl if possible.",
    )
    vllm_lora_transfer: Annotated[str, EITHER, choice(("auto", "adapter", "merged"))] = setting(
        "auto",
        "adapter: send only LoRA; merged: send merged weights; auto: only LoRA if possible.",
    )
    vllm_weights_folder: Served[Text | None] = setting(
        None, "Folder for weight files; None: output_dir/vllm_weights."
    )
    vllm_gpu_memory_utilization: Colocated[Share] = setting(0.3, "Fraction of the GPU's memory.")
    vllm_max_model_length: Colocated[AtLeastOne | None] = setting(
        None, "Longest prompt plus completion; None: the model's limit."
    )
    vllm_tensor_parallel_size: Colocated[AtLeastOne] = setting(1, "Processes that share one vLLM.")
    vllm_engine_kwargs: Colocated[Options] = setting(
        None, "More arguments of vllm.LLM; they override those set here."
    )
    vllm_importance_sampling_correction: bool = setting(
        True, "Weight the loss by policy over engine probability, if the engine reports it."
    )
    vllm_importance_sampling_mode: Annotated[str, choice(CORRECTION_MODES)] = setting(
        "sequence_mask",
        f"One of {', '.join(CORRECTION_MODES)}. truncate clips weights to the bounds, mask drops "
        "those outside, k1 to k3 drop those and do not weight the rest.",
    )
    vllm_importance_sampling_clip_max: Positive | None = setting(3.0, "Upper bound; None: none.")
    vllm_importance_sampling_clip_min: NotNegative | None = setting(
        None, "Lower bound; None: none."
    )

    # tools, and a curriculum
    max_tool_calling_iterations: Count | None = setting(
        None, "Most rounds of tool calls per completion; None: until max_completion_length."
    )
    tool_timeout: Positive | None = setting(
        60.0, "Time limit for a tool, in seconds; null in the YAML file: no limit and no thread."
    )
    dynamic_prompts_fn: PromptsFunction | None = setting(
        None, "Import path of a function (prompts, completions, rewards, metas) -> next prompts."
    )

    # rewards and advantages
    reward_weights: Annotated[list[float] | None, numbers] = setting(
        None, "One per reward function; None: all 1."
    )
    scale_rewards: Annotated[str, choice(SCALES)] = setting(
        "group", "Divide advantages by a standard deviation: group, batch or none."
    )
    multi_objective_aggregation: Annotated[str, choice(AGGREGATIONS)] = setting(
        "sum_then_normalize", f"How rewards are combined: {' or '.join(AGGREGATIONS)}."
    )
    mask_truncated_completions: bool = setting(
        False, "Leave completions without an end-of-sequence token out of the loss."
    )
    dynamic_sampling: bool = setting(
        False,
        "Replace groups with equal rewards by groups of the next prompts (DAPO, arXiv:2503.14476).",
    )
    max_resampling_rounds: AtLeastOne = setting(
        10, "Most rounds in which dynamic_sampling draws again."
    )

    # the step
    num_iterations: AtLeastOne = setting(1, "Passes over each generation batch.")
    use_adaptive_entropy: bool = setting(
        False, "Adjust entropy_coef to keep entropy_target (Skywork-OR1, arXiv:2505.22312)."
    )
    entropy_coef_min: NotNegative = setting(0.0, "Smallest coefficient for use_adaptive_entropy.")
    entropy_coef_max: float = setting(1.0, "Largest coefficient for use_adaptive_entropy.")
    entropy_coef_delta: NotNegative = setting(0.005, "Step size of use_adaptive_entropy.")
    entropy_target: NotNegative = setting(
        0.2, "Entropy per token, in nats, that use_adaptive_entropy keeps."
    )
    router_aux_loss_coef: NotNegative | None = setting(
        None, "Weight of the experts' load-balancing loss; None: the model's weight."
    )
    sync_ref_model: bool = setting(False, "Let the reference model (beta) follow the policy.")
    ref_model_mixup_alpha: Fraction = setting(0.6, "Weight of the policy in each sync.")
    ref_model_sync_steps: AtLeastOne = setting(512, "Optimizer steps between syncs.")

    # a teacher
    teacher: Text | None = setting(
        None, "Model to learn from, an adapter of the policy, or http:// address of a vLLM server."
    )
    distillation: Annotated[str, choice(("logprobs", *KINDS))] = setting(
        "logprobs",
        "logprobs (token advantages from the teacher's log-probabilities), or a divergence over "
        f"the whole vocabulary: {', '.join(KINDS)}.",
    )
    distillation_coef: Positive = setting(1.0, "Weight of the teacher next to the rewards.")
    distillation_beta: Tolerance = setting(0.5, "Weight of the teacher in the mixture of jsd.")

    # gradients of the LM head, as linear_policy_loss computes them
    schedule: Annotated[str, choice(("auto", "one_pass", "two_pass"))] = setting(
        "auto",
        "one_pass; two_pass: less memory for a trained LM head, one more matmul; auto: one pass if "
        "that is faster.",
    )
    backward: Annotated[str, choice(("exact", "sparse"))] = setting(
        "exact",
        "exact, or sparse: the LM head's gradient from likely tokens plus an unbiased sample.",
    )
    backward_tolerance: Tolerance = setting(
        Bounded().tolerance, "sparse: largest relative error of the logits' gradient."
    )
    backward_exact_weight: bool = setting(
        True, "sparse: keep the gradient of the head's parameters exact."
    )
    activation_bytes: Count | None = setting(
        None,
        "Bytes that the head's forward may store for its backward; None: what a frozen head "
        "stores.",
    )
    loss_kwargs: Options = setting(None, "Settings of the loss without an option here.")

    # logging and output
    log_completions: bool = setting(
        False, "Print completions when logging, and write them to output_dir/completions."
    )
    num_completions_to_print: Count | None = setting(
        None, "How many completions to print; None: all."
    )
    log_unique_prompts: bool = setting(False, "Print and write only one completion of each prompt.")
    log_multimodal: bool = setting(True, "Keep small copies of a prompt's images for the report.")
    overwrite_output_dir: bool = setting(
        False, "Train in a folder that has another run's files, and overwrite them."
    )
    write_report: bool = setting(
        True, "Write output_dir/report.html with every checkpoint and at the end."
    )

    # OLD_NAMES; each is None after construction
    wandb_log_unique_prompts: bool | None = setting(None, "Deprecated: use log_unique_prompts.")
    use_liger_loss: bool | None = setting(None, "Deprecated: the loss is always fused, remove it.")
    vllm_guided_decoding_regex: str | None = setting(
        None, "Deprecated: use vllm_structured_outputs_regex."
    )

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Raise TypeError for an unknown field, with a similar name."""
        parameters = inspect.signature(cls.__init__).parameters
        takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        for name in values:
            if name not in parameters and not takes_all:
                raise TypeError(
                    f"{cls.__name__}.__init__() got an unexpected keyword argument {name!r}"
                    f"{hint(name, parameters)}"
                )
        return super().__new__(cls)


@cache
def annotated_fields(config: type) -> dict[str, tuple[Any, list[Any]]]:
    """Return each field's type, and the ``Annotated`` metadata of it or of a part of it."""
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
