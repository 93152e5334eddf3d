"""``grpo-train``: a training run from the command line or a YAML file."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, ProgressCallback

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import load_prompts, looks_local
from grpo_trainer.progress import RewardProgress
from grpo_trainer.trainer import GRPOTrainer


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass
class RunArguments:
    """What is trained, on what, by which rewards."""

    model_name_or_path: str | None = field(default=None, metadata=_help("Model folder or hub id."))
    dataset_name: str | None = field(
        default=None,
        metadata=_help("Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub id."),
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata=_help("Built-in rewards or import paths package.module.function."),
    )
    eval_dataset_name: str | None = field(
        default=None, metadata=_help("Prompts for evaluation, named in the same way.")
    )
    dataset_config: str | None = field(
        default=None, metadata=_help("Configuration of a hub dataset.")
    )
    dataset_train_split: str = field(
        default="train", metadata=_help("Split for training, of a folder or a hub dataset.")
    )
    dataset_test_split: str = field(
        default="test", metadata=_help("Split for evaluation, of a folder or a hub dataset.")
    )

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "dataset_name", "reward_funcs"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is required")


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and leaves the model, its tokenizer and ``trainer_state.json`` in ``output_dir``.

    What the user can put right ends in one line on stderr and exit code 2.
    """
    try:
        trainer = build_trainer(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        fail(str(error))
    resume = trainer.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    trainer.save_model()
    trainer.save_state()


def build_trainer(argv: Sequence[str]) -> GRPOTrainer:
    """The trainer that the command line describes.

    Raises:
        ValueError: an argument is wrong, or a model, dataset or reward is not there.
    """
    run, args = parse(argv)
    assert run.dataset_name and run.reward_funcs  # checked by RunArguments
    model = _existing_model(run.model_name_or_path)
    train = load_prompts(run.dataset_name, run.dataset_train_split, run.dataset_config)
    evaluation = None
    if run.eval_dataset_name is not None:
        evaluation = load_prompts(run.eval_dataset_name, run.dataset_test_split, run.dataset_config)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # reward modules beside the user's data
    trainer = GRPOTrainer(model, run.reward_funcs, args, train, evaluation)
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgress())
    return trainer


def parse(argv: Sequence[str]) -> tuple[RunArguments, GRPOConfig]:
    """Command line over ``--config`` file over defaults."""
    parser = _Parser((RunArguments, GRPOConfig), prog="grpo-train", allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with arguments; the command line overrides it.")
    file = parser.parse_known_args(list(argv))[0].config
    if file is not None:
        parser.set_defaults(**_read_config(Path(file)))
    run, args, _ = parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)
    return run, args


def fail(message: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"grpo-train: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--config: no such file {str(path)!r}")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config: {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config: expected `name: value` lines in {path}")
    fields = (*dataclasses.fields(RunArguments), *dataclasses.fields(GRPOConfig))
    unknown = sorted(set(values) - {item.name for item in fields})
    if unknown:
        raise ValueError(f"--config: {path} has unknown arguments: {', '.join(unknown)}")
    return values


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
