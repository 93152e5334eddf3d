"""``python -m tests.emulated.mutations``: errors in the kernels, each of which a test must see.

For ``tests/emulated/run.sh``'s environment. Barriers, masks, offsets and reductions: what an
interpreter of whole programs does not see, or what only the compiled addresses show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_BARRIER = "    tl.debug_barrier()"
# file of the kernels, phrase, what it becomes, and the tests that look
MUTATIONS = [
    ("dlogits", _BARRIER + "\n    y = ", "    y = ", "test_rows.py narrowing"),
    ("dlogits", _BARRIER + "  # the target's", "    pass  # the target's", "test_rows.py matches"),
    ("row_stats", "else columns < end", "else columns <= end", "test_rows.py matches"),
    ("row_stats", "tl.sum(moment, axis=0)", "tl.max(moment, axis=0)", "test_rows.py matches"),
    ("row_stats", "row * stride_row", "row * num_columns", "test_rows.py matches"),
    ("common", "return depth * (THREADS * VECTOR)", "return depth * THREADS",
     "test_rows.py matches"),
    ("dlogits", "else columns < end", "else columns < end + 1", "test_rows.py matches"),
    ("linear_tile", "(start + offs_d < depth)", "(start + offs_d >= 0)", "test_linear.py matches"),
    ("linear_stats", "tl.where(mask_v[None, :], y,", "tl.where(mask_v[None, :] | True, y,",
     "test_linear.py matches"),
    ("linear_stats", "at += num_rows", "at += num_rows - 1", "test_linear.py matches"),
    ("linear_stats", "for _ in range(0, num_splits)", "for _ in range(1, num_splits)",
     "test_linear.py matches"),
    ("sums", "mask=tokens < end", "mask=tokens <= end", "test_triton.py sum"),
    ("sums", "mask_k = at < end", "mask_k = at <= end", "test_entries.py matmul"),
]  # fmt: skip


def path_of(name: str, root: Path = ROOT) -> Path:
    """Return the file of some kernels."""
    return root / f"grpo_kernels/backends/triton/{name}.py"


def outcome(name: str, before: str, after: str, where: str) -> str:
    """Return the line of pytest's summary that says who has seen a mutation, or nothing."""
    test, words = where.split()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("grpo_kernels", "tests", "benchmarks", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, Path(folder) / part)
        path = path_of(name, Path(folder))
        text = path.read_text()
        path.write_text(text.replace(before, after))
        arguments = ["-p", "tests.emulated.plugin", "-x", "-q", "-o", "addopts=", "-k"]
        command = [sys.executable, "-m", "pytest", *arguments, f"(triton or cpu) and {words}"]
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        others = os.pathsep.join(x for x in paths if Path(x).resolve() != ROOT)
        run = subprocess.run(
            [*command, f"tests/backends/{test}"],
            cwd=folder, env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{others}"},
            capture_output=True, text=True,
        )  # fmt: skip
    return next((line for line in run.stdout.splitlines() if line.startswith("FAILED")), "")


def main() -> int:
    escaped = 0
    for mutation in MUTATIONS:
        seen = outcome(*mutation)
        escaped += not seen
        name, before, after, _ = mutation
        print(f"{name}: {before.strip()!r} -> {after.strip()!r}: {seen or 'ESCAPED'}", flush=True)
    print(f"{len(MUTATIONS) - escaped} of {len(MUTATIONS)} mutations were seen")
    return bool(escaped)


if __name__ == "__main__":
    sys.exit(main())
