"""Ends a training at random moments until it is through, and compares it with an undisturbed one.

    python -m tests.chaos --kills 100 --seed 7

A run is started, ended by a signal, and started again with ``--resume_from_checkpoint true``, until
it is through; then another one, until so many were ended. What each leaves must be what the
undisturbed run leaves, to the bit. Each start is a fork of this process, which has imported
everything and done nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from grpo_trainer.cli import main as grpo_train
from grpo_trainer.demo.policy import write_policy
from grpo_trainer.demo.task import write_dataset
from tests.support import left_behind

ROOT = Path(__file__).parents[1]
STEPS = 12
SETTINGS: dict[str, Any] = {
    "model_name_or_path": "../model",
    "dataset_name": "../train.jsonl",
    "reward_funcs": "tests.chaos.noisy_reward",
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "steps_per_generation": 3,
    "max_completion_length": 4,
    "max_steps": STEPS,
    "dynamic_sampling": True,
    "use_adaptive_entropy": True,
    "entropy_target": 2.4,
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 5,
    "learning_rate": 1e-2,
    "logging_steps": 3,
    "log_completions": True,
    "num_completions_to_print": 0,
    "save_steps": 2,
    "save_total_limit": 2,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}
# as they are sent; a second Ctrl-C follows the first after a moment
WAYS = ((signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGINT,), (signal.SIGINT, signal.SIGINT))
PATIENCE = 120.0  # seconds until a start counts as one that hangs
NOTICE = "finishing and saving this step"
LOST = "Exception ignored in"  # Python loses a KeyboardInterrupt within a weak reference's callback


def noisy_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    noise = random.random() + np.random.random()
    return [noise * (len(ids) + ids[0] % 3 + ids[-1] % 5) for ids in completion_ids]


@dataclass
class End:
    """How a start ended."""

    code: int  # as a shell says
    output: str
    was_through: bool  # when the first signal was sent


class Run:
    """One training, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        folder.mkdir()

    def start(self) -> int:
        """Start it, or go on from its newest checkpoint; return the id of the process."""
        argv = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
        if list(self.out.glob("checkpoint-*")):
            argv += ["--resume_from_checkpoint", "true"]
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        child = os.fork()
        if child == 0:
            self._become(argv)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return child

    def end(self, child: int, way: Sequence[signal.Signals], delays: Sequence[float]) -> End:
        """Send the signals of ``way``, each after its delay in seconds, and wait for the end."""
        was_through = False
        for index, (number, delay) in enumerate(zip(way, delays, strict=True)):
            over = _is_over(child, delay)
            if index == 0:
                was_through = (self.out / f"checkpoint-{STEPS}").exists()
            if not over:
                os.kill(child, number)
        if not _is_over(child, PATIENCE):
            os.kill(child, signal.SIGABRT)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output = (self.folder / "output").read_text()
        return End(128 - code if code < 0 else code, output, was_through)

    def newest(self) -> int:
        """Return the step of the newest checkpoint."""
        return max((int(path.name[11:]) for path in self.out.glob("checkpoint-*")), default=0)

    def _become(self, argv: list[str]) -> NoReturn:
        """Be the process that trains."""
        code: Any = 1
        try:
            output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            grpo_train(argv)
            code = 0
        except SystemExit as end:
            code = end.code
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def _is_over(child: int, seconds: float) -> bool:
    """Wait for the end of a process, but no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def disturb(run: Run, chance: random.Random, kills: int, seconds: float) -> tuple[int, list[str]]:
    """End ``run`` up to ``kills`` times on its way; return how often, and what was not kept."""
    done = 0
    while True:
        way = chance.choice(WAYS) if done < kills else ()
        delays = [chance.uniform(0, seconds), chance.uniform(0, 0.2)][: len(way)]
        end = run.end(run.start(), way, delays)
        problem = broken_promise(end, way, run)
        if problem is not None:
            return done + 1, [problem, end.output[-1500:]]
        if end.code == 0:
            return done, []
        done += 1
        names = ", ".join(
            f"{sent.name} after {s:.2f} s" for sent, s in zip(way, delays, strict=True)
        )
        print(f"{run.folder.name}: {names}; step {run.newest()} is saved", flush=True)


def broken_promise(end: End, way: Sequence[signal.Signals], run: Run) -> str | None:
    """Return how the end differs from what the documents say."""
    if end.code == 0:
        heard = end.was_through or not way or way[0] != signal.SIGINT or LOST in end.output
        return None if heard else "it went on after Ctrl-C"
    if not way or end.code != 128 + way[0]:
        return f"the exit code was {end.code}"
    if len(way) == 1 and NOTICE in end.output:
        last = end.output.splitlines()[-1]
        found = re.match(r"grpo-train: stopped after step (\d+); newest .*/checkpoint-\1; ", last)
        if found is None or not (run.out / f"checkpoint-{found[1]}").is_dir():
            return f"the step was not saved: {last}"
    return None


def differences(straight: Run, run: Run) -> list[str]:
    """Return where ``run``, which is through, is not ``straight``."""
    found = []
    for name, read in {
        "files": _names,
        "last checkpoint": lambda out: left_behind.checkpoint(out / f"checkpoint-{STEPS}"),
        "completions": left_behind.completions,
        "model and log": left_behind.outcome,
    }.items():
        expected, got = read(straight.out), read(run.out)
        names = expected.keys() | got.keys()
        found += [f"{name}: {n}" for n in sorted(names) if expected.get(n) != got.get(n)]
    return found


def _names(out: Path) -> dict[str, bool]:
    """Return what lies there, but older checkpoints: after Ctrl-C they are of other steps."""
    names = {path.name for path in out.iterdir()}
    older = {f"checkpoint-{step}" for step in range(STEPS)}
    return dict.fromkeys(names - older, True)


def chaos(kills: int, seed: int, folder: Path) -> bool:
    """Return whether every promise was kept, and every run is the undisturbed one."""
    write_policy(folder / "model", seed=0)
    write_dataset(folder, seed=0)
    straight = Run(folder / "straight")
    began = time.monotonic()
    end = straight.end(straight.start(), (), ())
    assert end.code == 0, end.output
    seconds = time.monotonic() - began
    print(f"seed {seed}; the undisturbed run took {seconds:.1f} s", flush=True)
    done = runs = failures = 0
    while done < kills:
        run = Run(folder / f"run-{seed + runs}")
        count, problems = disturb(run, random.Random(seed + runs), kills - done, seconds)
        problems = problems or differences(straight, run)
        if problems:
            failures += 1
            print(f"FAILED: {run.folder}: {'; '.join(problems)}")
            print(f"again: python -m tests.chaos --seed {seed + runs} --kills {count}", flush=True)
        done, runs = done + count, runs + 1
    print(f"seed {seed}: {done} kills in {runs} runs, {failures} failures", flush=True)
    return not failures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    gc.freeze()  # what is imported: transformers asks for a collection in each run
    kept = chaos(options.kills, options.seed, folder)
    if kept:
        shutil.rmtree(folder)
    raise SystemExit(not kept)


if __name__ == "__main__":
    main()
