"""Opens a page in headless Chromium: what is in it, what it complains about, how it looks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--virtual-time-budget=15000", "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


class Page(NamedTuple):
    """A page as it is when all of its code has run."""

    dom: str
    console: list[str]  # errors of scripts, and requests that its policy refuses
    pixels: np.ndarray  # (height, width, 3) in [0, 1]


def chromium() -> str:
    """Return the browser; skip the test where there is none."""
    found = [path for name in _NAMES if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"NO BROWSER OPENS THE PAGE: none of {', '.join(_NAMES)} is installed")
    return found[0]


def open_page(
    path: Path,
    folder: Path,
    dark: bool = False,
    size: tuple[int, int] = (1400, 1000),
    query: str = "",
) -> Page:
    """Load ``path`` with ``query`` after it; the browser keeps its profile in ``folder``."""
    picture = folder / "page.png"
    command = [
        chromium(), *_OPTIONS, f"--user-data-dir={folder / 'profile'}",
        f"--window-size={size[0]},{size[1]}", f"--blink-settings=preferredColorScheme={1 - dark}",
        f"--screenshot={picture}", "--dump-dom", path.resolve().as_uri() + query,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and picture.exists(), done.stderr[-3000:]
    from matplotlib.image import imread

    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Page(done.stdout, console, imread(picture)[:, :, :3])
