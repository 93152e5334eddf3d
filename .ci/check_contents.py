"""Check the contents of the sdist and the wheel in a folder, and their page on an index.

python .ci/check_contents.py FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("grpo_kernels/", "grpo_trainer/")
SOURCES = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
_MADE = re.compile(r"PKG-INFO|setup\.cfg|grpo_kernels\.egg-info/.*")
_RELATIVE = re.compile(r"""(?:\]\(|\s(?:src|srcset|href)=["'])(?!https?:|mailto:|#)[^)"']*""")


def tracked(*prefixes: str) -> set[str]:
    """Return the files that git tracks in these folders."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, text=True, stdout=-1).stdout
    return {name for name in listed.splitlines() if name.startswith(prefixes)}


def differences(found: set[str], expected: set[str]) -> list[str]:
    """Return a line for each missing or unexpected file."""
    missing = [f"missing: {name}" for name in sorted(expected - found)]
    return missing + [f"unexpected: {name}" for name in sorted(found - expected)]


def sdist(path: Path) -> list[str]:
    """Return the problems of an sdist, which must hold exactly the files of the build."""
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    found = {name for name in files if not _MADE.fullmatch(name)}
    return differences(found, tracked("csrc/", *PACKAGES) | SOURCES)


def wheel(path: Path) -> list[str]:
    """Return the problems of a wheel: packages, native library, license, tag, metadata."""
    with zipfile.ZipFile(path) as archive:
        files = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
    wrong = differences(
        {name for name in files if not name.startswith(info)},
        tracked(*PACKAGES) | {"grpo_kernels/_native.so"},
    )
    if not re.search(r"-py3-none-(?!any)\w+\.whl$", path.name):
        wrong.append(f"expected one wheel for every Python of a platform, got {path.name}")
    if f"{info}/licenses/LICENSE" not in files or metadata["License-Expression"] != "Apache-2.0":
        wrong.append("the licence is missing")
    shown = str(metadata.get_payload())
    return wrong + [f"relative link: {link}" for link in _RELATIVE.findall(shown)]


def main(folder: str) -> int:
    """Return the exit status: 1 if there is a problem."""
    ((archive,), (built,)) = (sorted(Path(folder).glob(name)) for name in ("*.tar.gz", "*.whl"))
    wrong = {archive.name: sdist(archive), built.name: wheel(built)}
    for name, lines in wrong.items():
        print(f"{name}: {'; '.join(lines) or 'as it should be'}")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
