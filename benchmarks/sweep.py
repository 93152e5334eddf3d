"""``python -m benchmarks.sweep``: measures tile sizes on this GPU and rewrites their table.

Each entry's measurements go to ``tiles-<device>.jsonl`` in the folder that the variable OUT names,
by default ``benchmarks/results``, as soon as they are there. The exit code is 1 where an entry is
missing, and 2 where there is no GPU.
"""

from __future__ import annotations

import json
import os
import pprint
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.environment import environment, slug
from benchmarks.gpu.candidates import Candidate
from benchmarks.measure import describe, device_is_lost, in_turns
from benchmarks.problem import make_problem
from benchmarks.results import RESULTS
from benchmarks.shapes import Case, Model
from benchmarks.timing import make_timer
from benchmarks.work import WORKS
from grpo_kernels.backends.configs import tuned
from grpo_kernels.backends.configs.linear import LINEAR_KERNELS, width_class
from grpo_kernels.backends.configs.rows import ROW_KERNELS, bits, device_class, vocabulary_class

TABLE = Path(tuned.__file__)
_PARTS = ("ROW_CONFIGS", "LINEAR_CONFIGS", "CHUNK_ROWS")
_LIMIT = 420.0  # seconds after which no further entry is begun
_ROUNDS, _FINALISTS, _FINAL_ROUNDS = 7, 3, 21
_MARGIN = 0.03  # of the default's time; a lead that is smaller may be noise
_HEADS = (  # of each class of vocabularies, the commonest first
    Model("medium", 2048, 151936),
    Model("large", 2560, 262144),
    Model("small", 2048, 32000),
)
_LINEAR_HEADS = (  # of the forward without gradient: D counts, and what happens to a logit
    *_HEADS,
    Model("medium", 4096, 151936),
    Model("large", 2304, 256000, softcap=30.0),
    Model("large", 4608, 256000, softcap=30.0),
    Model("small", 4096, 32000),
)
_LINEAR_ROWS = 8192
_TOKENS = 32768  # two of the largest chunks


class Entry(NamedTuple):
    """An entry of the table: a kernel, or None for the rows of a chunk, at logits of a dtype."""

    kernel: str | None
    dtype: torch.dtype
    head: Model

    @property
    def part(self) -> str:
        """The dictionary of the table."""
        if self.kernel is None:
            return "CHUNK_ROWS"
        return "LINEAR_CONFIGS" if self.kernel in LINEAR_KERNELS else "ROW_CONFIGS"

    @property
    def key(self) -> tuple[str | int, ...]:
        """The key in it, without the device."""
        size, vocabulary = bits(self.dtype), vocabulary_class(self.head.vocabulary)
        if self.kernel is None:
            return size, vocabulary
        width = (width_class(self.head.hidden),) if self.kernel in LINEAR_KERNELS else ()
        return self.kernel, size, *width, vocabulary


def entries() -> list[Entry]:
    """Return all entries, the most important first."""
    chosen = []
    for dtype in (torch.float32, torch.bfloat16):
        for head in _LINEAR_HEADS:
            chosen.append(Entry(LINEAR_KERNELS[head.softcap is not None], dtype, head))
        chosen += [Entry(x, dtype, head) for head in _HEADS for x in (*ROW_KERNELS, None)]
    return chosen


def candidates(entry: Entry) -> list[Candidate]:
    """Return the candidates on this machine's GPU, the default first."""
    from benchmarks.gpu import chunk_sizes, linear_tiles, row_tiles  # import Triton

    device, head = torch.device("cuda", torch.cuda.current_device()), entry.head
    precision = "fp32" if entry.dtype == torch.float32 else "input"
    torch.cuda.empty_cache()
    if entry.kernel is None:
        problem = make_problem(Case(head, _TOKENS, "bf16", WORKS["dapo"]), "cuda")
        return chunk_sizes.candidates(problem, precision)
    if entry.kernel in LINEAR_KERNELS:
        return linear_tiles.candidates(head, _LINEAR_ROWS, precision, device, torch.bfloat16)
    count = row_tiles.tile_rows(entry.dtype, head.vocabulary, torch.cuda.mem_get_info(device)[0])
    return row_tiles.candidates(entry.kernel, entry.dtype, count, head.vocabulary, device)


def fastest(
    tried: Sequence[Candidate], seconds: Callable[[Callable[[], Any]], float]
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the value to use, and what was measured: seconds, or why a candidate is out.

    The fastest of many is partly the luckiest, so the fastest few are timed again beside the
    default, the first, which stays unless another is faster by more than a margin.

    Raises:
        RuntimeError: the default gives a wrong result: nothing is tuned on top of it.
    """
    found: dict[str, Any] = {}
    right = []
    for candidate in tried:
        try:
            candidate.prepare()
            failure = candidate.check()
        except Exception as error:  # it does not compile, or does not fit: a result like any other
            failure = describe(error)
        found[str(candidate.value)] = failure
        if failure is None:
            right.append(candidate)
        elif candidate is tried[0]:
            raise RuntimeError(f"the default failed: {failure}")
    first = _medians(right, _ROUNDS, seconds)
    finalists = sorted(right, key=lambda x: first[x.value])[:_FINALISTS]
    final = _medians(list(dict.fromkeys([tried[0], *finalists])), _FINAL_ROUNDS, seconds)
    found |= {str(value): time for value, time in {**first, **final}.items()}
    winner, default = min(final, key=lambda value: final[value]), tried[0].value
    return (winner if final[winner] < (1 - _MARGIN) * final[default] else default), found


def _medians(
    tried: Sequence[Candidate], rounds: int, seconds: Callable[[Callable[[], Any]], float]
) -> dict[tuple[int, ...], float]:
    times: dict[tuple[int, ...], list[float]] = {candidate.value: [] for candidate in tried}
    for value, candidate in in_turns([(x.value, x) for x in tried], rounds):
        candidate.prepare()
        times[value].append(seconds(candidate.run))
    return {value: median(each) for value, each in times.items()}


def write_table(device: str, found: dict[Entry, tuple[int, ...]], path: Path = TABLE) -> None:
    """Replace all entries of a class of devices by these; those of others stay."""
    text = path.read_text()
    values: dict[str, Any] = {}
    exec(text, values)
    for part in _PARTS:
        new = {key: value for key, value in values[part].items() if key[0] != device}
        for entry, value in found.items():
            if entry.part == part:
                new[device, *entry.key] = value[0] if entry.kernel is None else value
        start = text.index(f"{part}: ")
        start, end = text.index(" = ", start) + 3, text.find("\n\n#", start)
        text = text[:start] + pprint.pformat(new, width=96) + (text[end:] if end > 0 else "\n")
    path.write_text(text.replace("'", '"'))


def main() -> int:
    if not torch.cuda.is_available():
        print(f"no GPU to tune for: torch {torch.__version__} finds none")
        return 2
    facts, end = environment("cuda"), time.monotonic() + _LIMIT
    device = device_class(torch.device("cuda", torch.cuda.current_device()))
    path = Path(os.environ.get("OUT") or RESULTS) / f"tiles-{slug(facts['device'])}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device_class": device, **facts}) + "\n")
    chosen: dict[Entry, tuple[int, ...]] = {}
    every = entries()
    for entry in every:
        if time.monotonic() > end:
            break
        measured: dict[str, Any] = {}
        try:
            chosen[entry], measured = fastest(candidates(entry), make_timer("cuda"))
            said = str(chosen[entry])
        except Exception as error:  # the other entries can still be measured
            said = describe(error)
        print(f"{entry.part} {entry.key}: {said}", flush=True)
        with path.open("a") as file:
            line = {"part": entry.part, "key": entry.key, "said": said, "seconds": measured}
            file.write(json.dumps(line) + "\n")
        if device_is_lost("cuda"):
            print(f"the device was lost at {entry.key}: nothing more can run on it")
            break
    write_table(device, chosen)
    print(f"written: {path}, {TABLE}; {len(every) - len(chosen)} of {len(every)} entries missing")
    return int(len(chosen) < len(every))


if __name__ == "__main__":
    sys.exit(main())
