"""Files about a run: ``run.json``, and its model card in the hub's format."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import Trainer

from grpo_kernels.tools import cpu_name, installed_version
from grpo_trainer.common import plain, whole
from grpo_trainer.config import NEWER_NAMES, import_path
from grpo_trainer.masking import masked

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"  # in the run's folder
CARD_NAME = "README.md"

_PACKAGES = (
    "grpo-kernels", "torch", "triton", "transformers", "accelerate", "datasets", "peft", "vllm",
)  # fmt: skip

_TEMPLATE = Path(__file__).with_name("card.md")
# the writer: a card whose text no longer matches the digest was edited by a person
_MARK = re.compile(r"\n<!-- written by grpo-trainer, digest (\w+) -->\s*$")
_TAGS = ("grpo", "reinforcement-learning", "grpo-kernels")
_ARXIV = re.compile(r"\d{4}\.\d{4,5}")

History = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Facts about a run that its trainer does not have."""

    rewards: dict[str, float]  # name -> weight
    engine: str  # completes the prompts
    # the user's functions and objects, by argument; a resumed run must have the same
    hooks: dict[str, Any] = field(default_factory=dict)
    dataset: str | None = None  # its name as given, if any


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run."""

    name: str  # in comparisons
    history: History  # the trainer's ``state.log_history``
    settings: dict[str, Any] = field(default_factory=dict)  # every argument
    changed: list[str] = field(default_factory=list)  # names of arguments that are not the default
    recipe: dict[str, Any] = field(default_factory=dict)  # model, rewards, dataset and so on
    environment: dict[str, str] = field(default_factory=dict)  # device and versions
    folder: Path = Path()  # of the run, with its completions

    @classmethod
    def of(cls, trainer: Trainer) -> RunRecord:
        """Return the current run of ``trainer``."""
        args, model, data = trainer.args, trainer.model, trainer.train_dataset
        adapters = model.peft_config.values() if is_peft_model(model) else ()
        model_name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        recipe = {
            "model": masked(str(model_name)),
            "rewards": trainer.recipe.rewards,
            "dataset": masked(trainer.recipe.dataset),  # it may be a signed URL
            "prompts": len(data) if hasattr(data, "__len__") else None,  # None: a stream
            "adapter": next((str(config.peft_type.value) for config in adapters), None),
            "loss_type": trainer.loss_config.loss_type,
            "loss_source": trainer.loss_config.loss.source,  # the paper
            "engine": trainer.recipe.engine,
            "processes": trainer.accelerator.num_processes,
        }
        hooks = trainer.recipe.hooks
        own = {"prompts by": import_path(hooks["prompts"]), "columns": hooks["columns"]}
        own["terms of the loss"] = hooks["terms"]
        recipe |= {name: value for name, value in own.items() if value is not None}
        folder = Path(args.output_dir)
        return cls(
            name=masked(args.run_name or folder.resolve().name),
            history=trainer.state.log_history,
            settings=args.to_dict(),  # without tokens and passwords
            changed=[one.name for one in fields(args) if _differs(getattr(args, one.name), one)],
            recipe=recipe,
            environment=environment(args.device),
            folder=folder,
        )

    def save(self) -> None:
        """Write ``run.json`` into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain(vars(self) | {"folder": None}))
        content = json.loads(text, parse_constant=lambda name: None)  # JSON has no NaN
        with whole(self.folder / RUN_FILE) as path:
            path.write_text(json.dumps(content, indent=1) + "\n")


def load_run(folder: Path) -> RunRecord:
    """Return the run in ``folder``, by its ``run.json``.

    Raises:
        ValueError: the file does not exist, or cannot be read.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise ValueError(
            f"report: expected the folder of a run, with {RUN_FILE}, got {str(folder)!r}"
        )
    try:
        return RunRecord(**json.loads(path.read_text()) | {"folder": folder})
    except (ValueError, TypeError) as error:
        raise ValueError(f"report: {path} is not the record of a run: {error}") from error


def environment(device: torch.device) -> dict[str, str]:
    """Return the machine and the versions."""
    on_gpu = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    versions = {name: installed_version(name) for name in _PACKAGES}
    return facts | {name: version for name, version in versions.items() if version is not None}


def _differs(value: Any, field_of_it: Any) -> bool:
    """Return whether the user set it: TrainingArguments fills in some defaults itself."""
    if field_of_it.name in NEWER_NAMES.values():  # they repeat the older names
        return False
    if field_of_it.name == "gradient_checkpointing":  # None means True
        return not value
    default = field_of_it.default
    if default in (MISSING, None, "", "none"):
        return bool(value) and isinstance(value, str | int | float | list | dict)
    return value != default


def write_card(
    trainer: Trainer,
    path: Path,
    is_ours: bool,
    *,
    name: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> None:
    """Write the card of ``trainer``'s model to ``path``, unless the existing card was edited.

    Args:
        trainer: has the model.
        path: of the card.
        is_ours: whether it may be written: the result of :func:`may_write`.
        name: its title. Default: the name of ``output_dir``.
        datasets: hub ids of the training data. Default: the dataset's name as given.
        tags: additional tags.
    """
    if not is_ours:
        what = "was edited" if path.is_file() else "is not a file"
        logger.warning("%s %s: leaving it unchanged", path, what)
        return
    run, loss = RunRecord.of(trainer), trainer.loss_config
    recipe, paper = run.recipe, _ARXIV.search(run.recipe["loss_source"])
    if datasets:
        recipe["dataset"] = ", ".join(datasets)
    data = ModelCardData(
        base_model=None if Path(recipe["model"]).exists() else recipe["model"],
        library_name="peft" if recipe["adapter"] else "transformers",
        model_name=name or run.folder.resolve().name,
        datasets=list(datasets) or None,
        tags=list(dict.fromkeys([*_TAGS, recipe["loss_type"], *tags])),
        pipeline_tag="text-generation",
    )
    changed = {  # settings that differ from the defaults of the loss and its surrogate
        item.name: getattr(part, item.name)
        for part in (loss, loss.surrogate)
        for item in fields(part)
        if item.compare and item.name != "surrogate" and getattr(part, item.name) != item.default
    }
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        run=run,
        recipe=recipe,
        loss=changed | {"beta": loss.beta},
        steps=trainer.state.global_step,
        paper=paper and paper[0],
    )
    text = str(card).rstrip()
    mark = f"\n<!-- written by grpo-trainer, digest {_digest(text)} -->\n"
    path.write_text(text + mark, encoding="utf-8")


def may_write(path: Path) -> bool:
    """Return whether there is no card, or only an unedited one that was written here."""
    if not path.is_file():
        return not path.exists()  # it may be a folder
    text = path.read_text(encoding="utf-8", errors="replace")
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def _digest(text: str) -> str:
    """Return the digest of a card without its metadata, which other libraries rewrite."""
    body = REGEX_YAML_BLOCK.sub("", text, count=1)
    return hashlib.sha256(body.strip().encode()).hexdigest()[:16]
