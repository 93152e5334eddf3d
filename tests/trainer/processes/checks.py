"""What else processes do together: generate, stream weights, save, load, refuse and stop.

Each is called on every process with its placement and a folder that all share, asserts what a
process can tell by itself, and returns what is compared with one process, or between several.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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
from tests.trainer.features import made, policy, tied_policy
from tests.trainer.processes.features import DYNAMIC, FEATURES, held, run, trainer_of, weights
from tests.trainer.test_extensions import Replay

Found = dict[str, Any]

ADAPTED = {"lora": policy, "tied ends": tied_policy}  # features whose policy has an adapter


def generation(placement: str, folder: str) -> Found:
    """Generate before, in and after training, with the model gathered and without."""
    found: Found = {}
    # a group's completions are all alike, which leaves the bonus to learn from
    changes = {"generation_kwargs": {"top_k": 1}, "entropy_coef": 1.0, "learning_rate": 0.5}
    for gathers in (True, False):
        changes["ds3_gather_for_generation"] = gathers
        trainer = trainer_of("nothing", placement, folder, rollout_engine=None, **changes)
        seen = [greedy(trainer)]
        trainer.train()
        seen += [greedy(trainer), greedy(trainer)]
        assert rank() > 0 or seen[0] != seen[1] == seen[2]
        found |= {f"seen, {gathers}": seen, f"log, {gathers}": logged(trainer)}
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
    for name in ("reference", "lora", "tied ends"):
        out, more = Path(folder, name), DYNAMIC if name == "reference" else {}
        straight = trainer_of(name, placement, out, save_strategy="steps", save_steps=1, **more)
        straight.train()
        resumed, finished = (trainer_of(name, placement, out, **more) for _ in range(2))
        resumed.train(resume_from_checkpoint=f"{out}/checkpoint-1")
        finished.train(resume_from_checkpoint=True)
        assert logged(resumed) == logged(straight)
        expected, *ends = (weights(trainer) for trainer in (straight, resumed, finished))
        straight.save_model(f"{folder}/whole {name}")
        if straight.accelerator.is_main_process:
            with loading_whole():
                ends.append(loaded(name, Path(folder, f"whole {name}")))
        for end in ends:
            assert_equal(end, expected)
        assert_files(name, placement, out / "checkpoint-2")
    return {}


def assert_files(name: str, placement: str, checkpoint: Path) -> None:
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*")}
    shards = "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    of = {"ddp": "optimizer.pt", "fsdp2": "pytorch_model_fsdp_0/__1_0.distcp"}
    assert {of.get(placement, shards), "SHA256SUMS", "process_state_1.pt"} <= files
    whole = "adapter_model.safetensors" if name in ADAPTED else "model.safetensors"
    assert (whole in files) == (placement in ("ddp", "zero2"))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


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
    trainer = trainer_of("dynamic", placement, folder)
    if rank() == processes() - 1:
        trainer.add_callback(PressesCtrlC())
    with pytest.raises(KeyboardInterrupt, match="after step 1; newest checkpoint: "):
        trainer.train()
    trainer = trainer_of("dynamic", placement, folder)
    trainer.train(resume_from_checkpoint=True)
    return {"weights": weights(trainer)}


def uninterrupted(placement: str, folder: str) -> Found:
    return {"weights": run("dynamic", placement, folder)["weights"]}


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
    """Keep groups whole: also those of dynamic sampling, of which one process may lack none."""
    prompts: list[list[str]] = []

    def note(batch, policy) -> None:
        prompts.append([sample.prompt for sample in batch.samples])

    engine = InFlight(make_tokenizer(), policy().eval(), rank())
    settings = {"generation_batches_ahead": 1, "max_staleness": 3, "max_steps": 3}
    trainer_of(
        "dynamic", placement, folder, rollout_engine=engine, columns=[note], **settings
    ).train()
    for step in prompts:
        groups = [step[:4], step[4:]]
        assert [len(set(group)) for group in groups] == [1, 1] and len(step) == 8
    return {}


def loading(placement: str, folder: str) -> Found:
    """Load the policy by name, in shards where the placement can; evaluate first where it can."""
    changes: Found = {}
    if placement == "fsdp2":  # other processes than the first have no weights until they are placed
        config = FSDP2["fsdp_config"] | {"cpu_ram_efficient_loading": True}
        changes["fsdp_config"] = config | {"state_dict_type": "FULL_STATE_DICT"}
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate launch does
    saved, judge = Path(folder, "policy"), Path(folder, "judge")

    def write() -> str:
        """Write a policy and a classifier, while ZeRO-3 makes all models in shards."""
        if rank() == 0:
            with loading_whole():
                write_policy(saved, seed=0)
                tokenizer = make_tokenizer()
                tokenizer.save_pretrained(judge)
                config = make_policy(tokenizer, seed=0).config
                config.num_labels = 1
                torch.manual_seed(3)
                Qwen3ForSequenceClassification(config).save_pretrained(judge)
        if processes() > 1:
            torch.distributed.barrier()
        return str(saved)

    changes |= {"model": write, "reward_funcs": str(judge)}
    trainer = trainer_of("reference", placement, f"{folder}/out", **changes)
    before = held(trainer)
    zero = placement.startswith("zero")
    evaluated = None if zero else trainer.evaluate()["eval_reward"]
    trainer.train()
    assert before == (0.5 if placement == "zero3" else 1.0)
    found = {"log": logged(trainer), "weights": weights(trainer)}
    return found if evaluated is None else found | {"evaluated": evaluated}


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
    """Let the first process walk through the weights by itself: in part, twice, and to fail.

    All gather them; never much more than a parameter is in memory.
    """
    for name in ("token budget", "lora"):
        trainer = trainer_of(name, placement, f"{folder}/{name}")
        trainer.train()
        place = placement_of(trainer.accelerator)
        on_first = partial(on_first_process, trainer.accelerator, place.sharded)
        source = partial(policy_weights, trainer.model, place)
        sent = on_first(copied, source)
        with pytest.raises(ValueError, match="half way"):
            on_first(failing, source)
        with LiveBytes() as live:
            for item in source():
                del item  # before the next one is gathered
        own = weights(trainer)
        if rank() == 0:
            assert_equal(sent, own)
        sizes = [value.numel() * value.element_size() for value in own.values()]
        # the gathered one and its parts; the thread that communicates may free the last ones late
        assert 0 < live.peak <= 4 * max(sizes) + 1024 < sum(sizes) / 2
    return {}


def copied(source: WeightSource) -> dict[str, Tensor]:
    next(iter(source()))
    return {key: value.clone() for key, value in source()}


def failing(source: WeightSource) -> None:
    for _ in source():
        raise ValueError("half way")


def refused(placement: str, folder: str) -> Found:
    """Ask for what cannot work, by the error that it is."""
    tokens = {"fsdp2": "set modules_to_save=", "zero2": "nothing", "zero3": "use ZeRO-2"}
    for changes, message in (
        ({"cast_lm_head_to_fp32": True, "bf16": True}, "cast_lm_head_to_fp32: expected False"),
        (
            {"generation_batches_ahead": 1},
            "generation_batches_ahead: expected 0, or an engine with its own weights",
        ),
        (made(FEATURES["tokens"]), tokens[placement]),
    ):
        make = partial(trainer_of, "nothing", placement, folder, rollout_engine=None, **changes)
        assert message in refusal(make)
    if placement == "fsdp2":
        config = FSDP2["fsdp_config"] | {"cpu_ram_efficient_loading": True}
        make = partial(trainer_of, "tied ends", placement, folder, fsdp_config=config)
        assert "cpu_ram_efficient_loading: expected False" in refusal(make)
    else:
        said = refusal(trainer_of("token budget", placement, folder).evaluate)
        assert "evaluate: expected a call during or after train" in said
    return {}


def refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "nothing"


def found_by_one(placement: str, folder: str) -> Found:
    """Raise on all processes what one of them finds wrong with a folder."""
    out = Path(folder, "run")
    trainer_of("dynamic", placement, out, save_strategy="steps", save_steps=1).train()
    trainer = trainer_of("dynamic", placement, out)
    lock = FileLock(out / "_training.lock")
    if rank() == 0:
        lock.acquire()
    trainer.accelerator.wait_for_everyone()
    locked = refusal(trainer.train)
    trainer.accelerator.wait_for_everyone()
    lock.release()
    (out / "checkpoint-2" / "process_state_0.pt").unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()
    part = refusal(partial(trainer.train, resume_from_checkpoint=True))
    assert "expected a folder that no other run uses" in locked
    assert "checkpoint-2 has no process_state_0.pt" in part
    return {}


def budgeted(placement: str, folder: str) -> Found:
    """Return what each process cut its completions into, what it would take alone, and an error."""
    trainer = trainer_of("token budget", placement, folder, packing="padded")
    trainer.train()
    lengths = [batch.attention_mask.sum(1).tolist() for batch in trainer._buffer.batches]
    budget = trainer.args.max_tokens_per_micro_batch
    rows = sorted((length for batch in lengths for length in batch), reverse=True)
    alone = cut_rows(
        range(len(rows)), lambda part: computed_tokens([rows[i] for i in part]), budget
    )
    trainer = trainer_of("token budget", placement, f"{folder}/2", max_tokens_per_micro_batch=9)
    return {"lengths": lengths, "alone": len(alone), "error": refusal(trainer.train)}


def replayed(placement: str, folder: str) -> Found:
    """Replay a process's own groups, which are whole ones of one prompt each."""
    seen: list[list[tuple[str, list[int]]]] = []
    trainer = trainer_of("nothing", placement, folder, prompts=Replay)
    calculate = trainer._calculate_rewards

    def noted(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Tensor:
        seen.append(list(zip(prompts, ids, strict=True)))
        return calculate(inputs, prompts, completions, ids)

    trainer._calculate_rewards = noted  # type: ignore[method-assign]
    trainer.train()
    first, *rest = ([batch[i : i + 4] for i in range(0, len(batch), 4)] for batch in seen)
    for groups in (first, *rest):
        assert all(len({prompt for prompt, _ in group}) == 1 for group in groups)
    before = first
    for groups in rest:
        assert groups[-1] in before and not [x for x in groups[:-1] if x in before]
        before = before + groups
    return {}


def death(placement: str, folder: str) -> None:
    """Let the last process end without a word in the second step."""

    def reward(completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step == 1 and rank() > 0:
            os._exit(3)
        return lengths_reward(completion_ids)

    trainer_of("nothing", placement, folder, reward_funcs=reward).train()
