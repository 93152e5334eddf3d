"""``python -m benchmarks.gpu.facts``: one line of JSON about the GPU and the software, or why not.

A process of its own: the first use of a broken driver can hang.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess

_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def main() -> None:
    print(json.dumps(facts()))


def facts() -> dict[str, str]:
    """``why_not``: empty where a GPU can be used; ``line``: what it is."""
    try:
        import torch
    except ImportError as error:
        return {"why_not": f"torch cannot be imported: {error}", "line": ""}
    if not torch.cuda.is_available():
        return {"why_not": f"torch {torch.__version__} finds no GPU", "line": ""}
    torch.ones(1, device="cuda").sum().item()  # it does not only exist
    software = [f"torch {torch.__version__}", *map(_version, ("triton", "transformers"))]
    line = ", ".join([_hardware(torch), *software, f"python {platform.python_version()}"])
    return {"why_not": "", "line": line}


def _hardware(torch) -> str:
    if shutil.which(_QUERY[0]):
        run = subprocess.run(_QUERY, capture_output=True, text=True)
        if run.returncode == 0 and run.stdout.strip():
            name, driver, memory = run.stdout.strip().splitlines()[0].split(", ")
            return f"{name}, driver {driver}, {memory}"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.get_device_name()}, {memory:.0f} GiB"


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


if __name__ == "__main__":
    main()
