"""Reading tensor values on the host: free for CPU tensors, a wait for the device otherwise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def reading_is_free(x: Tensor) -> bool:
    """Return whether the host can read ``x`` without waiting for a device."""
    return x.device.type == "cpu"


def to_host(numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers known to the host as a CPU tensor, so that a compiler adds no value guards."""
    return torch.tensor(numbers, dtype=dtype)


def values(x: Tensor) -> Any:
    """Return the numbers in a CPU tensor with facts about a batch."""
    return x.tolist()


def number(x: Tensor) -> Tensor | float:
    """Return () ``x`` as a number, or unchanged if reading it would wait for a device."""
    return values(x) if reading_is_free(x) else x


class Transfer(NamedTuple):
    """Values on their way to the host."""

    values: Tensor  # on the CPU
    arrival: torch.cuda.Event | None  # None: they have arrived

    def wait(self) -> Tensor:
        """Return the values. This is the only place, and time, that a training step waits."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.values


def start_transfer(x: Tensor) -> Transfer:
    """Send ``x`` to the host without waiting; from a GPU through pinned memory, cached by torch."""
    if not x.is_cuda:
        return Transfer(x.cpu(), None)
    values = x.to("cpu", non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(x.device))
    return Transfer(values, arrival)


def sync_to_host(x: Tensor) -> Tensor:
    """Return integers ``x`` as a CPU tensor, after waiting for the device."""
    return start_transfer(x).wait()


def assert_async(condition: Tensor, message: str) -> None:
    """Raise ValueError unless ``condition``, (); on a device, an asynchronous assertion fails."""
    if not reading_is_free(condition):
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
