"""The card of a saved model: what it was trained with, in the format of the hub."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import Trainer

from grpo_trainer.monitor.run_file import RunRecord

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"

_TEMPLATE = Path(__file__).with_name("card.md")
# who wrote it: a card whose text is no longer what the digest says was edited by somebody
_MARK = re.compile(r"\n<!-- written by grpo-trainer, digest (\w+) -->\s*$")
_TAGS = ("grpo", "reinforcement-learning", "grpo-kernels")
_ARXIV = re.compile(r"\d{4}\.\d{4,5}")


def write_card(
    trainer: Trainer,
    path: Path,
    is_ours: bool,
    *,
    name: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> None:
    """Write the card of ``trainer``'s model to ``path``, unless somebody edited the one there.

    Args:
        trainer: whose model it is.
        path: where the card goes.
        is_ours: whether it may be written, as :func:`may_write` said.
        name: its title. Default: the name of ``output_dir``.
        datasets: hub ids of what was trained on. Default: the dataset as it was named.
        tags: more tags.
    """
    if not is_ours:
        what = "was edited" if path.is_file() else "is no file"
        logger.warning("%s %s: it stays as it is", path, what)
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
    changed = {  # from the defaults of the loss and its surrogate
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
    """Return whether there is no card, or one that is as it was written here."""
    if not path.is_file():
        return not path.exists()  # a folder, say
    text = path.read_text(encoding="utf-8", errors="replace")
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def _digest(text: str) -> str:
    """Return that of a card without its metadata, which other libraries rewrite."""
    body = REGEX_YAML_BLOCK.sub("", text, count=1)
    return hashlib.sha256(body.strip().encode()).hexdigest()[:16]
