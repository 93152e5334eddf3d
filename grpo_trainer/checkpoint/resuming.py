"""Stopping a run, and finding a checkpoint from which it can continue exactly."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate.utils import is_peft_model
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from grpo_trainer.checkpoint.files import (
    MODEL_ENTRIES,
    SETTINGS_FILE,
    StartError,
    check_contents,
    checkpoints,
    read_manifest,
)
from grpo_trainer.config import GRPOConfig, import_path
from grpo_trainer.masking import masked

# Patterns of the fields of GRPOConfig that do not change training. All others are compared,
# including fields that are added later, unless they are named here.
_FREE = (
    # display and storage
    "*output_dir", "disable_tqdm", "*hub*", "*metrics*", "*report*",
    "include_num_input_tokens_seen", "log_*", "logging_*", "num_completions_to_print", "project",
    "run_name", "save_*", "trackio_*",
    # evaluation, which also uses the data loaders: training prompts come from a stream
    "*_best_model*", "*eval*", "dataloader_*", "greater_is_better", "label_names",
    "prediction_loss_only",
    # how this process was started
    "*_from_checkpoint", "ddp_*", "do_*", "enable_jit_checkpoint", "ignore_data_skip", "local_rank",
    "trust_remote_code",
    # memory, and the connection to the engine
    "*_checkpointing*", "ds3_gather_for_generation", "mlp_tile_tokens", "torch_empty_cache_steps",
    "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port",
    "vllm_request_timeout", "vllm_server_*", "vllm_tensor_parallel_size", "vllm_weight*",
    # compared in another form
    "generation_batch_size", "max_steps", "num_train_epochs",
)  # fmt: skip
# learning rates that do not depend on the number of steps
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau")
_ADAPTER = "peft_config["  # before the adapter's name
# fields of an adapter's config about its origin, and how it was loaded
_ORIGIN = ("base_model_name_or_path", "revision", "inference_mode", "peft_version")
_NAME = "resume_from_checkpoint"
_NOTICE = b"\nCtrl-C: finishing and saving this step; press Ctrl-C again to stop at once\n"
_STDERR = 2


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the settings, by name, that a resumed run must share, as JSON values without
    secrets."""
    args, recipe, data = trainer.args, trainer.recipe, trainer.train_dataset
    settings = {
        name: value
        for name, value in args.to_dict().items()
        if not any(fnmatch(name, pattern) for pattern in _FREE)
    }
    settings |= {
        "number of processes": args.world_size,
        "sharding": trainer._placement.name,
        "rows of train_dataset": len(data) if hasattr(data, "__len__") else None,
        "reward_funcs": list(recipe.rewards),
        "reward_weights": list(recipe.rewards.values()),
        "engine": recipe.engine,
        "peft_config": None,
    }
    if is_peft_model(trainer.model):
        del settings["peft_config"]
        settings |= {
            f"{_ADAPTER}{adapter!r}].{name}": value
            for adapter, config in trainer.model.peft_config.items()
            for name, value in config.to_dict().items()
            if name not in _ORIGIN
        }
    return masked(json.loads(json.dumps(settings | recipe.hooks, default=_plain)))


def _plain(value: Any) -> Any:
    """Return an object for which JSON has no equivalent."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if callable(value):
        return import_path(value)
    if type(value).__repr__ is object.__repr__:  # it contains an address, which differs in each run
        return type(value).__qualname__
    return str(value)


def find_checkpoint(run_dir: Path, asked: str | Path | bool | None, overwrite: bool) -> Path | None:
    """Return the folder of the requested checkpoint; for True, the newest in ``run_dir``.

    Raises:
        ValueError: there is none; or ``run_dir`` has a model or checkpoints of another run, and
            ``overwrite`` is False.
    """
    own = checkpoints(run_dir)
    if asked is True and not own:
        raise ValueError(f"{_NAME}: expected a checkpoint in output_dir {str(run_dir)!r}, got none")
    folder = None
    if asked is not None and asked is not False:
        folder = own[-1] if asked is True else Path(asked)
        if not folder.is_dir():
            raise ValueError(f"{_NAME}: expected a folder, got {str(asked)!r}")
    goes_on = folder is not None and folder.resolve().parent == run_dir.resolve()
    models = [run_dir / name for name in MODEL_ENTRIES if (run_dir / name).exists()]
    kept = [*models, *own]
    if kept and not goes_on and not overwrite:
        raise ValueError(
            "output_dir: expected a folder without a model or checkpoints of another run, got "
            f"{str(run_dir)!r} with {kept[-1].name}; choose another folder, continue from a "
            "checkpoint with resume_from_checkpoint, or overwrite the files with "
            "overwrite_output_dir"
        )
    return folder


def check_checkpoint(folder: Path, args: GRPOConfig, settings: dict[str, Any], steps: int) -> None:
    """Raise ValueError unless a run with these ``settings`` and ``steps`` in all can continue
    exactly from the checkpoint ``folder``. It reads every file."""
    try:
        checksums = read_manifest(folder)
        if SETTINGS_FILE not in checksums:
            raise ValueError(f"{folder} has no {SETTINGS_FILE} (save_only_model omits it)")
        small = {name: checksums.pop(name, "") for name in (SETTINGS_FILE, TRAINER_STATE_NAME)}
        check_contents(folder, small)
        _check_settings(folder, args, settings, steps)
        check_contents(folder, checksums)  # slow for large files, so after the settings
    except StartError:
        raise
    except (OSError, ValueError) as error:
        own = checkpoints(folder.parent)
        older = own[: own.index(folder)] if folder in own else []
        advice = f"; to continue from an older one, pass {str(older[-1])!r}" if older else ""
        raise ValueError(f"{_NAME}: expected a complete checkpoint, but {error}{advice}") from error


def _check_settings(folder: Path, args: GRPOConfig, settings: dict[str, Any], steps: int) -> None:
    """Raise StartError unless the steps before and after the checkpoint can be one run."""
    # a field that did not exist yet had the effect of its default
    written = {item.name: item.default for item in fields(args)}
    # 1.0.0 masked fewer values
    written |= masked(json.loads((folder / SETTINGS_FILE).read_text()))
    gone = {name: None for name in written if name.startswith(_ADAPTER)}
    wrong = [
        f"{name} = {before!r}, got {value!r}"
        for name, value in (gone | settings).items()
        if (before := written.get(name)) != value
    ]
    if wrong:
        raise StartError(
            f"{_NAME}: {folder} was written with {'; '.join(wrong)}, so the run cannot continue "
            "exactly; to train its model with other settings, pass the folder as the model of a "
            "new run"
        )
    before = json.loads((folder / TRAINER_STATE_NAME).read_text())["max_steps"]
    schedule = settings["lr_scheduler_type"]
    same_warmup = args.get_warmup_steps(before) == args.get_warmup_steps(steps)
    if before != steps and not (schedule in _ENDLESS and same_warmup):
        raise StartError(
            f"{_NAME}: {folder} belongs to a run of {before} steps, got max_steps or "
            f"num_train_epochs for {steps}: with lr_scheduler_type={schedule!r} the steps taken so "
            "far would have had other learning rates; only runs with a constant rate can be "
            "extended"
        )


@contextmanager
def ctrl_c_noted(is_main_process: bool) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C inside sets; the next one raises KeyboardInterrupt.

    Outside the main thread, and if SIGINT is ignored or has another handler, nothing changes.
    """
    interrupted = threading.Event()
    usual = signal.default_int_handler

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual)
        if is_main_process:
            os.write(_STDERR, _NOTICE)  # the interrupted code may be in the middle of a print

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) != usual:
        yield interrupted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, usual)


def where_it_stopped(step: int, run_dir: Path, resumable: bool) -> str:
    """Return the message of an interrupted run: its step, and how to continue."""
    stopped, written = f"stopped after step {step}", checkpoints(run_dir)
    if not written or not resumable:
        return f"{stopped}; there is no checkpoint to continue from"
    return (
        f"{stopped}; newest checkpoint: {written[-1]}; to continue from it, pass "
        "--resume_from_checkpoint true, or in Python train(resume_from_checkpoint=True)"
    )
