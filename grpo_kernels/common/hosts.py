"""The trainers that have adapters, and the versions that were tested."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Host:
    """A package with an adapter, and its tested versions."""

    package: str  # its name on PyPI
    tested: tuple[str, ...]  # version prefixes: "1.16" means every 1.16.x

    def installed(self) -> str:
        """Return the installed version; raise ImportError if there is none."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            raise ImportError(
                f"{self.package}: expected version {' or '.join(self.tested)} or a similar one, "
                "but it is not installed"
            ) from None

    def was_tested(self, installed: str) -> bool:
        return any(f"{installed}.".startswith(f"{each}.") for each in self.tested)


# by adapter; lazy_scorers by trainer
HOSTS = {
    "trl": Host("trl", ("1.16",)),
    "verl": Host("verl", ("0.9",)),
    "torchtitan": Host("torchtitan", ("0.3",)),
    "liger": Host("liger-kernel", ("0.8.1", "0.8.5")),
    "axolotl": Host("axolotl", ("0.19",)),
    "ms_swift": Host("ms-swift", ("4.6",)),
    "lazy_scorers, trl": Host("trl", ("0.29", "1.9")),  # ms-swift has the older one
    "lazy_scorers, openrlhf": Host("openrlhf", ("0.11",)),
    "lazy_scorers, skyrl": Host("skyrl", ("0.3",)),
}
