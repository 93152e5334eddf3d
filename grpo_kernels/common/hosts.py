"""The other trainers that adapters were written for, and the versions they were tested with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Host:
    """A package that an adapter was written for, and the versions that it was tested with."""

    package: str  # as pip knows it
    tested: tuple[str, ...]  # the first numbers of versions: "1.16" stands for every 1.16.x

    def installed(self) -> str:
        """Return the version that is installed; raise ImportError for none."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            raise ImportError(
                f"{self.package}: expected version {' or '.join(self.tested)} or one that is like "
                "it, but it is not installed"
            ) from None

    def was_tested(self, installed: str) -> bool:
        return any(f"{installed}.".startswith(f"{each}.") for each in self.tested)


# by adapter; of those that score logits which are not formed, by host
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
