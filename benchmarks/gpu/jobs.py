"""The jobs, the most urgent first: a command each, its time, and what its result decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "faulthandler_timeout=90"),
    *("--tb=short", "-rfE", "-q"),
)
_RESERVE = 25  # seconds of a job's limit in which no further case starts
# the shapes by which the kernels are judged, and who is compared there
_SHAPES = ("1.7b-8192", "1.7b-1024", "1.7b-4096", "8b-8192")
_CASES = " or ".join(f"dapo-qwen3-{shape}-bf16" for shape in _SHAPES)
_HEADS = f"({_CASES}) and (bare or ours or liger)"


class Command(NamedTuple):
    """Words after ``python``; ``{out}`` in one is the folder of results."""

    words: tuple[str, ...]
    parallel: bool = False  # whether pytest may use as many processes as there are cores
    interprets: bool = False  # whether Triton runs in its interpreter


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process with a time limit."""

    name: str
    decides: str
    seconds: int  # after which it is ended
    command: Command
    dry: Command  # the same at tiny shapes on a CPU
    sources: tuple[str, ...] = field(default=())  # besides the kernels, what makes a result stale


def choose(names: list[str]) -> list[Job]:
    """Return jobs in their order; without names all. ``tests`` also stands for ``tests-*``.

    Raises:
        ValueError: there is no such job.
    """
    chosen = set()
    for name in names:
        matches = [job.name for job in JOBS if job.name == name]
        matches = matches or [job.name for job in JOBS if job.name.startswith(f"{name}-")]
        if not matches:
            every = ", ".join(job.name for job in JOBS)
            raise ValueError(f"JOBS: expected some of {every}; got {name}")
        chosen.update(matches)
    return [job for job in JOBS if job.name in chosen or not names]


def _tests(name: str, decides: str, seconds: int, *paths: str, parallel: bool = True) -> Job:
    words = (*_PYTEST, "--continue-on-collection-errors", *paths)
    return Job(
        name=name,
        decides=decides,
        seconds=seconds,
        command=Command((*words, "-m", "gpu", "--durations=8"), parallel),
        dry=Command((*words, "--collect-only"), interprets=True),
        sources=tuple(path if path.endswith(".py") else f"{path}/**/*.py" for path in paths),
    )


def _suite(
    name: str,
    decides: str,
    seconds: int,
    *benchmarks: str,
    suite: str = "gpu",
    only: str = "",
    reserve: int = _RESERVE,
    kernels: bool = False,
    sources: tuple[str, ...] = (),
) -> Job:
    """Return a job that runs ``benchmarks/test_<name>.py``, of its own name unless others are said.

    It ends in time by itself: what it has no time for is skipped. ``kernels``: it calls Triton's.
    """
    paths = tuple(f"benchmarks/test_{benchmark}.py" for benchmark in benchmarks or (name,))
    words = (*_PYTEST, "-s", *paths, "--benchmark-only", "--results={out}")
    chosen = ("-k", only) if only else ()
    return Job(
        name=name,
        decides=decides,
        seconds=seconds,
        command=Command((*words, f"--suite={suite}", f"--deadline={seconds - reserve}", *chosen)),
        dry=Command((*words, "--suite=tiny"), interprets=kernels),
        sources=(*paths, *sources),
    )


_DEMO = ("-m", "grpo_trainer.demo", "--out", "runs/gpu-demo", "--steps")
_TRAINER = ("grpo_trainer/**/*.py", "benchmarks/training.py")
JOBS = (
    _tests(
        "tests-ops",
        "Whether the losses and log-probabilities are right on this GPU, and never wait for it.",
        150,
        *("tests/net", "tests/test_linear_calls.py"),
        *("tests/gpu/test_waiting.py", "tests/schedule"),
    ),
    _tests(
        "tests-parts",
        "Whether heads, engine and kernels are right on this GPU.",
        150,
        *("tests/head", "tests/engine", "tests/backends"),
    ),
    _tests(
        "bits",
        "Whether sums are whole, and a row has the same bits alone and among others.",
        60,
        "tests/gpu/test_bits.py",
        parallel=False,
    ),
    _suite(
        "row_kernel",
        "Whether the kernel that reads logits is bound by its bytes: at most 1.2 times a copy's.",
        60,
        kernels=True,
    ),
    _suite(
        "anchored",
        "Which form of the GEMM that stores exp(logit - anchor) to build on, and whether it pays.",
        275,
        kernels=True,
    ),
    _suite(
        "gemms",
        "How many rows a chunk should have, and whether they should be a multiple of 256.",
        90,
        "products",
    ),
    _suite(
        "rounding",
        "Whether a pass over the weight's gradient should be Triton's or torch's.",
        45,
        kernels=True,
    ),
    _suite(
        "host",
        "How long the GPU waits for the host before the first GEMM, and where else.",
        75,
        *("host", "waits"),
    ),
    _suite(
        "heads",
        "How far ours is from the bare GEMMs, and whether ahead of Liger.",
        200,
        only=_HEADS,
    ),
    _suite(
        "errors",
        "Whether the loss is exact on hard inputs, and its bits are the same in any batch.",
        60,
        "exactness",
    ),
    _suite(
        "skipping",
        "From which share of clipped tokens on leaving their rows out of the GEMMs pays.",
        120,
    ),
    _suite(
        "chunks",
        "How many rows a chunk should have where the batch is long.",
        90,
        "tiles",
        only="loss",
        kernels=True,
    ),
    _suite(
        "products",
        "Which form of each GEMM a step should use, odd vocabularies included.",
        120,
        suite="gpu-full",
    ),
    _suite(
        "profile",
        "Which kernels the time of a step goes to, and where the GPU idles.",
        40,
        "profile",
    ),
    _suite(
        "tiles",
        "Which tiles belong into gpu_tiles.py.",
        90,
        only="not loss",
        kernels=True,
    ),
    _suite(
        "libraries",
        "How every library does at every work, head and length: the tables of the README.",
        275,
        "heads",
        reserve=90,
    ),
    Job(
        name="trainer-demo",
        decides="Whether the trainer runs on a GPU at all: the demo, a few steps of it.",
        seconds=150,
        command=Command((*_DEMO, "40")),
        dry=Command((*_DEMO, "2")),
        sources=_TRAINER[:1],
    ),
    _suite(
        "trainer-real",
        "Whether a pretrained model learns on a GPU as it does with TRL, in which time and memory.",
        275,
        "curves",
        sources=(
            *_TRAINER[:1],
            *("benchmarks/real.py", "benchmarks/real_text.py", "docs/examples/real/*"),
        ),
    ),
    _suite(
        "trainer-lora",
        "How long a LoRA step of a 0.5B model takes in our trainer and in TRL's, and its memory.",
        275,
        "lora",
        sources=_TRAINER,
    ),
    _suite(
        "activations",
        "What offload, every_n_layers and tiles of MLPs save in an 8B body, and what they cost.",
        275,
        sources=("grpo_trainer/policy/tiled_mlp.py",),
    ),
    _suite(
        "vocabulary",
        "Time, memory and longest sequence of a step with Gemma 3 1B's head: ours, TRL's, eager.",
        275,
        reserve=60,
    ),
    _suite(
        "prefixes",
        "What sharing the tokens that completions begin with saves of a step.",
        120,
        sources=_TRAINER[:1],
    ),
    _suite(
        "sparse",
        "Whether a sparse backward is faster than the bare GEMMs, and at which error.",
        240,
    ),
    _suite(
        "entries",
        "Which pass of a sparse backward is far from the time of its bytes.",
        60,
        kernels=True,
    ),
    _suite(
        "backwards",
        "Which backward of the log-probabilities is the fastest at which error.",
        275,
    ),
    _suite("accuracy", "How exact every library is on a policy's distributions.", 275),
)
