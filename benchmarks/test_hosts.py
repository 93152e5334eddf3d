"""Steps of other trainers, with their own head and with ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import shapes, text, training
from benchmarks.check import StepResult, compare_steps, why_wrong
from benchmarks.child import ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import add_growth, attempt, race
from benchmarks.problem import Problem, make_problem
from benchmarks.providers.base import lacking
from benchmarks.results import Row
from benchmarks.timing import make_timer, resident_growth
from benchmarks.training import TrainingConfig
from grpo_kernels.linear_logprobs import LinearLogprobs

_ROUNDS = 3
_REQUIRES = ("peft", "transformers", "accelerate", "datasets")
THEIRS, OURS, AT_HEAD, NO_HEAD = "theirs", "ours", "ours, loss at the head", "no head"
# TRL's own head must be built last: our head can't be enabled on a model that has it
_ORDER = (OURS, NO_HEAD, AT_HEAD, THEIRS)
_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Case:
    """A forward and backward of another trainer, with a model of some size."""

    host: str  # a distribution
    step: str
    arms: tuple[str, ...]
    make: Callable[[str, TrainingConfig], training.Step]  # of an arm
    config: TrainingConfig = training.SIZES["quick"]

    def facts(self) -> dict[str, Any]:
        facts = {"host": self.host, "step": self.step, "model": self.config.model}
        length = self.config.prompt_tokens + self.config.completion_tokens
        return {**facts, "tokens": self.config.micro_batch * length, "dtype": "fp32"}

    def __str__(self) -> str:
        return f"{self.host}: {self.step}"


def _headless(hidden: Tensor, head: Any, target: Tensor, **options: Any) -> LinearLogprobs:
    """Replace the head's GEMMs at no cost, to measure the rest of a step."""
    value = hidden.float().mean(-1)
    found: dict[str, Any] = dict.fromkeys(LinearLogprobs._fields)
    for name in options["outputs"]:
        detached = value.detach() > 0 if name == "is_top1" else value.detach()
        found[name] = value if name in ("logprobs", "entropy") else detached
    return LinearLogprobs(**found)


def _trl(trainer: str, lora: bool, arm: str, config: TrainingConfig) -> training.Step:
    """Build TRL's trainer for an arm; return its forward and backward of one batch."""
    from grpo_kernels.integrations import trl as ours

    adapter = None
    if lora:
        from peft import LoraConfig

        # both factors have gradients
        adapter = LoraConfig(target_modules=["q_proj", "v_proj"], r=8, init_lora_weights=False)
    # a trainer that is built while our head is enabled keeps it
    with ours.enabled() if arm in (OURS, NO_HEAD) else nullcontext():
        torch.manual_seed(training.SEED)  # of the adapters
        if trainer == "GRPO":
            own = ours.FusedGRPOTrainer if arm == AT_HEAD else None
            built: Any = training.build("trl", config, "cpu", 1, own, adapter)
            inputs: dict[str, Any] = training.make_batch(config, training.make_model(config), "cpu")
        else:
            built, inputs = _from_dataset(trainer, adapter, config)

    step, leaves = training.step_of(built, inputs)
    if arm != NO_HEAD:
        return step, leaves

    def headless() -> Tensor:
        with patch("grpo_kernels.integrations.trl_head.linear_logprobs", _headless):
            return step()

    return headless, leaves


def _from_dataset(trainer: str, adapter: Any, config: TrainingConfig) -> tuple[Any, dict[str, Any]]:
    """Build a trainer and take its first batch."""
    import trl
    from datasets import Dataset

    data = {
        name: training.make_texts(config, config.micro_batch, length, seed)
        for seed, (name, length) in enumerate(_COLUMNS[trainer].items())
    }
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(trl, f"{trainer}Config")(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=1,
            per_device_train_batch_size=config.micro_batch, report_to="none", save_strategy="no",
        )  # fmt: skip
        model = training.make_model(config)
        model.save_pretrained(folder)  # a reference model is loaded from there
        model = type(model).from_pretrained(folder)
        built: Any = getattr(trl, f"{trainer}Trainer")(
            model, args=args, train_dataset=Dataset.from_dict(data), peft_config=adapter,
            processing_class=training.make_tokenizer(config),
        )  # fmt: skip
    return built, built._prepare_inputs(next(iter(built.get_train_dataloader())))


def _problem(config: TrainingConfig) -> Problem:
    model = shapes.Model("", config.hidden, config.vocabulary)
    tokens = config.micro_batch * config.completion_tokens
    return make_problem(shapes.Case(model, tokens, "fp32", shapes.WORKS["dapo"]), exact=False)


def _liger(arm: str, config: TrainingConfig) -> training.Step:
    from liger_kernel.chunked_loss import grpo_loss

    from grpo_kernels.integrations import liger

    x = _problem(config)
    settings: dict[str, Any] = {"temperature": _TEMPERATURE, "beta": 0.0, "use_ref_model": False}
    with liger.enabled() if arm == OURS else nullcontext():
        module = grpo_loss.LigerFusedLinearGRPOLoss(**settings)
    inputs = x.hidden, x.weight, x.target, x.mask.int(), x.advantages
    return lambda: module(*inputs)[0], (x.hidden, x.weight)


def _verl(arm: str, config: TrainingConfig) -> training.Step:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from grpo_kernels.integrations import verl

    x, scores = _problem(config), FusedLinearForPPO()

    def loss() -> Tensor:
        with verl.enabled() if arm == OURS else nullcontext():
            logprobs, entropy = scores(x.hidden, x.weight, x.target, _TEMPERATURE)
        return (logprobs + 0.1 * entropy).mean()

    return loss, (x.hidden, x.weight)


_COLUMNS = {
    "SFT": {"prompt": 32, "completion": 64},
    "DPO": {"prompt": 32, "chosen": 64, "rejected": 64},
}
_QUICK = [
    *(
        Case("trl", f"{trainer}Trainer, {weights}", arms, partial(_trl, trainer, weights == "LoRA"))
        for trainer, arms in {
            "GRPO": (THEIRS, OURS, AT_HEAD, NO_HEAD),
            "SFT": (THEIRS, OURS, NO_HEAD),
            "DPO": (THEIRS, OURS, NO_HEAD),
        }.items()
        for weights in ("all weights", "LoRA")
    ),
    Case("liger-kernel", "LigerFusedLinearGRPOLoss", (THEIRS, OURS), _liger),
    Case("verl", "FusedLinearForPPO, entropy", (THEIRS, OURS), _verl),
]
_TINY = ("GRPOTrainer, LoRA", "DPOTrainer, all weights", "LigerFusedLinearGRPOLoss")
CASES = {
    "tiny": [replace(x, config=training.SIZES["tiny"]) for x in _QUICK if x.step in _TINY],
    "quick": _QUICK,
    "cpu": [replace(case, config=training.SIZES["full"]) for case in _QUICK],
}


def notes(case: Case) -> dict[str, str]:
    return dict.fromkeys(case.arms, "")


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    every = [Row(name) for name in case.arms]  # ours is tested against theirs
    for row in every:
        row.leave_out("absent", lacking(case.host, *_REQUIRES))
    if any(row.runs for row in every):
        with attempt(*every):
            # compiling a loss takes longer than a tiny case
            stance = "force_eager" if session.suite == "tiny" else "default"
            every = ask(_times, every, case, session.rounds(_ROUNDS), stance)
    found = {row.provider: row for row in every}
    for row in rows:
        vars(row).update(vars(found[row.provider]))
    if not session.brief:
        add_growth(rows, partial(ask, _growth, case))


def _times(every: list[Row], case: Case, rounds: int, stance: str) -> list[Row]:
    """Check every arm against the trainer's own head, and time those that pass, in turns."""
    torch.compiler.set_stance(stance)
    torch.manual_seed(0)
    rows = {row.provider: row for row in every if row.runs}
    steps: list[tuple[Row, training.Step]] = []
    found: dict[str, StepResult] = {}
    for arm in (arm for arm in _ORDER if arm in rows):
        with attempt(rows[arm]):
            step = case.make(arm, case.config)
            found[arm] = training.take_step(step)
            steps.append((rows[arm], step))
            rows[arm].info["work"] = f"{case.host} {version(case.host)}: {case.step}"
    for arm in (OURS, AT_HEAD):
        if arm in found and THEIRS in found:
            rows[arm].errors = compare_steps(found[arm], found[THEIRS])
            rows[arm].leave_out("wrong", why_wrong(rows[arm].errors, "fp32"))
    found.clear()
    timer = make_timer("cpu")

    def timed(step: training.Step) -> float:
        seconds = timer(lambda: step[0]().backward())
        for leaf in step[1]:
            leaf.grad = None
        return seconds

    race(steps, rounds, timed)
    if NO_HEAD in rows:  # the head: the time of a step, minus the time without a head
        rest, theirs = rows[NO_HEAD].median, rows[THEIRS].median
        for arm, row in rows.items():
            if arm != NO_HEAD and rest and theirs and row.median:
                ratio = f"x {text.ratio((row.median - rest) / (theirs - rest))}"
                own = arm == THEIRS
                row.cells["the head in it"] = text.duration(theirs - rest) if own else ratio
    return every


def _growth(case: Case, arm: str) -> int:
    """Return by how many bytes this otherwise idle process grows in a step."""
    torch.manual_seed(0)
    case.make(arm, training.SIZES["quick"])[0]().backward()  # libraries are loaded, threads started
    loss, _ = case.make(arm, case.config)
    return resident_growth(lambda: loss().backward())[1]


test_hosts = check_row
