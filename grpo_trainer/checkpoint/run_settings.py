"""The settings that a checkpoint and a run that resumes from it must share."""

from __future__ import annotations

import json
from typing import Any

from accelerate.utils import is_peft_model
from transformers import Trainer

from grpo_trainer.config import GRPOConfig, import_path

# Fields of GRPOConfig that do not change what is trained. All others are compared, so that one that
# is added later is, too, unless it is named here.
_FREE_PREFIXES = (
    "dataloader_",  # of evaluation: training prompts come from a stream
    "ddp_",
    "eval_",
    "hub_",
    "log_",
    "logging_",
    "save_",
    "trackio_",
    "vllm_server_",
)
_FREE = {
    # what is shown and kept
    "disable_tqdm",
    "include_for_metrics",
    "include_num_input_tokens_seen",
    "num_completions_to_print",
    "output_dir",
    "overwrite_output_dir",
    "project",
    "push_to_hub",
    "report_to",
    "run_name",
    "skip_memory_metrics",
    "write_report",
    # evaluation, and which checkpoint is the best
    "batch_eval_metrics",
    "bf16_full_eval",
    "fp16_full_eval",
    "greater_is_better",
    "label_names",
    "load_best_model_at_end",
    "metric_for_best_model",
    "num_generations_eval",
    "per_device_eval_batch_size",
    "prediction_loss_only",
    # this start of the process
    "do_eval",
    "do_predict",
    "do_train",
    "enable_jit_checkpoint",
    "ignore_data_skip",
    "local_rank",
    "restore_callback_states_from_checkpoint",
    "resume_from_checkpoint",
    "trust_remote_code",
    # memory, and the way to the engine
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "ds3_gather_for_generation",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "torch_empty_cache_steps",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_group_port",
    "vllm_request_timeout",
    "vllm_tensor_parallel_size",
    "vllm_weight_transfer",
    "vllm_weights_folder",
    # compared in another form
    "generation_batch_size",
    "max_steps",
    "num_train_epochs",
    "reward_weights",
}
# learning rates that do not depend on how many steps there are
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau")
_ADAPTER = "peft_config["  # before the name of one
# fields of an adapter's config that say where it is from, and how it was loaded
_ORIGIN = ("base_model_name_or_path", "revision", "inference_mode", "peft_version")


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return those of ``trainer``, by name, as JSON holds them."""
    args, recipe, data = trainer.args, trainer.recipe, trainer.train_dataset
    parts = {
        "number of processes": args.world_size,
        "sharding": trainer._placement.name,
        "rows of train_dataset": len(data) if hasattr(data, "__len__") else None,
        "reward_funcs": list(recipe.rewards),
        "reward_weights": list(recipe.rewards.values()),
        "engine": recipe.engine,
        "dtypes of the model": sorted({str(weight.dtype) for weight in trainer.model.parameters()}),
    }
    settings = _compared(args) | parts | trainer.interaction_settings | _adapters(trainer.model)
    return json.loads(json.dumps(settings, default=_plain))


def differences(
    written: dict[str, Any], settings: dict[str, Any], defaults: dict[str, Any]
) -> list[str]:
    """Return where a run differs from the one that wrote a checkpoint.

    A field that was not there yet when the checkpoint was written had the effect of its default.
    """
    gone = {name: None for name in written if name.startswith(_ADAPTER)}
    return [
        f"{name} = {before!r}, got {value!r}"
        for name, value in (gone | settings).items()
        if (before := written.get(name, defaults.get(name))) != value
    ]


def may_end_elsewhere(args: GRPOConfig, before: int, now: int) -> bool:
    """Return whether the steps taken are alike in runs of ``now`` and of ``before`` steps."""
    same_warmup = args.get_warmup_steps(before) == args.get_warmup_steps(now)
    return before == now or (args.lr_scheduler_type in _ENDLESS and same_warmup)


def _compared(args: GRPOConfig) -> dict[str, Any]:
    return {
        name: value
        for name, value in args.to_dict().items()
        if name not in _FREE and not name.startswith(_FREE_PREFIXES)
    }


def _adapters(model: Any) -> dict[str, Any]:
    """Return the fields of the adapters' configs."""
    if not is_peft_model(model):
        return {"peft_config": None}
    return {
        f"{_ADAPTER}{adapter!r}].{name}": value
        for adapter, config in model.peft_config.items()
        for name, value in config.to_dict().items()
        if name not in _ORIGIN
    }


def _plain(value: Any) -> Any:
    """Return an object without an equal in JSON."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if callable(value):
        return import_path(value)
    if type(value).__repr__ is object.__repr__:  # which tells an address, another one in each run
        return type(value).__qualname__
    return str(value)
