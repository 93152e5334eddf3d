"""Run by test_sharded.py, in its process and under a launcher; keeps what came out.

sharded_runs.py FOLDER KIND:CASE,CASE,... [KIND:...]: a KIND is a key of PLACEMENTS, a CASE one of
CASES or CHECKS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from datasets import Dataset
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForSequenceClassification

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer, write_policy
from grpo_trainer.rollout import policy_weights
from grpo_trainer.rollout.together import Together
from grpo_trainer.sharding import loading_whole
from tests.support.trainer import adapted, canned, lengths_reward
from tests.support.vision import make_vision_trainer

ROWS = 16  # completions of a generation batch
STEPS = 3
TIMEOUT = 60  # seconds, of a process that waits for another
METRICS = (
    "loss", "reward", "reward_std", "grad_norm", "kl", "entropy", "num_tokens", "ratio/max",
    "clip_ratio/region_mean", "perplexity", "eval_reward", "eval_loss", "eval_entropy",
)  # fmt: skip
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]}

# arguments of GRPOConfig
_FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
    },
    "accelerator_config": {"use_configured_state": True},
}


def _zero(stage: int) -> dict[str, Any]:
    config = {
        # small parameters would stay whole
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    return {"deepspeed": config}


PLACEMENTS: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp2": _FSDP2,
    **{f"zero{stage}": _zero(stage) for stage in (1, 2, 3)},
}
# what a run changes in the arguments below
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"optim": "sgd", "max_grad_norm": 0.1, "learning_rate": 0.1},
    "adam": {"gradient_checkpointing": True},
    "iterations": {"num_iterations": 2, "loss_type": "gspo"},
    "reference": {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "tied": {"beta": 0.05},
    "lora": {"beta": 0.05},
    "lora of its own": {"beta": 0.05},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "images": {"beta": 0.05, "num_iterations": 2},
}


def make_args(folder: str, kind: str, **changes: Any) -> GRPOConfig:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    AcceleratorState._reset_state()  # of the run before
    if kind == "fsdp2":
        # accelerate takes CPU processes for plain data parallelism; FSDP2 itself runs on them
        state = PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=TIMEOUT))
        state.distributed_type = DistributedType.MULTI_GPU
    if kind.startswith("zero"):
        import deepspeed  # accelerate does this where there are GPUs

        deepspeed.init_distributed("gloo", timeout=timedelta(seconds=TIMEOUT))
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/out",
        "overwrite_output_dir": True,  # the placements take turns in it
        "per_device_train_batch_size": ROWS // 2 // processes,
        "per_device_eval_batch_size": ROWS // 2 // processes,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "ddp_backend": "gloo" if processes > 1 else None,
        "ddp_timeout": TIMEOUT,
        "disable_tqdm": True,
        "write_report": False,
        "report_to": "none",
        "bf16": False,
    }
    return GRPOConfig(**(settings | PLACEMENTS[kind] | changes))


def write_reward_model(folder: Path) -> None:
    """Write a classifier with random weights."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = make_policy(tokenizer, seed=0).config
    config.num_labels = 1
    torch.manual_seed(3)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)


def make_trainer(
    args: GRPOConfig,
    model: str | PreTrainedModel | None = None,
    reward: Any = lengths_reward,
    **given: Any,
) -> GRPOTrainer:
    tokenizer = make_tokenizer()
    rows = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(20)])
    model = make_policy(tokenizer, seed=0) if model is None else model
    made_of = (model, reward, args, rows, rows.select(range(4)), tokenizer)
    return GRPOTrainer(*made_of, **given)


def case_trainer(name: str, folder: str, kind: str, **changes: Any) -> GRPOTrainer:
    args = make_args(folder, kind, **(CASES[name] | changes))
    if name == "images":
        return canned(make_vision_trainer("qwen3_vl", args, lengths_reward))
    policy, given = make_policy(make_tokenizer(), seed=0), {}
    if name == "tied":
        policy.config.tie_word_embeddings = True
        policy.tie_weights()
    if name == "lora":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(**LORA)
    if name == "lora of its own":
        torch.manual_seed(1)
        policy = adapted(policy, **LORA)
    return canned(make_trainer(args, policy, **given))


def logged(trainer: GRPOTrainer) -> list[dict[str, float]]:
    rows = [{n: row[n] for n in METRICS if n in row} for row in trainer.state.log_history]
    return [row for row in rows if len(row) > 1]


def weights(trainer: GRPOTrainer) -> dict[str, Tensor]:
    """Return a copy of the policy's whole weights."""
    found = policy_weights(trainer.model, trainer._placement)
    return {name: value.detach().clone() for name, value in found}


def held(trainer: GRPOTrainer) -> float:
    """Return the share of the policy's numbers that this process keeps between steps."""
    trainer._placement.at_rest(trainer.model)
    kept = sum(trainer._placement.local(value).numel() for value in trainer.model.parameters())
    return kept / sum(
        value.numel() for value in trainer._placement.described(trainer.model).values()
    )


def run(name: str, folder: str, kind: str) -> dict[str, Any]:
    trainer = case_trainer(name, folder, kind)
    trainer.train()
    return {"log": logged(trainer), "weights": weights(trainer), "held": held(trainer)}


def run_generation(folder: str, kind: str) -> dict[str, Any]:
    """Generate before, in and after training, with the model gathered and without."""
    found = {}
    # a group's completions are all alike, which leaves the bonus to learn from
    changes = {"generation_kwargs": {"top_k": 1}, "entropy_coef": 1.0, "learning_rate": 0.5}
    changes |= {"gradient_accumulation_steps": 1, "optim": "sgd"}
    for gathers in (True, False):
        changes["ds3_gather_for_generation"] = gathers
        trainer = make_trainer(make_args(folder, kind, **changes))
        seen = [greedy(trainer)]
        trainer.train()
        seen += [greedy(trainer), greedy(trainer)]
        found[gathers] = {"seen": seen, "log": logged(trainer), "weights": weights(trainer)}
    return found


def greedy(trainer: GRPOTrainer) -> list[list[int]]:
    """Return the likeliest completions of some prompts, of which the last process has none."""
    prompts = [[3, 4, 5], [6, 7, 8, 9, 13], [5]]
    mine = prompts if trainer.accelerator.process_index == 0 else []
    completions = trainer.rollouts.generate(mine, max_tokens=6).token_ids
    assert len(completions) == len(mine)
    return completions


def loaded(name: str, folder: Path) -> dict[str, Tensor]:
    """Return the weights of the model that was saved to ``folder``, adapters merged."""
    if name != "lora":
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()
    from peft import PeftModel

    model = PeftModel.from_pretrained(make_policy(make_tokenizer(), seed=0), folder)
    return {name: value.detach() for name, value in policy_weights(model)}


def run_checkpoints(folder: str, kind: str) -> dict[str, Any]:
    """Stop after each of the steps, go on, and save the model."""
    found: dict[str, Any] = {}
    for name in ("reference", "lora"):
        out = f"{folder}/{name}"
        straight = case_trainer(name, out, kind, save_strategy="steps", save_steps=1)
        straight.train()
        resumed = case_trainer(name, out, kind)
        resumed.train(resume_from_checkpoint=f"{out}/out/checkpoint-1")
        finished = case_trainer(name, out, kind)
        finished.train(resume_from_checkpoint=True)
        straight.save_model(f"{out}/whole")
        trainers = {"straight": straight, "resumed": resumed, "finished": finished}
        found[name] = {key: weights(trainer) for key, trainer in trainers.items()}
        found[name]["logs"] = [logged(trainer) for trainer in (straight, resumed)]
        files = Path(out, "out", "checkpoint-2")
        found[name]["files"] = sorted(str(path.relative_to(files)) for path in files.rglob("*"))
        if straight.accelerator.is_main_process:
            with loading_whole():
                found[name]["loaded"] = loaded(name, Path(out, "whole"))
    return found


def run_loading(folder: str, kind: str) -> dict[str, Any]:
    """Load the policy by name, in shards where the placement can; evaluate first where it can."""
    changes: dict[str, Any] = dict(CASES["reference"])
    if kind == "fsdp2":  # other processes than the first have no weights until they are placed
        config = _FSDP2["fsdp_config"] | {"cpu_ram_efficient_loading": True}
        changes["fsdp_config"] = config | {"state_dict_type": "FULL_STATE_DICT"}
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate launch does
    args = make_args(folder, kind, save_strategy="steps", save_steps=2, **changes)
    with args.main_process_first():
        if not Path(folder, "policy").exists():
            with loading_whole():  # which making is, too
                write_policy(Path(folder, "policy"), seed=0)
                write_reward_model(Path(folder, "rewards"))
    trainer = make_trainer(args, f"{folder}/policy", reward=f"{folder}/rewards")
    before = held(trainer)
    evaluated = None
    if not kind.startswith("zero"):
        evaluated = canned(trainer).evaluate()["eval_reward"]
    canned(trainer).train()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    log = logged(trainer)
    return {"log": log, "weights": weights(trainer), "held": before, "evaluated": evaluated}


class LiveBytes(TorchDispatchMode):
    """Bytes of memory that was taken inside and is still in use; ``peak`` at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.device.type == "cpu" and not func.is_view:
            storage = found.untyped_storage()
            reference = StorageWeakRef(storage)
            self._storages.setdefault(reference.cdata, (reference, storage.nbytes()))
        alive = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._storages = alive
        self.peak = max(self.peak, sum(size for _, size in alive.values()))
        return found


def run_stream(folder: str, kind: str) -> dict[str, Any]:
    """Let the first process alone walk through the weights: not to the end, twice, and to fail."""
    found: dict[str, Any] = {}
    for name in ("dapo", "lora"):
        trainer = case_trainer(name, folder, kind)
        trainer.train()
        together = Together(trainer.accelerator, trainer._placement.sharded)
        source = together.shared(lambda: policy_weights(trainer.model, trainer._placement))  # noqa: B023

        def work() -> dict[str, Tensor]:
            next(iter(source()))  # noqa: B023
            return {key: value.clone() for key, value in source()}  # noqa: B023

        def failing() -> None:
            for _ in source():  # noqa: B023
                raise ValueError("half way")

        sent = together.on_main(work, (ValueError,))
        try:
            together.on_main(failing, (ValueError,))
            failed = "not"
        except ValueError as error:
            failed = str(error)
        with LiveBytes() as live:
            for item in policy_weights(trainer.model, trainer._placement):
                del item  # before the next one is gathered
        sizes = [value.numel() * value.element_size() for value in weights(trainer).values()]
        found[name] = {"sent": sent, "weights": weights(trainer), "failed": failed}
        found[name] |= {"peak": live.peak, "largest": max(sizes), "total": sum(sizes)}
    return found


def run_refused(folder: str, kind: str) -> dict[str, Any]:
    """Ask for what cannot work; return the errors."""
    asked: dict[str, dict[str, Any]] = {
        "fp32 head": {"cast_lm_head_to_fp32": True, "bf16": True},
        "continuous": {
            "use_transformers_continuous_batching": True,
            "ds3_gather_for_generation": False,
        },
        "overlap": {"overlap_generation": True},
    }
    found = {
        name: refusal(lambda: make_trainer(make_args(folder, kind, **changes)))  # noqa: B023
        for name, changes in asked.items()
    }
    if kind.startswith("zero"):
        found["evaluate"] = refusal(case_trainer("dapo", folder, kind).evaluate)
    return found


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "nothing"


def run_death(folder: str, kind: str) -> dict[str, Any]:
    """Let the last process end without a word in the second step."""

    def reward(completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step == 1 and int(os.environ["RANK"]) > 0:
            os._exit(3)
        return lengths_reward(completion_ids)

    canned(make_trainer(make_args(folder, kind), reward=reward)).train()
    return {}


CHECKS = {
    "refused": run_refused,
    "death": run_death,
    "stream": run_stream,
    "generation": run_generation,
    "checkpoints": run_checkpoints,
    "loading": run_loading,
}


def main(folder: str, kind: str, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        own = f"{folder}/{name}"
        results[name] = CHECKS[name](own, kind) if name in CHECKS else run(name, own, kind)
    if int(os.environ.get("RANK", 0)) == 0 and kind != "one":
        torch.save(results, f"{folder}/{kind}.pt")
    return results


if __name__ == "__main__":
    for words in sys.argv[2:]:
        placement, _, cases = words.partition(":")
        main(sys.argv[1], placement, cases.split(","))
    dist.barrier()  # a process that leaves early may abort
    dist.destroy_process_group()
