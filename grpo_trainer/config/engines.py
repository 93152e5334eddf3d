"""The fields of GRPOConfig that choose a rollout engine and set it up."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from transformers import TrainingArguments

from grpo_kernels import LossConfig
from grpo_kernels.losses import CORRECTION_MODES
from grpo_trainer.common import masked_url
from grpo_trainer.config.checks import check_choice, check_number, options, setting

MODES = ("colocate", "server")
_IMPLEMENTATIONS = ("auto", "vllm", "transformers")
_TRANSFERS = ("auto", "file", "nccl")


@dataclass
class RolloutFields:
    """How completions are generated. The names are those that TRL's users know."""

    rollout_engine: str | None = setting(
        None, "Name of a registered rollout engine. Default: by use_vllm and vllm_mode."
    )
    use_vllm: bool = setting(False, "Generate with vLLM.")
    use_transformers_continuous_batching: bool = setting(
        False, "Generate with transformers' continuous batching."
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = setting(
        None, "Fields of transformers' ContinuousBatchingConfig, such as num_blocks."
    )
    overlap_generation: bool = setting(
        False,
        "Generate the next batch while the current one trains, by weights that are one "
        "generation batch old; the loss corrects for that. Needs an engine with weights of "
        "its own, such as a vLLM server.",
    )
    use_sampling_mask: bool = setting(
        False,
        "With top_k: let the engine report which ids top_k, top_p and min_p left for each "
        "token, and take all probabilities over these ids, as they were sampled.",
    )
    vllm_mode: str = setting(
        "colocate",
        "colocate: vLLM inside the training processes. server: a vLLM server that was started "
        "with `grpo-train serve`.",
    )
    vllm_model_impl: str = setting(
        "vllm", f"Whose model code a colocated vLLM runs: {', '.join(_IMPLEMENTATIONS)}."
    )
    vllm_enable_sleep_mode: bool = setting(
        False, "Free the memory of a colocated vLLM between generations. Needs a GPU."
    )
    vllm_structured_outputs_regex: str | None = setting(
        None, "Regular expression that the text of every completion matches."
    )
    vllm_server_base_url: str | None = setting(
        None, "URL of the server, in place of vllm_server_host and vllm_server_port."
    )
    vllm_server_host: str = setting("127.0.0.1", "Host of the server.")
    vllm_server_port: int = setting(8000, "Port of the server.")
    vllm_server_timeout: float = setting(240.0, "Seconds to wait for a server that is not up yet.")
    vllm_request_timeout: float = setting(
        1800.0, "Seconds that the server may take for one generation batch."
    )
    vllm_group_port: int = setting(51216, "Port on which weights reach a server on other GPUs.")
    vllm_weight_transfer: str = setting(
        "auto",
        "How weights reach the server. nccl: from GPU to GPU. file: through a folder that both "
        "see. auto: nccl if both sides are on GPUs and the server was started for it.",
    )
    vllm_weights_folder: str | None = setting(
        None, "Folder for weight files. Default: vllm_weights in output_dir."
    )
    vllm_gpu_memory_utilization: float = setting(
        0.3, "Share of the GPU's memory for a colocated vLLM."
    )
    vllm_max_model_length: int | None = setting(
        None, "Longest prompt plus completion of a colocated vLLM. Default: the model's."
    )
    vllm_tensor_parallel_size: int = setting(
        1, "Processes that share one colocated vLLM, split over their GPUs."
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = setting(
        None, "More arguments of a colocated vLLM engine (vllm.LLM), over the ones set here."
    )
    vllm_importance_sampling_correction: bool = setting(
        True,
        "Weight the loss by the probability of the policy over that of the engine, where "
        "the engine reports it.",
    )
    vllm_importance_sampling_mode: str = setting(
        "sequence_mask",
        f"How: {', '.join(CORRECTION_MODES)}. truncate clips to the bounds, mask drops "
        "what is outside.",
    )
    vllm_importance_sampling_clip_max: float | None = setting(3.0, "Upper bound; None: none.")
    vllm_importance_sampling_clip_min: float | None = setting(None, "Lower bound; None: none.")


_COLOCATED = (
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_engine_kwargs",
)
_SERVER = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_request_timeout",
    "vllm_group_port",
    "vllm_weight_transfer",
    "vllm_weights_folder",
)

# any text goes here, but nothing else
_TEXTS = (
    "rollout_engine",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_structured_outputs_regex",
    "vllm_weights_folder",
)


def correction_options(args: RolloutFields) -> dict[str, Any]:
    """Return the fields of LossConfig that correct for what the engine sampled from.

    Raises:
        ValueError: they are out of range.
    """
    mode = args.vllm_importance_sampling_mode
    check_choice("vllm_importance_sampling_mode", mode, CORRECTION_MODES)
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    if high is not None:
        check_number("vllm_importance_sampling_clip_max", high, 0, above=True)
    if low is not None:
        check_number("vllm_importance_sampling_clip_min", low, 0)
    if high is not None and low is not None and low >= high:
        raise ValueError(
            "vllm_importance_sampling_clip_min: expected a number below "
            f"vllm_importance_sampling_clip_max = {high!r}, got {low!r}"
        )
    return {
        "rollout_correction_mode": mode if args.vllm_importance_sampling_correction else None,
        "rollout_correction_max": high,
        "rollout_correction_min": low,
    }


def check_rollout(args: TrainingArguments, loss: LossConfig) -> None:
    """Raise ValueError unless the engine's settings are in range and fit together and ``loss``."""
    check_choice("vllm_mode", args.vllm_mode, MODES)
    check_choice("vllm_model_impl", args.vllm_model_impl, _IMPLEMENTATIONS)
    check_choice("vllm_weight_transfer", args.vllm_weight_transfer, _TRANSFERS)
    check_number("vllm_gpu_memory_utilization", args.vllm_gpu_memory_utilization, 0, 1, above=True)
    for name in ("vllm_server_timeout", "vllm_request_timeout"):
        check_number(name, getattr(args, name), 0, above=True)
    for name in ("vllm_server_port", "vllm_group_port"):
        check_number(name, getattr(args, name), 1, 65535)
    options("vllm_engine_kwargs", args.vllm_engine_kwargs)
    for name in _TEXTS:
        value = getattr(args, name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name}: expected a text, got {value!r}")
    if args.vllm_server_base_url is not None:
        check_url("vllm_server_base_url", args.vllm_server_base_url)
    _check_one_engine(args)
    _check_unused(args)
    _check_overlap(args, loss)
    _check_sampling_mask(args)
    mode = loss.rollout_correction_mode
    reports = args.use_vllm or args.use_transformers_continuous_batching  # log-probabilities
    filters = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if reports and mode is not None and any(filters.values()) and not args.use_sampling_mask:
        used = ", ".join(name for name, on in filters.items() if on)
        warnings.warn(
            f"{used}: the engine reports log-probabilities after this filter, the policy's are of "
            "the whole vocabulary; vllm_importance_sampling_correction corrects for that, too, "
            "and use_sampling_mask makes them alike",
            stacklevel=4,
        )
    if reports and mode is not None and loss.surrogate.uses_rollout_weight:
        per_token = [name for name, mode in CORRECTION_MODES.items() if not mode.per_sequence]
        if mode not in per_token:
            raise ValueError(
                f"vllm_importance_sampling_mode: expected one of {', '.join(per_token)} with "
                f"{loss.loss_type}, which weights tokens itself; got {mode!r}"
            )


def _check_overlap(args: TrainingArguments, loss: LossConfig) -> None:
    if args.overlap_generation and loss.rollout_correction_mode is None:
        raise ValueError(
            "overlap_generation: expected vllm_importance_sampling_correction=True with it, which "
            "corrects for completions of older weights, got False"
        )


def _check_sampling_mask(args: TrainingArguments) -> None:
    if not args.use_sampling_mask:
        return
    top_k = options("generation_kwargs", args.generation_kwargs).get("top_k", args.top_k)
    if top_k < 1:
        raise ValueError(
            "use_sampling_mask: expected top_k >= 1 with it, which bounds how many ids are left "
            f"for a token, got {top_k}"
        )
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "use_sampling_mask: expected False with use_transformers_continuous_batching, which "
            "does not report what its filters left"
        )


def check_url(name: str, url: str) -> None:
    """Raise ValueError unless ``url`` is that of a web server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port
        good = False
    if not good:
        raise ValueError(f"{name}: expected http://host:port, got {masked_url(url)!r}")


def _check_one_engine(args: TrainingArguments) -> None:
    chosen = ("use_vllm", "use_transformers_continuous_batching", "rollout_engine")
    given = [name for name in chosen if getattr(args, name)]
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: expected at most one of them, which is the engine")
    if args.cache_implementation is not None and given and args.rollout_engine is None:
        raise ValueError(
            f"cache_implementation: expected None with {given[0]}, which has a cache of its own, "
            f"got {args.cache_implementation!r}"
        )
    if args.transformers_continuous_batching_config and given != [chosen[1]]:
        raise ValueError(f"transformers_continuous_batching_config: expected only with {chosen[1]}")


def _check_unused(args: TrainingArguments) -> None:
    """Raise for vLLM's settings that have no effect in the mode; warn of others."""
    defaults = {item.name: item.default for item in fields(RolloutFields)}
    changed = {name for name, default in defaults.items() if getattr(args, name) != default}
    if not args.use_vllm:
        unused = sorted(changed & {*_COLOCATED, *_SERVER, "vllm_structured_outputs_regex"})
        if unused and args.rollout_engine is None:
            warnings.warn(f"{', '.join(unused)}: no effect without use_vllm", stacklevel=4)
        return
    others, mode = (_COLOCATED, "colocate") if args.vllm_mode == "server" else (_SERVER, "server")
    wrong = sorted(changed & set(others))
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: expected only with vllm_mode={mode!r}")
