"""Trainers that score logits by functions of their own, made to take logits that are not formed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from grpo_kernels.fused_head import FusedHead, scored, unfuse
from grpo_kernels.head import Head, Transform
from grpo_kernels.integrations.probe import (
    Probe,
    Replacement,
    Use,
    find,
    gradients,
    normal,
    unlike,
)
from grpo_kernels.integrations.switch import HOSTS, Switch, claim, release
from grpo_kernels.linear_logprobs import LinearLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CASTS = (torch.float32, torch.bfloat16, torch.float16)
_DESCRIBING = ("shape", "size", "ndim", "dim", "numel", "device")  # known without real logits
# shared by logits and views of them, which are of no use any more once one is changed in place
_Memory = functools.partial(SimpleNamespace, changed=False)


@dataclass(eq=False)
class LazyLogits:
    """Logits (..., V) that are formed when somebody needs them as such. No tensor.

    Rows of it, casts and scales are remembered. All else is done with real logits.
    """

    layer: Any  # a FusedHead
    hidden: Tensor  # (..., D)
    dtype: Any = None  # None: that of the hidden states
    temperature: float = 1.0  # what they are divided by
    memory: SimpleNamespace = field(default_factory=_Memory)
    real: Tensor | None = None  # once these are formed
    recorded: bool = field(default_factory=torch.is_grad_enabled)  # a gradient, by autograd

    requires_grad = False  # whoever asks would hook on to it

    def __post_init__(self) -> None:
        self.dtype = self.dtype or self.hidden.dtype

    def logprobs(self, ids: Tensor) -> Tensor:
        """Return log p of ``ids`` (...), fp32, -100 giving 0; differentiable."""
        return self._scored(ids, "logprobs")

    def entropy(self) -> Tensor:
        """Return the entropy (...) in nats, fp32, differentiable."""
        ids = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        return self._scored(ids, "entropy")

    def formed(self) -> Tensor:
        """Return real logits; from then on these stand for such."""
        with self._in_use():
            if self.real is None:
                logits = nn.Module.__call__(self.layer, self.hidden).to(self.dtype)
                self.real = logits if self.temperature == 1 else logits / self.temperature
        return self.real

    def __len__(self) -> int:
        return len(self.hidden)

    def __getattr__(self, name: str) -> Any:
        if name in _DESCRIBING:
            shape = (*self.hidden.shape[:-1], self.layer.out_features)
            return getattr(self.hidden[..., :1].expand(shape), name)
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"LazyLogits: no attribute {name!r}")
        if callable(getattr(Tensor, name)):
            return functools.partial(self._call, name)
        return getattr(self.formed(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(
            lambda x: x.formed() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method: of real logits, unless the result can be described without these."""
        with self._in_use():
            found = self._unformed(name, *args, *kwargs.values())
        if found is not None:
            return found
        real = self.formed()
        if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
            self._leave_views()  # they are changed in place
        return getattr(real, name)(*args, **kwargs)

    def _unformed(self, name: str, operand: Any = None, *more: Any) -> Any:
        """Return what a method gives without forming them; None: it needs real logits."""
        if more or self.real is not None:
            return None
        positive = isinstance(operand, int | float) and 0 < operand < float("inf")
        match name:
            case "__getitem__":
                rows = operand if isinstance(operand, tuple) else (operand,)
                if len(rows) == self.ndim and rows[-1] == slice(None):
                    rows = rows[:-1]
                if len(rows) < self.ndim and all(type(x) in (int, slice) for x in rows):
                    return replace(self, hidden=self.hidden[rows])
            case "squeeze" if operand in range(-self.ndim, self.ndim - 1) and operand != -1:
                return replace(self, hidden=self.hidden.squeeze(operand))
            case "float":
                return self.to(torch.float32)
            case "to" if isinstance(operand, torch.dtype) and operand in _CASTS:
                same = operand == self.dtype
                return self if same else replace(self, dtype=operand, memory=_Memory())
            case "__truediv__" if positive:
                return replace(self, temperature=self.temperature * operand, memory=_Memory())
            case "__mul__" if positive:
                return replace(self, temperature=self.temperature / operand, memory=_Memory())
            case "div_" | "__itruediv__" if positive:
                self._leave_views()
                self.temperature *= operand
                return self
        return None

    def _leave_views(self) -> None:
        """Be changed in place: others that share the memory do not see the change."""
        self.memory.changed = True
        self.memory = _Memory()

    def _in_use(self) -> Any:
        """Raise RuntimeError for one of no use; else record gradients if the forward did."""
        if self.memory.changed:
            raise RuntimeError(
                "LazyLogits: expected logits that nobody has changed since, got some that share "
                "memory with others which were changed in place; call formed() on these first"
            )
        if not isinstance(self.layer, FusedHead):
            raise RuntimeError(
                "LazyLogits: expected a head that returns them still, got one after disable()"
            )
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.recorded)

    def _scored(self, ids: Tensor, output: str) -> Tensor:
        """Call the head, as a module, so that FSDP2 knows, for an output of ``linear_logprobs``."""

        def fn(hidden: Tensor, head: Head) -> LinearLogprobs:
            if head.weight.shape[0] != self.shape[-1]:
                raise ValueError(
                    f"model: expected a head that uses all {self.shape[-1]} columns of its logits, "
                    f"got vocab_size={head.weight.shape[0]}"
                )
            head = replace(head, transform=Transform())  # logits are without it
            return scored(hidden, head, ids, temperature=self.temperature, outputs=(output,))

        with self._in_use():
            return getattr(self.layer(self.hidden, fn), output)


_ARITHMETIC = ("truediv", "itruediv", "mul", "rmul", "add", "radd", "sub", "rsub", "neg", "pow")
for _name in ("getitem", *_ARITHMETIC, "gt", "ge", "lt", "le"):  # __getattr__ is not asked for
    _name = f"__{_name}__"
    setattr(LazyLogits, _name, functools.partialmethod(LazyLogits._call, _name))


def _selective_log_softmax(logits: LazyLogits, index: Tensor) -> Any:
    if index.dim() == logits.dim() - 1:
        return logits.logprobs(index)
    return logits.logprobs(index.squeeze(-1))[..., None] if index.shape[-1] == 1 else None


def _logprobs(
    logits: LazyLogits, labels: Tensor, temperature: float = 1.0, inplace_backward: bool = True
) -> Tensor:
    if temperature != 1:
        logits.div_(temperature)  # theirs changes them, too
    return logits.logprobs(labels)


def _entropy(
    logits: LazyLogits,
    requires_grad: bool = True,
    attention_mask: Any = None,
    chunk_size: int = 0,  # without effect
) -> Tensor:
    with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
        entropy = logits.entropy()
    return entropy if attention_mask is None else entropy * attention_mask


_OPTIONS = ("requires_grad", "attention_mask", "chunk_size", "temperature", "inplace_backward")
# by host: where its scorers are, and by the name of each what does the same for LazyLogits. That
# gets its arguments by name, and returns None where the host's own has to.
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
        both = functools.partial(_taking_both, ours=ours)
        yield Replacement(
            _MODULES[host], name, both, everywhere=True, wraps=True, like=ours, more=_OPTIONS
        )


def _uses(host: str) -> tuple[Use, ...]:
    """Return what has to import the scorers by their names: without it ours are never called."""
    callers = {"trl": "trl.trainer.grpo_trainer"}
    return tuple(Use(f"{callers[host]}:{name}") for name in _SCORERS[host] if host in callers)


def _compare(host: str) -> Iterator[str]:
    for name, ours in _SCORERS[host].items():
        theirs = find(f"{_MODULES[host]}:{name}")
        lazy = _scores_of(_taking_both(theirs, ours), lazy=True)
        yield from unlike(name, _scores_of(theirs), lazy)


def _scores_of(scorer: Callable[..., Any], lazy: bool = False) -> dict[str, Any]:
    """Return the scores of a few tokens, and gradients where there are some."""
    layer, hidden = nn.Linear(8, 11), normal(2, 3, 8)
    layer.weight.data, layer.bias.data = normal(11, 8, seed=1), normal(11, seed=2)
    logits = LazyLogits(FusedHead(layer), hidden) if lazy else layer(hidden)
    ids = torch.tensor([[1, 5, 2], [7, 3, 10]])
    takes = inspect.signature(scorer).parameters
    scores = scorer(logits, **{name: ids for name in ("index", "labels") if name in takes})
    if not scores.requires_grad:
        return {"scores": scores}
    return {"scores": scores, **gradients(scores.sum(), hidden=hidden, weight=layer.weight)}


def _taking_both(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(ours).parameters

    @functools.wraps(theirs)
    def score(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            return theirs(logits, *args, **kwargs)
        given = inspect.signature(theirs).bind(logits, *args, **kwargs)
        # theirs alone knows what another version takes; where they are formed, somebody needed it
        if logits.real is not None or given.arguments.keys() - known:
            return theirs(logits.formed(), *args, **kwargs)
        given.apply_defaults()
        found = ours(**{name: x for name, x in given.arguments.items() if name in known})
        return theirs(logits.formed(), *args, **kwargs) if found is None else found

    return score


SWITCHES = {
    name: Switch(
        Probe(
            host=HOSTS[f"lazy_scorers, {name}"],
            replacements=functools.partial(_replacements, name),
            uses=_uses(name),
            # the others score by kernels of FlashAttention where that is installed, or compile
            compare=functools.partial(_compare, name) if name == "trl" else tuple,
        )
    )
    for name in _SCORERS
}
_MODELS: dict[str, WeakSet[PreTrainedModel]] = {name: WeakSet() for name in SWITCHES}


def defer_logits(model: PreTrainedModel) -> None:
    """Let the LM head of ``model`` return :class:`LazyLogits`. Doing it twice is harmless.

    Raises:
        ValueError: there is no head, it has a forward of its own, or another adapter has the model.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"model: expected one with output embeddings, got {type(model).__name__}")
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
    """Let the LM head of ``model`` return LazyLogits, and ``host`` score them by our kernels.

    ``host`` is "trl" (before 1.12, and for ms-swift), "openrlhf" or "skyrl" (its FSDP workers).
    Doing it twice, or for several models, is harmless.

    Raises:
        ImportError: as :meth:`Switch.enable`.
        ValueError: ``host`` is unknown, or what :func:`defer_logits` raises.
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
    """Let it return logits again; with the last model of a host, its scorers are put back."""
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
    """Have it so within a ``with``; one that is so already stays so."""
    before = model in _MODELS.get(host, ())
    enable(model, host, any_version=any_version)
    with ExitStack() as after:
        if not before:
            after.callback(disable, model)
        yield
