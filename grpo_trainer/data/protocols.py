"""Three extension points: the next prompts, values computed for a micro-batch before its loss, and
terms added to the loss.

The trainer's own features implement them, too. In a distributed run, every process calls all of
them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from grpo_kernels import Head, Metrics
from grpo_trainer.data.batch import MicroBatch, Sample, Scored

# a loss, (), and the metrics to log with it
LossAndMetrics: TypeAlias = tuple[Tensor, Metrics]
# computes it from the last hidden states, (B, L, D), and the LM head, in the policy's forward
HeadTerm: TypeAlias = Callable[[Tensor, Head], LossAndMetrics]


@runtime_checkable
class Prompts(Protocol):
    """Chooses the next training prompts. Subclasses define ``next``, ``state`` and ``restore``."""

    @abstractmethod
    def next(self, count: int) -> list[Sample]:
        """Return this process's samples for the next ``count`` prompts.

        A prompt has ``num_generations`` consecutive samples. All processes together have ``count *
        num_generations`` samples, in equal parts in rank order. A sample with ``completion_ids`` is
        trained on as it is; the engine completes the others.

        With ``dynamic_sampling`` it is called again to replace groups without signal, before
        ``scored``.
        """
        ...

    def scored(self, batch: Scored) -> None:
        """Receive a generation batch after scoring and before training. With ``dynamic_sampling``
        it is a selection of the samples, in another order."""
        return

    @abstractmethod
    def state(self) -> Any:
        """Return what a checkpoint needs to continue exactly: numbers, text, tensors, and lists and
        dictionaries of them."""
        ...

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Continue from a :meth:`state`."""
        ...


class Column(Protocol):
    """Computes values for a micro-batch before its loss: a function, or a callable object."""

    def __call__(self, batch: MicroBatch, policy: nn.Module) -> Metrics | None:
        """Set fields of ``batch``, or attributes that a term reads; return metrics to log, or None.

        It runs once for each micro-batch of a generation batch, without gradients, after ``batch``
        got the log-probabilities of the old policy and of the reference, if the run needs them.
        While columns run, ``batch.samples`` has one sample per row. ``policy`` has no wrappers;
        ``policy.training`` is False in evaluation.
        """
        ...


@runtime_checkable
class Term(Protocol):
    """A loss added to the policy loss. Subclasses define one of the methods.

    The method returns the contribution of one micro-step: divide a sum over tokens by
    ``batch.num_items``, and multiply a mean over the micro-batch by ``batch.share``. The trainer
    divides by the micro-steps of an optimizer step.
    """

    forward_options: Mapping[str, Any] = MappingProxyType({})  # more arguments for the forward

    def on_head(self, batch: MicroBatch, policy: nn.Module) -> HeadTerm | None:
        """Return a function to run inside the policy's forward, where a sharded head is gathered.

        It is called before each forward, in training and evaluation; it may run other models.
        """
        return None

    def on_output(self, batch: MicroBatch, output: Any) -> LossAndMetrics | None:
        """Return a loss from ``output.aux_loss``, which mixture-of-experts models return with the
        forward option ``output_router_logits``."""
        return None
