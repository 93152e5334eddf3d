"""The model card of a run, and the settings and numbers in it."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers import Trainer

from grpo_kernels import LossConfig
from grpo_kernels.tools import cpu_name, installed_version
from grpo_trainer.common import unfailing
from grpo_trainer.config import GRPOConfig

_PACKAGES = (
    "grpo-kernels",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "vllm",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of a run that have names."""

    model: str  # folder or hub id it started from
    rewards: dict[str, float]  # name -> weight
    dataset: str | None  # as it was named, if it was
    prompts: int | None  # of the dataset; None: it is a stream
    adapter: str | None  # its kind, if only an adapter is trained
    loss_type: str
    loss_source: str  # the paper
    engine: str  # what completes the prompts
    processes: int

    @classmethod
    def of(cls, trainer: Trainer, rewards: dict[str, float], engine: str | None) -> Recipe:
        """Describe ``trainer``; ``engine`` names one that its arguments do not say."""
        args, model = trainer.args, trainer.model
        data = trainer.train_dataset
        adapter = None
        if is_peft_model(model):
            adapter = str(next(iter(model.peft_config.values())).peft_type.value)
        return cls(
            model=str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
            rewards=rewards,
            dataset=None,
            prompts=len(data) if hasattr(data, "__len__") else None,
            adapter=adapter,
            loss_type=trainer.loss_config.loss_type,
            loss_source=trainer.loss_config.loss.source,
            engine=engine or _engine(args),
            processes=trainer.accelerator.num_processes,
        )


def changed_loss_fields(config: LossConfig) -> dict[str, Any]:
    """Return what of the loss, its surrogate's settings included, is not at its default."""
    return {
        item.name: getattr(part, item.name)
        for part in (config, config.surrogate)
        for item in dataclasses.fields(part)
        if item.compare and item.name != "surrogate" and getattr(part, item.name) != item.default
    }


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


def _engine(args: Any) -> str:
    if args.rollout_engine is not None:
        return args.rollout_engine
    if args.use_vllm:
        return f"vLLM ({args.vllm_mode})"
    return "transformers"


logger = logging.getLogger(__name__)

CARD_NAME = "README.md"

# who wrote it: a card whose text is no longer what the digest says was edited by somebody
_MARK = re.compile(r"\n<!-- written by grpo-trainer, digest (\w+) -->\s*$")

_GRPO = """@article{shao2024deepseekmath,
  title   = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
  author  = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and Song, Junxiao and
             Bi, Xiao and Zhang, Haowei and Zhang, Mingchuan and Li, Y. K. and Wu, Y. and
             Guo, Daya},
  year    = {2024},
  journal = {arXiv preprint arXiv:2402.03300}
}"""
_GRPO_PAPER = "2402.03300"
_TAGS = ("grpo", "reinforcement-learning", "grpo-kernels")
_ARXIV = re.compile(r"\d{4}\.\d{4,5}")


class WritesCard(Trainer):
    """Writes a card beside each saved model, unless somebody has edited the one that is there."""

    recipe: Recipe
    args: GRPOConfig
    loss_config: Any

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        ours = may_write(folder)  # asked first: peft leaves a card of its own
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            with unfailing(f"card of {self.args.output_dir}"):
                self._write_card(folder, ours)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the card before an upload; ``push_to_hub`` hands these on.

        Args:
            model_name: the card's title. Default: the name of ``output_dir``.
            dataset_name: hub ids of what was trained on. Default: the dataset as it was named.
            tags: more tags.
        """
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            said = (model_name, _listed(dataset_name), _listed(tags))
            self._write_card(folder, may_write(folder), *said)

    def _write_card(self, folder: Path, ours: bool, *said: Any) -> None:
        if ours:
            card = model_card(self, *said)
            (folder / CARD_NAME).write_text(_signed(card), encoding="utf-8")
        else:
            path = folder / CARD_NAME
            what = "was edited" if path.is_file() else "is no file"
            logger.warning("%s %s: it stays as it is", path, what)


def may_write(folder: Path) -> bool:
    """Return whether there is no card, or one that is as it was written here."""
    path = folder / CARD_NAME
    if not path.is_file():
        return not path.exists()  # a folder, say
    text = _body(path.read_text(encoding="utf-8", errors="replace"))
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def model_card(
    trainer: WritesCard,
    name: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> ModelCard:
    """Return the card of what ``trainer`` has trained; an upload may say more than its recipe."""
    recipe = trainer.recipe
    if datasets:
        recipe = replace(recipe, dataset=", ".join(datasets))
    name = name or Path(trainer.args.output_dir).resolve().name
    local = Path(recipe.model).exists()
    data = ModelCardData(
        base_model=None if local else recipe.model,
        library_name="peft" if recipe.adapter else "transformers",
        model_name=name,
        datasets=list(datasets) or None,
        tags=list(dict.fromkeys([*_TAGS, recipe.loss_type, *tags])),
        pipeline_tag="text-generation",
    )
    parts = [
        f"# {name}",
        f"`{recipe.model}`, trained by reinforcement learning with the loss `{recipe.loss_type}` "
        f"({recipe.loss_source}) of grpo-kernels" + _adapter(recipe) + ".",
        "## Recipe",
        _table(_recipe_rows(trainer, recipe)),
        "## Versions",
        _table(environment(torch.device(trainer.args.device))),
        "## Citation",
        *_citations(recipe),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _recipe_rows(trainer: WritesCard, recipe: Recipe) -> dict[str, str]:
    args = trainer.args
    rewards = ", ".join(
        f"`{name}`" + ("" if weight == 1 else f" x {weight:g}")
        for name, weight in recipe.rewards.items()
    )
    prompts = "a stream" if recipe.prompts is None else f"{recipe.prompts:,} prompts"
    changed = changed_loss_fields(trainer.loss_config) | {"beta": trainer.loss_config.beta}
    return {
        "dataset": f"`{recipe.dataset}`, {prompts}" if recipe.dataset else prompts,
        "rewards": rewards,
        "loss": ", ".join(f"{name} = {value}" for name, value in changed.items()),
        "completions": f"{args.num_generations} per prompt, {args.generation_batch_size} at once, "
        f"up to {args.max_completion_length} tokens, temperature {args.temperature:g}",
        "sampled by": recipe.engine,
        "steps": f"{trainer.state.global_step:,}, learning rate {args.learning_rate:g}, seed "
        f"{args.seed}, {recipe.processes} process{'es' * (recipe.processes > 1)}",
    }


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _adapter(recipe: Recipe) -> str:
    return f"; this is a {recipe.adapter} adapter" if recipe.adapter else ""


def _table(rows: dict[str, str]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _citations(recipe: Recipe) -> list[str]:
    """Return GRPO's, and the loss's own, by what the registry says of it."""
    cited = [f"```bibtex\n{_GRPO}\n```"]
    paper = _ARXIV.search(recipe.loss_source)
    if paper is None:
        cited.append(f"The loss `{recipe.loss_type}`: {recipe.loss_source}.")
    elif paper[0] != _GRPO_PAPER:
        entry = (
            f"@misc{{{recipe.loss_type},\n"
            f"  eprint = {{{paper[0]}}}, archivePrefix = {{arXiv}},\n"
            f"  url = {{https://arxiv.org/abs/{paper[0]}}}\n}}"
        )
        cited.append(f"```bibtex\n{entry}\n```")
    return cited


def _signed(card: ModelCard) -> str:
    text = str(card).rstrip()
    return f"{text}\n<!-- written by grpo-trainer, digest {_digest(_body(text))} -->\n"


def _body(text: str) -> str:
    """Return ``text`` without the metadata, which other libraries rewrite."""
    return REGEX_YAML_BLOCK.sub("", text, count=1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]
