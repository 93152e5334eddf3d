"""``grpo-train``: a training run from the command line or a YAML file."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from grpo_kernels.tools import read_in_part
from grpo_trainer.checkpoint import CheckpointError, StartError, find_checkpoint
from grpo_trainer.cli.arguments import (
    RunArguments,
    get_peft_config,
    get_quantization_config,
    loading_options,
)
from grpo_trainer.cli.parser import LaunchParser
from grpo_trainer.cli.usage import USAGE
from grpo_trainer.common import load_function
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import PromptDataset, distrust_rows, load_prompts, looks_local
from grpo_trainer.report import REPORT_NAME
from grpo_trainer.report import main as report
from grpo_trainer.rewards import RewardError
from grpo_trainer.trainer import GRPOTrainer
from grpo_trainer.vllm import ServerError

_FOR_THE_USER = (ImportError, ServerError, CheckpointError, StartError, RewardError)
_HOOKS = ("rollout_func", "environment_factory", "advantages")  # given as import paths
_MODEL_ENTRIES = ("config.json", "adapter_config.json")  # of a model, or of only its adapter
_CHECKPOINT = re.compile(r"checkpoint-\d+")  # no model has such a name


def main(argv: Sequence[str]) -> None:
    """Train, and save the model, its tokenizer and ``trainer_state.json`` to ``output_dir``.

    ``serve ...`` (or ``vllm-serve``) starts a vLLM server instead, and ``report RUN ...`` writes
    the report of a run, or a comparison of several.

    Errors that the user can fix are one line on stderr, with exit code 2. Other errors while
    training runs keep their traceback.
    """
    if argv and argv[0] in ("serve", "vllm-serve"):
        from grpo_trainer.cli.serve import main as serve

        with read_in_part():
            return serve(argv[1:])
    parser, trainer = run_parser(), None
    try:
        if "--help-all" in argv:
            with read_in_part():
                return parser.print_help()
        if argv and argv[0] == "report":
            with read_in_part():
                return report(argv[1:])
        parser.start_if_asked(argv)
        trainer = build_trainer(argv)
        return _train(trainer)
    except (ValueError, OSError, *_FOR_THE_USER) as error:
        if trainer is not None and not _is_for_the_user(error):
            raise
        parser.error(str(error))


def _train(trainer: GRPOTrainer) -> None:
    output = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    state = Path(trainer.args.output_dir) / TRAINER_STATE_NAME
    if output.metrics or not state.exists():  # without a step, the existing file stays
        if not output.metrics:  # the run was ended after its last checkpoint, perhaps at once
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        trainer.save_state()
    report_file = Path(trainer.args.output_dir) / REPORT_NAME
    if trainer.args.write_report and trainer.is_world_process_zero() and report_file.exists():
        print(f"report: {report_file}")
    if trainer.accelerator.num_processes > 1:  # a process that exits right away may abort
        trainer.rollouts.close()  # an engine in the process has its own process groups
        trainer.accelerator.end_training()


def _is_for_the_user(error: Exception) -> bool:
    """Return whether an error during training is one that the user can fix.

    A ValueError that another package raises while training runs, or a line such as ``int(text)``
    here, is a bug and needs its traceback.
    """
    if isinstance(error, _FOR_THE_USER):
        return True
    if isinstance(error, OSError):
        return error.filename is not None  # a file that the user can check
    frame = traceback.extract_tb(error.__traceback__)[-1]
    here = Path(__file__).parents[1]
    return Path(frame.filename).is_relative_to(here) and (frame.line or "").startswith("raise ")


def build_trainer(argv: Sequence[str]) -> GRPOTrainer:
    """Return the trainer that the command line describes.

    Raises:
        ValueError: an argument is wrong, or a model, dataset or reward is missing.
    """
    run, args = parse(argv)
    _check_output(args.output_dir)
    model = _existing_model(run.model_name_or_path)
    # check that a run can start or continue there, before anything is loaded
    find_checkpoint(Path(args.output_dir), args.resume_from_checkpoint, args.overwrite_output_dir)
    train, evaluation = _datasets(run, args)
    names = (run.dataset_name, run.eval_dataset_name)
    if any(name is not None and not Path(name).exists() for name in names):
        distrust_rows(args)
    paths = {name: getattr(run, name) for name in _HOOKS}
    hooks: dict[str, Any] = {
        # the name of a built-in comparison is not an import path
        name: path
        if (name, "." in path) == ("advantages", False)
        else load_function(path, f"--{name}")
        for name, path in paths.items()
        if path is not None
    }
    trainer = GRPOTrainer(
        model,
        run.rewards or None,
        args,
        train,
        evaluation,
        quantization_config=get_quantization_config(run, args),
        peft_config=get_peft_config(run),
        tools=[load_function(path, "--tools") for path in run.tools or ()],
        **hooks,
    )
    trainer.recipe = replace(trainer.recipe, dataset=run.dataset_name)
    return trainer


def parse(argv: Sequence[str]) -> tuple[RunArguments, GRPOConfig]:
    """Read the command line over the ``--config`` file over the defaults.

    Raises:
        ValueError: the file is wrong, an argument is unknown, or a value is out of range.
    """
    parser = run_parser()
    run, args = parser.parse_args_and_config(argv)
    parser.check_started()
    if not (run.rewards or run.environment_factory or args.teacher):
        raise ValueError("--reward_funcs is required")
    named, own = loading_options(run), options("model_init_kwargs", args.model_init_kwargs)
    for name in sorted(set(named) & set(own)):
        if named[name] != own[name]:
            raise ValueError(
                f"{name}: expected it once, got {named[name]!r} and {own[name]!r} in "
                "model_init_kwargs"
            )
    if named:
        args.model_init_kwargs = named | own
    resume = args.resume_from_checkpoint  # transformers declares it as text
    args.resume_from_checkpoint = {"true": True, "false": None}.get(str(resume).lower(), resume)
    return run, args


def run_parser() -> LaunchParser:
    """Return the parser for the arguments of a run."""
    return LaunchParser((RunArguments, GRPOConfig), prog="grpo-train", usage=USAGE)


def _datasets(
    run: RunArguments, args: GRPOConfig
) -> tuple[PromptDataset | None, PromptDataset | None]:
    """Load the datasets for training and evaluation."""
    config, streaming = run.dataset_config, run.dataset_streaming
    train = evaluation = None
    if run.dataset_name is not None:
        train = load_prompts(run.dataset_name, run.dataset_train_split, config, streaming=streaming)
        if args.eval_strategy != "no" and not Path(run.dataset_name).is_file():
            run = replace(run, eval_dataset_name=run.eval_dataset_name or run.dataset_name)
    if run.eval_dataset_name is not None:
        config = None if Path(run.eval_dataset_name).is_file() else config
        evaluation = load_prompts(run.eval_dataset_name, run.dataset_test_split, config)
    return train, evaluation


def _check_output(name: str) -> None:
    """Raise ValueError unless the folder ``name`` is writable, or can be created."""
    folder = Path(name)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--output_dir: expected a folder, got {name!r}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir: expected a writable folder, got {name!r}")


def _existing_model(name: str | None) -> str:
    assert name is not None  # checked by RunArguments
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / entry).is_file() for entry in _MODEL_ENTRIES):
            raise ValueError(
                f"--model_name_or_path: no {' or '.join(_MODEL_ENTRIES)} in folder {name!r}"
            )
        return str(path)
    if looks_local(name) or _CHECKPOINT.fullmatch(path.name):
        raise ValueError(f"--model_name_or_path: no folder {name!r}")
    return name
