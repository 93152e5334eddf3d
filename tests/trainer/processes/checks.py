"""What else processes do together: generate, stream weights, save, load, refuse and stop.

Each is called on every process with its placement and a folder that all share.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification, TrainerCallback

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer, write_policy
from grpo_trainer.engines import WeightSource, on_first_process, policy_weights
from grpo_trainer.experience.parts import computed_tokens, cut_rows
from grpo_trainer.policy import loading_whole, placement_of
from tests.support.placements import FSDP2, processes, rank
from tests.support.trainer import BackgroundEngine, lengths_reward, logged
from tests.trainer.processes.features import FEATURES, held, make_trainer, plain, tied, weights
from tests.trainer.test_extensions import Replay

Found = dict[str, Any]

ADAPTED = {"lora": plain, "tied ends": tied}  # features whose policy has an adapter


def generation(placement: str, folder: str) -> Found:
    """Generate before, in and after training, with the model gathered and without."""
    found = {}
    # a group's completions are all alike, which leaves the bonus to learn from
    changes = {"generation_kwargs": {"top_k": 1}, "entropy_coef": 1.0, "learning_rate": 0.5}
    for gathers in (True, False):
        changes["ds3_gather_for_generation"] = gathers
        trainer = make_trainer("nothing", placement, folder, rollout_engine=None, **changes)
        seen = [greedy(trainer)]
        trainer.train()
        seen += [greedy(trainer), greedy(trainer)]
        found[gathers] = {"seen": seen, "log": logged(trainer)}
    return found


def greedy(trainer: GRPOTrainer) -> list[list[int]]:
    """Return the likeliest completions of some prompts, of which the last process has none."""
    prompts = [[3, 4, 5], [6, 7, 8, 9, 13], [5]]
    mine = prompts if trainer.accelerator.process_index == 0 else []
    completions = trainer.rollouts.generate(mine, max_tokens=6).token_ids
    assert len(completions) == len(mine)
    return completions


def checkpoints(placement: str, folder: str) -> Found:
    """Stop after each of the steps, go on, and save the model."""
    found: Found = {}
    for name in ("reference", "lora", "dynamic", "tied ends"):
        out = Path(folder, name)
        straight = make_trainer(name, placement, out, save_strategy="steps", save_steps=1)
        straight.train()
        resumed, finished = [], []
        for runs, checkpoint in ((resumed, f"{out}/checkpoint-1"), (finished, True)):
            runs.append(make_trainer(name, placement, out))
            runs[0].train(resume_from_checkpoint=checkpoint)
        straight.save_model(f"{folder}/whole {name}")
        trainers = {"straight": straight, "resumed": resumed[0], "finished": finished[0]}
        found[name] = {key: weights(trainer) for key, trainer in trainers.items()}
        found[name]["logs"] = [logged(trainer) for trainer in (straight, resumed[0])]
        files = out / "checkpoint-2"
        found[name]["files"] = sorted(str(path.relative_to(files)) for path in files.rglob("*"))
        if straight.accelerator.is_main_process:
            with loading_whole():
                found[name]["loaded"] = loaded(name, Path(folder, f"whole {name}"))
    return found


def loaded(name: str, folder: Path) -> dict[str, Tensor]:
    """Return the weights of the model that was saved to ``folder``, adapters merged."""
    if name not in ADAPTED:
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()
    from peft import PeftModel

    model = PeftModel.from_pretrained(ADAPTED[name](), folder)
    return {name: value.detach() for name, value in policy_weights(model)}


class PressesCtrlC(TrainerCallback):
    """Does so in the first step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            signal.raise_signal(signal.SIGINT)


def interrupted(placement: str, folder: str) -> Found:
    """Stop all processes by one of them, and go on."""
    trainer = make_trainer("dynamic", placement, folder)
    if rank() == processes() - 1:
        trainer.add_callback(PressesCtrlC())
    with pytest.raises(KeyboardInterrupt, match="after step 1; newest checkpoint: "):
        trainer.train()
    trainer = make_trainer("dynamic", placement, folder)
    trainer.train(resume_from_checkpoint=True)
    return {"weights": weights(trainer)}


class InFlight(BackgroundEngine):
    """Says by how many updates each token was drawn."""

    updates_in_flight = True
    updates = 0

    async def complete_one(self, prompt_ids, sampling):
        completion = await super().complete_one(prompt_ids, sampling)
        return completion._replace(versions=[self.updates] * len(completion.token_ids))

    def update_weights(self, weights: WeightSource, adapter: bool = False) -> None:
        super().update_weights(weights, adapter)
        self.updates += 1


def in_flight(placement: str, folder: str) -> Found:
    """Return this process's prompts of each step, some of which dynamic sampling adds."""
    prompts: list[list[str]] = []

    def note(batch, policy) -> None:
        prompts.append([sample.prompt for sample in batch.samples])

    engine = InFlight(make_tokenizer(), plain().eval(), rank())
    settings = {"generation_batches_ahead": 1, "max_staleness": 3, "max_steps": 3}
    make_trainer(
        "dynamic", placement, folder, rollout_engine=engine, columns=[note], **settings
    ).train()
    return {"prompts": prompts}


def loading(placement: str, folder: str) -> Found:
    """Load the policy by name, in shards where the placement can; evaluate first where it can."""
    changes: Found = {}
    if placement == "fsdp2":  # other processes than the first have no weights until they are placed
        config = FSDP2["fsdp_config"] | {"cpu_ram_efficient_loading": True}
        changes["fsdp_config"] = config | {"state_dict_type": "FULL_STATE_DICT"}
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate launch does
    policy, judge = Path(folder, "policy"), Path(folder, "judge")

    def write() -> str:
        """Write a policy and a classifier, while ZeRO-3 makes all models in shards."""
        if rank() == 0:
            with loading_whole():
                write_policy(policy, seed=0)
                tokenizer = make_tokenizer()
                tokenizer.save_pretrained(judge)
                config = make_policy(tokenizer, seed=0).config
                config.num_labels = 1
                torch.manual_seed(3)
                Qwen3ForSequenceClassification(config).save_pretrained(judge)
        if processes() > 1:
            torch.distributed.barrier()
        return str(policy)

    changes |= {"model": write, "reward_funcs": str(judge)}
    trainer = make_trainer("reference", placement, f"{folder}/out", **changes)
    before = held(trainer)
    zero = placement.startswith("zero")
    evaluated = None if zero else trainer.evaluate()["eval_reward"]
    trainer.train()
    found = {"log": logged(trainer), "weights": weights(trainer)}
    return found | {"held": before, "evaluated": evaluated}


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


def streamed(placement: str, folder: str) -> Found:
    """Let the first process alone walk through the weights: not to the end, twice, and to fail."""
    found: Found = {}
    for name in ("clipped", "lora"):
        trainer = make_trainer(name, placement, f"{folder}/{name}")
        trainer.train()
        place = placement_of(trainer.accelerator)
        on_first = partial(on_first_process, trainer.accelerator, place.sharded)

        def source() -> Iterator[tuple[str, Tensor]]:
            return policy_weights(trainer.model, place)  # noqa: B023

        def work(source: WeightSource) -> dict[str, Tensor]:
            next(iter(source()))
            return {key: value.clone() for key, value in source()}

        def failing(source: WeightSource) -> None:
            for _ in source():
                raise ValueError("half way")

        sent = on_first(work, source)
        with pytest.raises(ValueError, match="half way"):
            on_first(failing, source)
        with LiveBytes() as live:
            for item in policy_weights(trainer.model, place):
                del item  # before the next one is gathered
        own = weights(trainer)
        sizes = [value.numel() * value.element_size() for value in own.values()]
        found[name] = {"sent": sent, "weights": own, "peak": live.peak}
        found[name] |= {"largest": max(sizes), "total": sum(sizes)}
    return found


def refused(placement: str, folder: str) -> Found:
    """Ask for what cannot work; return the errors."""
    asked: dict[str, dict[str, Any]] = {
        "fp32 head": {"cast_lm_head_to_fp32": True, "bf16": True},
        "overlap": {"generation_batches_ahead": 1},
        "tokens": FEATURES["tokens"](),  # type: ignore[operator]
    }
    found = {
        name: refusal(
            lambda: make_trainer("nothing", placement, folder, rollout_engine=None, **changes)  # noqa: B023
        )
        for name, changes in asked.items()
    }
    if placement == "fsdp2":
        config = FSDP2["fsdp_config"] | {"cpu_ram_efficient_loading": True}
        found["loading"] = refusal(
            lambda: make_trainer("tied ends", placement, folder, fsdp_config=config)
        )
    if placement.startswith("zero"):
        found["evaluate"] = refusal(make_trainer("clipped", placement, folder).evaluate)
    return found


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "nothing"


def found_by_one(placement: str, folder: str) -> Found:
    """Return what all processes raise when one of them finds something wrong with a folder."""
    out = Path(folder, "run")
    make_trainer("dynamic", placement, out, save_strategy="steps", save_steps=1).train()
    trainer = make_trainer("dynamic", placement, out)
    lock = FileLock(out / "_training.lock")
    if rank() == 0:
        lock.acquire()
    trainer.accelerator.wait_for_everyone()
    locked = refusal(trainer.train)
    trainer.accelerator.wait_for_everyone()
    lock.release()
    (out / "checkpoint-2" / "process_state_0.pt").unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()
    return {"locked": locked, "part": refusal(lambda: trainer.train(resume_from_checkpoint=True))}


def budgeted(placement: str, folder: str) -> Found:
    """Return what each process cut its completions into, what it would take alone, and an error."""
    trainer = make_trainer("token budget", placement, folder, packing="padded")
    trainer.train()
    lengths = [batch.attention_mask.sum(1).tolist() for batch in trainer._buffer.batches]
    budget = trainer.args.max_tokens_per_micro_batch
    rows = sorted((length for batch in lengths for length in batch), reverse=True)
    alone = cut_rows(
        range(len(rows)), lambda part: computed_tokens([rows[i] for i in part]), budget
    )
    trainer = make_trainer("token budget", placement, f"{folder}/2", max_tokens_per_micro_batch=9)
    return {"lengths": lengths, "alone": len(alone), "error": refusal(trainer.train)}


def replayed(placement: str, folder: str) -> Found:
    """Return the groups of completions of each generation batch of this process."""
    seen: list[list[tuple[str, list[int]]]] = []
    trainer = make_trainer("nothing", placement, folder, prompts=Replay)
    calculate = trainer._calculate_rewards

    def noted(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Tensor:
        seen.append(list(zip(prompts, ids, strict=True)))
        return calculate(inputs, prompts, completions, ids)

    trainer._calculate_rewards = noted  # type: ignore[method-assign]
    trainer.train()
    return {"seen": [[batch[i : i + 4] for i in range(0, len(batch), 4)] for batch in seen]}


def death(placement: str, folder: str) -> None:
    """Let the last process end without a word in the second step."""

    def reward(completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step == 1 and rank() > 0:
            os._exit(3)
        return lengths_reward(completion_ids)

    make_trainer("nothing", placement, folder, reward_funcs=reward).train()
