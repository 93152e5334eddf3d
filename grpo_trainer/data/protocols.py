"""The three places to plug in: which prompts come next, what is computed for a micro-batch before
its loss, and what is added to the loss.

The features of the trainer are implementations of these as well. In a distributed run every process
calls every one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from grpo_kernels import Head, Metrics
from grpo_trainer.data.batch import MicroBatch, Sample, Scored

# a loss, (), and what is logged with it
LossAndMetrics: TypeAlias = tuple[Tensor, Metrics]
# makes it of the last hidden states, (B, L, D), and the LM head, inside the policy's forward
HeadTerm: TypeAlias = Callable[[Tensor, Head], LossAndMetrics]


@runtime_checkable
class Prompts(Protocol):
    """Decides what is trained on next. A class that inherits from it defines ``next``, ``state``
    and ``restore``."""

    @abstractmethod
    def next(self, count: int) -> list[Sample]:
        """Return this process's samples for the next ``count`` prompts.

        A prompt has ``num_generations`` consecutive samples. All processes together have ``count *
        num_generations``, in equal parts in the order of their ranks. A sample that has
        ``completion_ids`` is trained on as it is; the engine completes the others.

        With ``dynamic_sampling`` it is called again for groups without signal, before ``scored``.
        """
        ...

    def scored(self, batch: Scored) -> None:
        """Look at a generation batch that is scored and not trained on yet. With
        ``dynamic_sampling`` it is a selection of the samples, in another order."""
        return

    @abstractmethod
    def state(self) -> Any:
        """Return what a checkpoint needs to go on exactly: numbers, text, tensors, lists and
        dictionaries of them."""
        ...

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go on from where :meth:`state` was taken."""
        ...


class Column(Protocol):
    """Computes something for a micro-batch before its loss: a function, or an object to call."""

    def __call__(self, batch: MicroBatch, policy: nn.Module) -> Metrics | None:
        """Set fields of ``batch``, or attributes that a term reads, and return what to log.

        It runs once for each micro-batch of a generation batch, without gradients, after the
        log-probabilities of the old policy and of the reference, which ``batch`` has if the run
        needs them. ``batch.samples`` are its rows' samples while columns run. ``policy`` has no
        wrappers; ``policy.training`` is False in evaluation.
        """
        ...


@runtime_checkable
class Term(Protocol):
    """A loss that is added to the policy loss. A class that inherits from it defines one method.

    It returns what one micro-step adds: divide a sum over tokens by ``batch.num_items``, and
    multiply a mean over the micro-batch by ``batch.share``. The trainer divides by the micro-steps
    of an optimizer step.
    """

    forward_options: Mapping[str, Any] = MappingProxyType({})  # more arguments of the forward

    def on_head(self, batch: MicroBatch, policy: nn.Module) -> HeadTerm | None:
        """Return what to compute inside the policy's forward, where a sharded head is whole.

        It is called before each forward, in training and evaluation; other models can run here.
        """
        return None

    def on_output(self, batch: MicroBatch, output: Any) -> LossAndMetrics | None:
        """Return a loss of ``output.aux_loss``, which a mixture of experts has with the forward
        option ``output_router_logits``."""
        return None
