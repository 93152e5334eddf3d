"""Values of tensors on the host: free to read on a CPU, a wait for the device elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def reading_is_free(x: Tensor) -> bool:
    """Return whether the host can read ``x`` without waiting for a device."""
    return x.device.type == "cpu"


def to_host(numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers that the host knows as a CPU tensor, on whose values no compiler guards."""
    return torch.tensor(numbers, dtype=dtype)


def values(x: Tensor) -> Any:
    """Return the numbers in a CPU tensor that holds what the host knows of a batch."""
    return x.tolist()


def number(x: Tensor) -> Tensor | float:
    """Return () ``x`` as a number, or as it is where that would be a wait."""
    return values(x) if reading_is_free(x) else x


class Transfer(NamedTuple):
    """Values on their way to the host."""

    values: Tensor  # on the CPU
    arrival: torch.cuda.Event | None  # None: they are there

    def wait(self) -> Tensor:
        """Return the values. A training step waits for a device here, and once."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.values


def start_transfer(x: Tensor) -> Transfer:
    """Send ``x`` to the host; from a GPU through pinned memory, which torch keeps, and no wait."""
    if not x.is_cuda:
        return Transfer(x.cpu(), None)
    values = x.to("cpu", non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(x.device))
    return Transfer(values, arrival)


def sync_to_host(x: Tensor) -> Tensor:
    """Return integers ``x`` as a CPU tensor, after a wait for a device."""
    return start_transfer(x).wait()


def assert_async(condition: Tensor, message: str) -> None:
    """Raise ValueError unless ``condition``, (); on a device an assertion there fails later."""
    if not reading_is_free(condition):
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
