"""The model card, unless somebody has edited the one that is there."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import Trainer

from grpo_kernels import LossConfig
from grpo_trainer.monitor.run_file import RunRecord

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"

_TEMPLATE = Path(__file__).with_name("card.md")
# who wrote it: a card whose text is no longer what the digest says was edited by somebody
_MARK = re.compile(r"\n<!-- written by grpo-trainer, digest (\w+) -->\s*$")
_TAGS = ("grpo", "reinforcement-learning", "grpo-kernels")
_ARXIV = re.compile(r"\d{4}\.\d{4,5}")


def may_write(folder: Path) -> bool:
    """Return whether there is no card, or one that is as it was written here."""
    path = folder / CARD_NAME
    if not path.is_file():
        return not path.exists()  # a folder, say
    text = _body(path.read_text(encoding="utf-8", errors="replace"))
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def write_card(
    trainer: Trainer,
    folder: Path,
    ours: bool,
    name: str | None = None,
    datasets: str | list[str] | None = None,
    tags: str | list[str] | None = None,
) -> None:
    """Write the card of what ``trainer`` has trained, if the one that is there is ``ours``.

    An upload may say more than its recipe: ``name``, ``datasets``, ``tags``.
    """
    path = folder / CARD_NAME
    if not ours:
        what = "was edited" if path.is_file() else "is no file"
        logger.warning("%s %s: it stays as it is", path, what)
        return
    text = str(_card(trainer, name, _listed(datasets), _listed(tags))).rstrip()
    mark = f"\n<!-- written by grpo-trainer, digest {_digest(_body(text))} -->\n"
    path.write_text(text + mark, encoding="utf-8")


def changed_loss_fields(config: LossConfig) -> dict[str, Any]:
    """Return what of the loss, its surrogate's settings included, is not at its default."""
    return {
        item.name: getattr(part, item.name)
        for part in (config, config.surrogate)
        for item in fields(part)
        if item.compare and item.name != "surrogate" and getattr(part, item.name) != item.default
    }


def _card(trainer: Trainer, name: str | None, datasets: list[str], tags: list[str]) -> ModelCard:
    run = RunRecord.of(trainer)
    recipe, paper = run.recipe, _ARXIV.search(run.recipe["loss_source"])
    if datasets:
        recipe["dataset"] = ", ".join(datasets)
    data = ModelCardData(
        base_model=None if Path(recipe["model"]).exists() else recipe["model"],
        library_name="peft" if recipe["adapter"] else "transformers",
        model_name=name or run.folder.resolve().name,
        datasets=datasets or None,
        tags=list(dict.fromkeys([*_TAGS, recipe["loss_type"], *tags])),
        pipeline_tag="text-generation",
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        run=run,
        recipe=recipe,
        loss=changed_loss_fields(trainer.loss_config) | {"beta": trainer.loss_config.beta},
        steps=trainer.state.global_step,
        paper=paper and paper[0],
    )


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _body(text: str) -> str:
    """Return ``text`` without the metadata, which other libraries rewrite."""
    return REGEX_YAML_BLOCK.sub("", text, count=1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]
