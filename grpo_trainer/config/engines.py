"""The fields of GRPOConfig that choose a rollout engine and set it up."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, TypeVar

from transformers import GenerationConfig, TrainingArguments

from grpo_kernels import LossConfig
from grpo_kernels.losses import CORRECTION_MODES
from grpo_trainer.config.checks import (
    AtLeastOne,
    NotNegative,
    Options,
    Port,
    Positive,
    Share,
    Text,
    annotated_fields,
    check_url,
    choice,
    default_of,
    options,
    setting,
)

_IMPLEMENTATIONS = ("auto", "vllm", "transformers")
_EITHER = "colocate or server"

# settings of vLLM in one of its modes
T = TypeVar("T")
Colocated = Annotated[T, "colocate"]
Served = Annotated[T, "server"]
EitherMode = Annotated[T, _EITHER]


@dataclass
class RolloutFields:
    """How completions are generated. The names are those that TRL's users know."""

    rollout_engine: Text | None = setting(
        None, "Name of a registered rollout engine. Default: by use_vllm and vllm_mode."
    )
    use_vllm: bool = setting(False, "Generate with vLLM.")
    use_transformers_continuous_batching: bool = setting(
        False, "Generate with transformers' continuous batching."
    )
    transformers_continuous_batching_config: Options = setting(
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
    vllm_mode: Annotated[str, choice(("colocate", "server"))] = setting(
        "colocate",
        "colocate: vLLM inside the training processes. server: a vLLM server that was started "
        "with `grpo-train serve`.",
    )
    vllm_model_impl: Colocated[Annotated[str, choice(_IMPLEMENTATIONS)]] = setting(
        "vllm", f"Whose model code a colocated vLLM runs: {', '.join(_IMPLEMENTATIONS)}."
    )
    vllm_enable_sleep_mode: Colocated[bool] = setting(
        False, "Free the memory of a colocated vLLM between generations. Needs a GPU."
    )
    vllm_structured_outputs_regex: EitherMode[Text | None] = setting(
        None, "Regular expression that the text of every completion matches."
    )
    vllm_server_base_url: Served[Annotated[str | None, check_url]] = setting(
        None, "URL of the server, in place of vllm_server_host and vllm_server_port."
    )
    vllm_server_host: Served[Text] = setting("127.0.0.1", "Host of the server.")
    vllm_server_port: Served[Port] = setting(8000, "Port of the server.")
    vllm_server_timeout: Served[Positive] = setting(
        240.0, "Seconds to wait for a server that is not up yet."
    )
    vllm_request_timeout: Served[Positive] = setting(
        1800.0, "Seconds that the server may take for one generation batch."
    )
    vllm_group_port: Served[Port] = setting(
        51216, "Port on which weights reach a server on other GPUs."
    )
    vllm_weight_transfer: Served[Annotated[str, choice(("auto", "file", "nccl"))]] = setting(
        "auto",
        "How weights reach the server. nccl: from GPU to GPU. file: through a folder that both "
        "see. auto: nccl if both sides are on GPUs and the server was started for it.",
    )
    vllm_weights_folder: Served[Text | None] = setting(
        None, "Folder for weight files. Default: vllm_weights in output_dir."
    )
    vllm_gpu_memory_utilization: Colocated[Share] = setting(
        0.3, "Share of the GPU's memory for a colocated vLLM."
    )
    vllm_max_model_length: Colocated[AtLeastOne | None] = setting(
        None, "Longest prompt plus completion of a colocated vLLM. Default: the model's."
    )
    vllm_tensor_parallel_size: Colocated[AtLeastOne] = setting(
        1, "Processes that share one colocated vLLM, split over their GPUs."
    )
    vllm_engine_kwargs: Colocated[Options] = setting(
        None, "More arguments of a colocated vLLM engine (vllm.LLM), over the ones set here."
    )
    vllm_importance_sampling_correction: bool = setting(
        True,
        "Weight the loss by the probability of the policy over that of the engine, where "
        "the engine reports it.",
    )
    vllm_importance_sampling_mode: Annotated[str, choice(CORRECTION_MODES)] = setting(
        "sequence_mask",
        f"How: {', '.join(CORRECTION_MODES)}. truncate clips to the bounds, mask drops "
        "what is outside, k1 to k3 drop it and do not weight the rest.",
    )
    vllm_importance_sampling_clip_max: Positive | None = setting(3.0, "Upper bound; None: none.")
    vllm_importance_sampling_clip_min: NotNegative | None = setting(
        None, "Lower bound; None: none."
    )


# what generation shares with the loss is set once, in the field named here
_SHARED_WITH_THE_LOSS = {
    "temperature": "temperature",
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "max_tokens": "max_completion_length",
    "n": "num_generations",
    "num_return_sequences": "num_generations",
}


def check_engine(args: TrainingArguments, loss: LossConfig) -> None:
    """Raise ValueError unless the engine's settings fit together, and fit ``loss``."""
    _check_unused(args)
    _check_generation(args)
    if args.use_sampling_mask:
        top_k = options("generation_kwargs", args.generation_kwargs).get("top_k", args.top_k)
        if top_k < 1:
            raise ValueError(
                "use_sampling_mask: expected top_k >= 1 with it, which bounds how many ids are "
                f"left for a token, got {top_k}"
            )
    if args.use_vllm or args.use_transformers_continuous_batching:
        _check_correction(args, loss)


def _check_correction(args: TrainingArguments, loss: LossConfig) -> None:
    """Check what corrects for the log-probabilities that the engine reports."""
    mode = loss.correction_mode
    if mode is None:
        return
    filters = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if any(filters.values()) and not args.use_sampling_mask:
        used = ", ".join(name for name, on in filters.items() if on)
        warnings.warn(
            f"{used}: the engine reports log-probabilities after this filter, the policy's are of "
            "the whole vocabulary; vllm_importance_sampling_correction corrects for that, too, "
            "and use_sampling_mask makes them alike",
            stacklevel=5,
        )
    if loss.surrogate.uses_rollout_weight and mode.per_sequence:
        per_token = [name for name, mode in CORRECTION_MODES.items() if not mode.per_sequence]
        raise ValueError(
            f"vllm_importance_sampling_mode: expected one of {', '.join(per_token)} with "
            f"{loss.loss_type}, which weights tokens itself; got "
            f"{args.vllm_importance_sampling_mode!r}"
        )


def _check_unused(args: TrainingArguments) -> None:
    """Raise for vLLM's settings that have no effect in the mode; warn of others."""
    unused = []
    for name, (_, marks) in annotated_fields(RolloutFields).items():
        for mode in (mark for mark in marks if isinstance(mark, str)):
            if getattr(args, name) == default_of(args, name):
                continue
            if not args.use_vllm:
                unused.append(name)
            elif mode not in (_EITHER, args.vllm_mode):
                raise ValueError(f"{name}: expected only with vllm_mode={mode!r}")
    if unused and args.rollout_engine is None:
        warnings.warn(f"{', '.join(unused)}: no effect without use_vllm", stacklevel=5)


def _check_generation(args: TrainingArguments) -> None:
    own_names = args.use_vllm or args.rollout_engine is not None  # checked by that engine
    known = GenerationConfig(cache_implementation=args.cache_implementation)  # checks it
    for name in options("generation_kwargs", args.generation_kwargs):
        if name in _SHARED_WITH_THE_LOSS:
            raise ValueError(
                f"generation_kwargs[{name!r}]: expected the field {_SHARED_WITH_THE_LOSS[name]} "
                "instead, which the loss reads too"
            )
        if not own_names and name in ("stop", "stop_strings"):
            raise ValueError(
                f"generation_kwargs[{name!r}]: expected no text where transformers generates; "
                "token ids that end a completion are its 'stop_token_ids'"
            )
        if not own_names and name != "stop_token_ids" and not hasattr(known, name):
            raise ValueError(f"generation_kwargs: GenerationConfig has no {name!r}")
