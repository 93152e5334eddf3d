"""The jobs, the most urgent first: a command, its time, and the question it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_PYTEST = (
    *("-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "faulthandler_timeout=90"),
    *("--tb=short", "-rfE", "-q"),
)
_RESERVE = 25  # seconds at the end of a job in which no case starts
# the shapes by which the kernels are judged, and the providers compared there
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
    sources: tuple[str, ...] = field(
        default=()
    )  # files that make a result stale, in addition to the kernels


def choose(names: list[str]) -> list[Job]:
    """Return jobs in order, or all jobs without names. ``tests`` also selects ``tests-*``.

    Raises:
        ValueError: a name is unknown.
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
    """Return a job that runs ``benchmarks/test_<name>.py``, by default of the job's name.

    It skips the cases that it has no time for. ``kernels``: the benchmark calls Triton kernels.
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
        "Are the losses and log-probabilities right on this GPU, without waiting for it?",
        150,
        *("tests/net", "tests/test_linear_calls.py"),
        *("tests/gpu/test_waiting.py", "tests/schedule"),
    ),
    _tests(
        "tests-parts",
        "Are heads, engine, and kernels right on this GPU?",
        150,
        *("tests/head", "tests/engine", "tests/backends"),
    ),
    _tests(
        "bits",
        "Are sums complete, and does a row have the same bits by itself and among others?",
        60,
        "tests/gpu/test_bits.py",
        parallel=False,
    ),
    _suite(
        "row_kernel",
        "Is the kernel that reads logits bound by its bytes: at most 1.2 times a copy?",
        60,
        kernels=True,
    ),
    _suite(
        "anchored",
        "Which form of the GEMM that stores exp(logit - anchor) is best, and does it pay off?",
        275,
        kernels=True,
    ),
    _suite(
        "gemms",
        "How many rows should a chunk have, and should it be a multiple of 256?",
        90,
        "products",
    ),
    _suite(
        "rounding",
        "Should Triton or torch do a pass over the weight's gradient?",
        45,
        kernels=True,
    ),
    _suite(
        "host",
        "How long does the GPU wait for the CPU before the first GEMM, and where else?",
        75,
        *("host", "waits"),
    ),
    _suite(
        "heads",
        "How close is ours to the bare GEMMs, and is it ahead of Liger?",
        200,
        only=_HEADS,
    ),
    _suite(
        "errors",
        "Is the loss exact on hard inputs, with the same bits in any batch?",
        60,
        "exactness",
    ),
    _suite(
        "skipping",
        "From which share of clipped tokens does it pay off to leave out their rows?",
        120,
    ),
    _suite(
        "chunks",
        "How many rows should a chunk have if the batch is long?",
        90,
        "tiles",
        only="loss",
        kernels=True,
    ),
    _suite(
        "products",
        "Which form of each GEMM should a step use, odd vocabularies included?",
        120,
        suite="gpu-full",
    ),
    _suite(
        "profile",
        "Which kernels use the time of a step, and where does the GPU idle?",
        40,
        "profile",
    ),
    _suite(
        "tiles",
        "Which tiles belong in gpu_tiles.py?",
        90,
        only="not loss",
        kernels=True,
    ),
    _suite(
        "libraries",
        "How does every library do at every work, head, and length, for the tables?",
        275,
        "heads",
        reserve=90,
    ),
    Job(
        name="trainer-demo",
        decides="Does the trainer run on a GPU: a few steps of the demo?",
        seconds=150,
        command=Command((*_DEMO, "40")),
        dry=Command((*_DEMO, "2")),
        sources=_TRAINER[:1],
    ),
    _suite(
        "trainer-real",
        "Does a pretrained model learn on a GPU as with TRL, in which time and memory?",
        275,
        "curves",
        sources=(
            *_TRAINER[:1],
            *("benchmarks/real.py", "benchmarks/real_text.py", "docs/examples/real/*"),
        ),
    ),
    _suite(
        "trainer-lora",
        "How much time and memory does a LoRA step of a 0.5B model need, next to TRL?",
        275,
        "lora",
        sources=_TRAINER,
    ),
    _suite(
        "activations",
        "What do offload, every_n_layers, and MLP tiles save and cost in an 8B body?",
        275,
        sources=("grpo_trainer/policy/tiled_mlp.py",),
    ),
    _suite(
        "vocabulary",
        "How long a sequence fits with Gemma 3 1B's head, in which time: ours, TRL, eager?",
        275,
        reserve=60,
    ),
    _suite(
        "prefixes",
        "What does sharing the common beginning of completions save in a step?",
        120,
        sources=_TRAINER[:1],
    ),
    _suite(
        "sparse",
        "Is a sparse backward faster than the bare GEMMs, and at which error?",
        240,
    ),
    _suite(
        "entries",
        "Which pass of a sparse backward is far slower than a copy of its bytes?",
        60,
        kernels=True,
    ),
    _suite(
        "backwards",
        "Which backward of the log-probabilities is fastest, and at which error?",
        275,
    ),
    _suite("accuracy", "How exact is every library on a policy's distributions?", 275),
)
