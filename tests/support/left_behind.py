"""What a run leaves on disk, as values that are equal where the bits are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.support.trainer import differs_between_runs

STATE = "trainer_state.json"
# of a checkpoint: where it lies, and lists of what the other files hold
_OF_A_PLACE = {"training_args.bin", "SHA256SUMS", "README.md"}


def plain(value: Any) -> Any:
    """Return ``value`` without what a clock decides; NaN is NaN, and 0.0 is not -0.0."""
    if isinstance(value, Mapping):
        kept = {name: v for name, v in value.items() if not differs_between_runs(str(name))}
        return {name: plain(v) for name, v in kept.items()}
    if is_traceable_wrapper_subclass(value):  # torchao's
        names, rest = value.__tensor_flatten__()
        return {name: plain(getattr(value, name)) for name in names} | {"rest": plain(rest)}
    if isinstance(value, torch.Tensor):
        bits = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        return value.dtype, tuple(value.shape), bits.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def checkpoint(folder: Path) -> dict[str, Any]:
    """Return by name what its files hold: weights, optimizer, random states, data order, log."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in _OF_A_PLACE]
    return {path.relative_to(folder).as_posix(): plain(_content(path)) for path in sorted(files)}


def completions(run: Path, after: int = 0) -> dict[str, Any]:
    """Return by name the files of completions that were written after a step."""
    files = sorted((run / "completions").glob("*.parquet"))
    kept = [path for path in files if int(path.stem.rpartition("_")[2]) > after]
    return {path.name: plain(parquet.read_table(path).to_pylist()) for path in kept}


def outcome(run: Path) -> dict[str, Any]:
    """Return the model of a run that is through, its log, and whether its reports are whole."""
    paths = {name: run / name for name in ("model.safetensors", STATE)}
    found = {name: plain(_content(path)) for name, path in paths.items() if path.exists()}
    record = json.loads((run / "run.json").read_text())
    report = (run / "report.html").read_text().rstrip()
    found["run.json"] = rows(record["history"])
    return found | {"report.html": report.startswith("<!") and report.endswith("</html>")}


def rows(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what was logged; the summary of a run may be empty."""
    return [row for row in map(plain, history) if set(row) - {"step", "epoch"}]


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix in (".pt", ".pth"):
        return torch.load(path, weights_only=False)
    if path.name == STATE:
        state = json.loads(path.read_text())
        state["log_history"] = rows(state["log_history"])
        return state | {"best_model_checkpoint": Path(state["best_model_checkpoint"] or "").name}
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()
