"""The files of a checkpoint with their checksums: what is missing or damaged is found unread."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from grpo_trainer.monitor import CARD_NAME

MANIFEST_NAME = "checksums.json"

_EDITABLE = (MANIFEST_NAME, CARD_NAME)  # no run reads the card: it may be edited
_CHUNK = 1 << 20  # bytes that are read at once


class _File(NamedTuple):
    """What a file must be."""

    size: int
    sha256: str


class Manifest:
    """The files of ``folder``, as they were written.

    Raises:
        ValueError: the list is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise ValueError(f"{folder} has no {MANIFEST_NAME}")
        try:
            content = json.loads(path.read_text())
            if _digest_of(content["files"]) != content["sha256"]:
                raise ValueError("its checksum differs")
            self._files = {name: _File(**entry) for name, entry in content["files"].items()}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check_sizes(self) -> None:
        """Raise ValueError unless every file is there, as long as it was."""
        for name, file in self._files.items():
            path = self._folder / name
            if not path.is_file():
                raise ValueError(f"{self._folder} has no {name}")
            if path.stat().st_size != file.size:
                raise ValueError(
                    f"{path} is damaged: expected {file.size} bytes, got {path.stat().st_size}"
                )

    def check_contents(self, names: Iterable[str] | None = None) -> None:
        """Raise ValueError unless the files ``names``, by default all, are what was written."""
        names = list(self._files if names is None else names)
        paths = [self._folder / name for name in names]
        for name, path, digest in zip(names, paths, _digests(paths), strict=True):
            if digest != self._files[name].sha256:
                raise ValueError(f"{path} is damaged: its checksum is not that in {MANIFEST_NAME}")


def write_manifest(folder: Path) -> Path:
    """List every file below ``folder``, and return where."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = [path for path in paths if path.relative_to(folder).as_posix() not in _EDITABLE]
    files = {
        path.relative_to(folder).as_posix(): _File(path.stat().st_size, digest)._asdict()
        for path, digest in zip(paths, _digests(paths), strict=True)
    }
    content = {"files": files, "sha256": _digest_of(files)}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n")
    return folder / MANIFEST_NAME


def _digests(paths: list[Path]) -> list[str]:
    """Hash several files at once: that lets other threads run."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of(files: dict[str, dict[str, int | str]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
