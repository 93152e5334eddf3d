"""For trainers that score logits with their own functions: handles for logits not yet computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from grpo_kernels.common import HOSTS
from grpo_kernels.fused_head import FusedHead, score, unfuse
from grpo_kernels.head import Head, Transform
from grpo_kernels.integrations.probe import (
    Probe,
    Replacement,
    Use,
    gradients,
    normal,
    unlike,
)
from grpo_kernels.integrations.switch import Switch, claim, release
from grpo_kernels.linear_logprobs import LinearLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CASTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Memory:
    """State shared by logits and their views."""

    changed: bool = False  # in place; these handles are then unusable


@dataclass(eq=False)
class LazyLogits:
    """A handle for logits (..., V) that are not computed yet. Not a tensor.

    It can be scored, sliced by rows, cast, and scaled by a positive number. Everything else needs
    real logits from :meth:`form_logits`, which torch's functions call themselves.
    """

    layer: Any  # a FusedHead
    hidden: Tensor  # (..., D)
    dtype: Any = None  # None: the dtype of the hidden states
    temperature: float = 1.0  # divisor of the logits
    recorded: bool = field(default_factory=torch.is_grad_enabled)  # whether autograd records
    memory: _Memory = field(default_factory=_Memory)

    requires_grad = False  # otherwise callers would register hooks on it

    def __post_init__(self) -> None:
        self.dtype = self.dtype or self.hidden.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.layer.out_features))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __len__(self) -> int:
        return len(self.hidden)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"LazyLogits: no attribute {name!r}; call form_logits() for real logits"
        )

    def logprobs(self, ids: Tensor) -> Tensor:
        """Return log p of ``ids`` (...) in fp32, 0 for -100; differentiable."""
        return self._score(ids, "logprobs")

    def entropy(self) -> Tensor:
        """Return the entropy (...) in nats, in fp32; differentiable."""
        ids = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        return self._score(ids, "entropy")

    def form_logits(self) -> Tensor:
        """Return real logits."""
        with self._gradients_as_recorded():
            logits = nn.Module.__call__(self.layer, self.hidden).to(self.dtype)
            return logits if self.temperature == 1 else logits / self.temperature

    def __getitem__(self, index: Any) -> LazyLogits | Tensor:
        """Return a handle for some rows; for any other index, return real logits."""
        rows = index if isinstance(index, tuple) else (index,)
        if len(rows) == len(self.shape) and rows[-1] == slice(None):
            rows = rows[:-1]
        if len(rows) < len(self.shape) and all(type(x) in (int, slice) for x in rows):
            return replace(self, hidden=self.hidden[rows])
        return self.form_logits()[index]

    def squeeze(self, dim: int) -> LazyLogits:
        """Drop a dimension of size 1."""
        return replace(self, hidden=self.hidden.squeeze(dim))

    def float(self) -> LazyLogits:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Cast to a 16-bit or 32-bit dtype; for anything else, return real logits."""
        if kwargs or len(args) != 1 or args[0] not in _CASTS:
            return self.form_logits().to(*args, **kwargs)
        return self if args[0] == self.dtype else replace(self, dtype=args[0], memory=_Memory())

    def __truediv__(self, other: Any) -> Any:
        if not _is_scale(other):
            return self.form_logits() / other
        return replace(self, temperature=self.temperature * other, memory=_Memory())

    def __mul__(self, other: Any) -> Any:
        if not _is_scale(other):
            return self.form_logits() * other
        return replace(self, temperature=self.temperature / other, memory=_Memory())

    def div_(self, other: Any) -> LazyLogits:
        """Divide in place. Other handles that share the memory become unusable."""
        if not _is_scale(other):
            raise ValueError(f"div_: expected a number > 0 or form_logits() first, got {other!r}")
        self.memory.changed = True
        self.memory = _Memory()
        self.temperature *= other
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(
            lambda x: x.form_logits() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def _gradients_as_recorded(self) -> Any:
        """Record a gradient only if the forward did; raise RuntimeError for an unusable handle."""
        if self.memory.changed:
            raise RuntimeError(
                "LazyLogits: expected logits with views not modified in place, got modified ones; "
                "call form_logits() before the change"
            )
        if not isinstance(self.layer, FusedHead):
            raise RuntimeError("LazyLogits: expected an enabled head, got one after disable()")
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.recorded)

    def _score(self, ids: Tensor, output: str) -> Tensor:
        """Return an output of ``linear_logprobs``; the head is called as a module, for FSDP2."""

        def fn(hidden: Tensor, head: Head) -> LinearLogprobs:
            if head.weight.shape[0] != self.shape[-1]:
                raise ValueError(
                    f"model: expected a head that uses all {self.shape[-1]} columns of its logits, "
                    f"got vocab_size={head.weight.shape[0]}"
                )
            head = replace(head, transform=Transform())  # logits are without it
            return score(hidden, head, ids, temperature=self.temperature, outputs=(output,))

        with self._gradients_as_recorded():
            return getattr(self.layer(self.hidden, fn), output)


def _is_scale(number: Any) -> bool:
    return isinstance(number, int | float) and 0 < number < float("inf")


def _selective_log_softmax(logits: LazyLogits, index: Tensor) -> Any:
    if index.dim() == len(logits.shape) - 1:
        return logits.logprobs(index)
    return logits.logprobs(index.squeeze(-1))[..., None] if index.shape[-1] == 1 else None


def _logprobs(
    logits: LazyLogits, labels: Tensor, temperature: float = 1.0, inplace_backward: bool = True
) -> Tensor:
    if temperature != 1:
        logits.div_(temperature)  # TRL's scorer changes them, too
    return logits.logprobs(labels)


def _entropy(
    logits: LazyLogits,
    requires_grad: bool = True,
    attention_mask: Any = None,
    chunk_size: int = 0,  # has no effect
) -> Tensor:
    with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
        entropy = logits.entropy()
    return entropy if attention_mask is None else entropy * attention_mask


_OPTIONS = ("requires_grad", "attention_mask", "chunk_size", "temperature", "inplace_backward")
# by trainer: the module of its scorers, and for each scorer's name a function that does the same
# for LazyLogits, or returns None if the trainer's own must do it
_MODULES = {
    "trl": "trl.trainer.utils",
    "openrlhf": "openrlhf.models.utils",
    "skyrl": "skyrl.backends.skyrl_train.utils.torch_utils",
}
_SCORERS: dict[str, dict[str, Callable[..., Any]]] = {
    "trl": {"selective_log_softmax": _selective_log_softmax, "entropy_from_logits": _entropy},
    "openrlhf": {"log_probs_from_logits": _logprobs, "compute_entropy": _entropy},
    "skyrl": {"logprobs_from_logits": _logprobs, "chunked_entropy_from_logits": _entropy},
}


def _replacements(host: str) -> Iterator[Replacement]:
    for name, ours in _SCORERS[host].items():
        yield Replacement(
            _MODULES[host],
            name,
            functools.partial(_taking_both, ours=ours),
            everywhere=True,
            wraps=True,
            like=ours,
            more=_OPTIONS,
        )


def _taking_both(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scorer for tensors and LazyLogits."""
    known = inspect.signature(ours).parameters

    @functools.wraps(theirs)
    def score_both(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            return theirs(logits, *args, **kwargs)
        call = inspect.signature(theirs).bind(logits, *args, **kwargs)
        scores = None
        if call.arguments.keys() <= known.keys():  # otherwise it is another version
            call.apply_defaults()
            scores = ours(**{name: x for name, x in call.arguments.items() if name in known})
        return theirs(logits.form_logits(), *args, **kwargs) if scores is None else scores

    return score_both


def _compare_trl() -> Iterator[str]:
    for name, ours in _SCORERS["trl"].items():
        theirs = getattr(import_module(_MODULES["trl"]), name)
        lazy = _scores_of(_taking_both(theirs, ours), lazy=True)
        yield from unlike(name, _scores_of(theirs), lazy)


def _scores_of(scorer: Callable[..., Any], lazy: bool = False) -> dict[str, Any]:
    """Return the scores of a few tokens, and gradients if there are any."""
    layer = nn.Linear(8, 11)
    hidden = normal(2, 3, 8)
    layer.weight.data, layer.bias.data = normal(11, 8, seed=1), normal(11, seed=2)
    logits = LazyLogits(FusedHead(layer), hidden) if lazy else layer(hidden)
    ids = torch.tensor([[1, 5, 2], [7, 3, 10]])
    takes = inspect.signature(scorer).parameters
    scores = scorer(logits, **{name: ids for name in ("index", "labels") if name in takes})
    if not scores.requires_grad:
        return {"scores": scores}
    return {"scores": scores, **gradients(scores.sum(), hidden=hidden, weight=layer.weight)}


def _switch(host: str, **more: Any) -> Switch:
    replacements = functools.partial(_replacements, host)
    return Switch(Probe(host=HOSTS[f"lazy_scorers, {host}"], replacements=replacements, **more))


SWITCHES = {
    "trl": _switch(
        "trl",
        # if the trainer did not import these, our functions would never be called
        uses=tuple(Use(f"trl.trainer.grpo_trainer:{name}") for name in _SCORERS["trl"]),
        compare=_compare_trl,
    ),
    # these use FlashAttention's kernels if installed, or compile, so numbers are not compared
    "openrlhf": _switch("openrlhf"),
    "skyrl": _switch("skyrl"),
}
_MODELS: dict[str, WeakSet[PreTrainedModel]] = {name: WeakSet() for name in SWITCHES}


def defer_logits(model: PreTrainedModel) -> None:
    """Make the LM head of ``model`` return :class:`LazyLogits`. Calling it twice is harmless.

    Raises:
        ValueError: there is no head, its forward is patched, or another adapter changed the model.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"model: expected output embeddings, got none in {type(model).__name__}")
    if are_deferred(model):
        return
    was_fused = isinstance(layer, FusedHead)
    head = layer if was_fused else FusedHead(layer)
    claim(model, "lazy_scorers")
    vars(head).update(_instead_of_logits=LazyLogits, _fused_for_lazy=not was_fused)


def are_deferred(model: PreTrainedModel) -> bool:
    """Return whether the head of ``model`` returns :class:`LazyLogits`."""
    layer = model.get_output_embeddings()
    return layer is not None and "_instead_of_logits" in vars(layer)


def enable(model: PreTrainedModel, host: str, *, any_version: bool = False) -> None:
    """Make the LM head of ``model`` return LazyLogits, and ``host`` score them with our kernels.

    Calling it twice, or for several models, is harmless.

    Args:
        model: a transformers model.
        host: "trl" (before 1.12, and for ms-swift), "openrlhf" or "skyrl" (its FSDP workers).

    Raises:
        ImportError: as for :meth:`Switch.enable`.
        ValueError: ``host`` is unknown, or as for :func:`defer_logits`.
    """
    if host not in SWITCHES:
        raise ValueError(f"host: expected one of {', '.join(SWITCHES)}; got {host!r}")
    SWITCHES[host].enable(any_version=any_version)
    _MODELS[host].add(model)
    try:
        defer_logits(model)
    except ValueError:
        disable(model)
        raise


def disable(model: PreTrainedModel) -> None:
    """Make the head return logits again; the last model of a trainer restores its scorers."""
    if are_deferred(model):
        head = model.get_output_embeddings()
        release(model)
        del vars(head)["_instead_of_logits"]
        if vars(head).pop("_fused_for_lazy"):
            unfuse(head)
    for host, models in _MODELS.items():
        models.discard(model)
        if not models:
            SWITCHES[host].disable()


@contextmanager
def enabled(model: PreTrainedModel, host: str, *, any_version: bool = False) -> Iterator[None]:
    """Enable within a ``with`` block; a model that is already enabled stays enabled."""
    before = model in _MODELS.get(host, ())
    enable(model, host, any_version=any_version)
    with ExitStack() as after:
        if not before:
            after.callback(disable, model)
        yield
