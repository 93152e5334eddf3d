"""Wheels that were copied to a machine without network, for the Python of the jobs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.record import ROOT

_INSTALLING = 60  # seconds


def unpacked(folder: Path = ROOT / "wheels") -> Path | None:
    """Return a folder with the wheels that fit this Python; it is kept for later calls."""
    wheels = _fitting(folder)
    if not wheels:
        return None
    digest = hashlib.sha256("\n".join(path.name for path in wheels).encode()).hexdigest()[:12]
    site = Path(tempfile.gettempdir()) / f"grpo-kernels-wheels-{digest}"
    if not site.exists():  # in one command: packages share name spaces
        fresh = Path(tempfile.mkdtemp(prefix="grpo-kernels-wheels-"))
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--no-input"]
        command = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(fresh)]
        subprocess.run([*command, *map(str, wheels)], check=True, timeout=_INSTALLING)
        fresh.rename(site)
    return site


def _fitting(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.whl"))
    if not paths:
        return []
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    tags = set(sys_tags())
    return [path for path in paths if parse_wheel_filename(path.name)[3] & tags]
