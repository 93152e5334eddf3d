"""``grpo-train``: a training run from the command line or a YAML file."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from grpo_kernels.tools import closest
from grpo_trainer import GRPOTrainer
from grpo_trainer.checkpoint import CheckpointError, StartError
from grpo_trainer.cli.peft_arguments import AdapterArguments
from grpo_trainer.cli.run_file import RunFile, read_run_file
from grpo_trainer.common import printable
from grpo_trainer.config import GRPOConfig, load_function, load_module
from grpo_trainer.data import load_prompts, looks_local
from grpo_trainer.monitor.report import main as report
from grpo_trainer.rollout import ServerError


@dataclass
class RunArguments(AdapterArguments):
    """What is trained, on what, by which rewards.

    Construction imports ``import_modules``, so it comes before that of GRPOConfig, which knows only
    the losses that are registered by then.
    """

    model_name_or_path: str | None = HfArg(default=None, help="Model folder or hub id.")
    dataset_name: str | None = HfArg(
        default=None, help="Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub id."
    )
    reward_funcs: list[str] | None = HfArg(
        default=None,
        help="Built-in rewards, import paths package.module.function, reward models (a folder or a "
        "hub id owner/name). Settings stand in parentheses: name(key=value, ...).",
    )
    tools: list[str] | None = HfArg(
        default=None, help="Import paths of functions that the model can call."
    )
    environment_factory: str | None = HfArg(
        default=None, help="Import path of a class: each completion acts upon one of its objects."
    )
    rollout_func: str | None = HfArg(
        default=None, help="Import path of a function (prompts, trainer) that makes completions."
    )
    import_modules: list[str] | None = HfArg(
        default=None, help="Modules to import first: they register losses that loss_type may name."
    )
    eval_dataset_name: str | None = HfArg(
        default=None, help="Prompts for evaluation, named in the same way."
    )
    dataset_config: str | None = HfArg(default=None, help="Configuration of a hub dataset.")
    dataset_train_split: str = HfArg(
        default="train", help="Split for training, of a folder or a hub dataset."
    )
    dataset_test_split: str = HfArg(
        default="test", help="Split for evaluation, of a folder or a hub dataset."
    )

    def __post_init__(self) -> None:
        needed = ["model_name_or_path"]
        if not self.environment_factory:  # which may have prompts and a reward
            needed += ["dataset_name", "reward_funcs"]
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"--{name} is required")
        super().__post_init__()
        if os.getcwd() not in sys.path:
            # modules beside the user's data; at the end: a file there replaces no installed module
            sys.path.append(os.getcwd())
        for name in self.import_modules or ():
            load_module(name, "--import_modules")


class _Parser(HfArgumentParser):
    source = ""  # where the words come from, for messages

    def error(self, message: str) -> NoReturn:
        fail(self.source + message)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and leave the model, its tokenizer and ``trainer_state.json`` in ``output_dir``.

    ``serve ...`` starts a vLLM server instead, ``report RUN ...`` writes the report of a run or
    compares several.

    What the user can put right ends in one line on stderr and exit code 2. Other errors of a
    running training keep their traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "serve":
        from grpo_trainer.cli.serve import main as serve

        return serve(argv[1:])
    try:
        if argv and argv[0] == "report":
            report(argv[1:])
            return None
        trainer = build_trainer(argv)
    except (ValueError, ImportError, OSError, ServerError) as error:
        fail(str(error))
    try:
        _train(trainer)
    except (ImportError, ServerError, CheckpointError, StartError) as error:
        fail(str(error))
    except ValueError as error:
        if not _raised_by_a_check(error):
            raise
        fail(str(error))
    except OSError as error:
        if error.filename is None:  # then it is no file that the user could look at
            raise
        fail(str(error))


def _train(trainer: GRPOTrainer) -> None:
    resume = trainer.args.resume_from_checkpoint
    newest = str(resume).lower() == "true"
    output = trainer.train(resume_from_checkpoint=True if newest else resume)
    trainer.save_model()
    if output.metrics:  # without a step the state is the one that is there
        trainer.save_state()
    if trainer.accelerator.num_processes > 1:  # one that just leaves may abort
        trainer.rollouts.close()  # an engine in the process has groups of its own
        trainer.accelerator.end_training()


def _raised_by_a_check(error: ValueError) -> bool:
    """Return whether a ``raise`` of this package made it, about what the user gave.

    One that another package raises while training runs, or a line such as ``int(text)`` here, is a
    bug of somebody's and needs its traceback.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    here = Path(__file__).parents[1]
    return Path(frame.filename).is_relative_to(here) and (frame.line or "").startswith("raise ")


def build_trainer(argv: Sequence[str]) -> GRPOTrainer:
    """Return the trainer that the command line describes.

    Raises:
        ValueError: an argument is wrong, or a model, dataset or reward is not there.
    """
    run, args = parse(argv)
    _check_output(args.output_dir)
    model = _existing_model(run.model_name_or_path)
    train, evaluation = (
        None if name is None else load_prompts(name, split, run.dataset_config)
        for name, split in (
            (run.dataset_name, run.dataset_train_split),
            (run.eval_dataset_name, run.dataset_test_split),
        )
    )
    trainer = GRPOTrainer(
        model,
        run.reward_funcs,
        args,
        train,
        evaluation,
        quantization_config=run.quantization_config(args),
        peft_config=run.peft_config(),
        tools=[load_function(path, "--tools") for path in run.tools or ()],
        rollout_func=_imported("--rollout_func", run.rollout_func),
        environment_factory=_imported("--environment_factory", run.environment_factory),
    )
    trainer.recipe = replace(trainer.recipe, dataset=run.dataset_name)
    return trainer


def parse(argv: Sequence[str]) -> tuple[RunArguments, GRPOConfig]:
    """Read the command line over the ``--config`` file over the defaults.

    Raises:
        ValueError: the file is wrong, an argument is unknown, or a value is out of range.
    """
    parser = _Parser((RunArguments, GRPOConfig), prog="grpo-train", allow_abbrev=False)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    parser.add_argument("--config", help="YAML file with arguments; the command line overrides it.")
    known, others = parser.parse_known_args(list(argv))
    if others:
        raise ValueError(_unknown(others[0], actions))
    path = known.config
    file = RunFile()
    if path is not None:
        hints = get_type_hints(RunArguments) | get_type_hints(GRPOConfig)
        file = read_run_file(Path(path), actions, hints, GRPOConfig._VALID_DICT_FIELDS)
        parser.set_defaults(**file.values)
        parser.source = f"--config: {path}: "
        parser.parse_args(file.words)  # what is wrong here is wrong in the file
        parser.source = ""
    run, args, _ = parser.parse_args_into_dataclasses(
        [*file.words, *argv], look_for_args_file=False
    )
    return run, args


def fail(message: str) -> NoReturn:
    """Print one line to stderr, and exit with code 2."""
    print(f"grpo-train: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(2)


def _unknown(word: str, known: Iterable[str]) -> str:
    if not word.startswith("--"):
        return f"expected --name value, got {word!r}"
    option = word.partition("=")[0]
    name = option.removeprefix("--").replace("-", "_")
    return f"{option}: there is no such argument{closest(name, known)}"


def _imported(argument: str, path: str | None) -> Callable[..., Any] | None:
    return None if path is None else load_function(path, argument)


def _check_output(name: str) -> None:
    """Raise ValueError unless files can be written to the folder ``name``, or it can be made."""
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
        if not (path / "config.json").is_file():
            raise ValueError(f"--model_name_or_path: no config.json in folder {name!r}")
        return str(path)
    if looks_local(name):
        raise ValueError(f"--model_name_or_path: no folder {name!r}")
    return name
