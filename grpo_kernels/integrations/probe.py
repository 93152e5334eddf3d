"""Compares an adapter's needs with the installed version of a trainer.

First names: everything that is replaced, called or read must exist, with the parameters that ours
uses. Then numbers: the trainer's functions and ours, on a few tokens on the CPU.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from grpo_kernels.common import Host

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOCK = threading.RLock()  # for probes and switches
TOLERANCE = 1e-3  # relative to the largest of some numbers in fp32
FLOOR = 1e-6  # absolute, if these are small
_REGISTER_PARAMETER = nn.Module.register_parameter
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_log = logging.getLogger(__name__)


class Replacement(NamedTuple):
    """A replacement for one attribute of a trainer's module, or of a class in it."""

    owner: str  # "package.module", or "package.module:Class"
    name: str
    ours: Any
    everywhere: bool = False  # also in all modules that have imported it by this name
    wraps: bool = False  # the replacement is ``ours(theirs)``
    like: Any = None  # has the parameters that theirs must have; None: ours
    more: tuple[str, ...] = ()  # parameters of ``like`` that theirs may lack

    def differences(self) -> Iterator[str]:
        """Yield how the trainer's attribute and its parameters differ from what ours needs."""
        if difference := missing(self.place):
            yield difference
            return
        theirs = find(self.place)
        ours = self.like or (self.ours(theirs) if self.wraps else self.ours)
        if inspect.isclass(ours):
            for name, method in vars(ours).items():
                if inspect.isfunction(method):
                    yield from Replacement(self.place, name, method, more=self.more).differences()
        elif callable(ours):
            yield from unlike_parameters(_dotted(self.place), theirs, ours, self.more)

    @property
    def place(self) -> str:
        """Where it is, as for :func:`find`."""
        return f"{self.owner}{'.' if ':' in self.owner else ':'}{self.name}"


class Use(NamedTuple):
    """Something that an adapter calls, overrides or reads in a trainer."""

    place: str  # "package.module:name", or "package.module:Class.name"
    parameters: tuple[str, ...] = ()  # names that it must accept
    exact: bool = False  # it must accept no others: a method that ours overrides
    attributes: tuple[str, ...] = ()  # of a class's objects: its methods must use them

    def differences(self) -> Iterator[str]:
        """Yield how it differs from what ours needs."""
        if difference := missing(self.place):
            yield difference
            return
        theirs = find(self.place)
        if self.parameters:
            yield from self._unlike_parameters(theirs)
        if self.attributes:
            for name in sorted(set(self.attributes) - _names_used_by(theirs)):
                yield f"{_dotted(self.place)}: no attribute {name!r}"

    def _unlike_parameters(self, theirs: Any) -> Iterator[str]:
        place = _dotted(self.place)
        known = _parameters(theirs)
        takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in known.values())
        for name in self.parameters:
            if name not in known and not takes_all:
                yield f"{place}: no parameter {name!r}"
        for name, parameter in known.items():
            needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
            if name not in self.parameters and (self.exact or needed):
                yield f"{place}: new parameter {_written(parameter)}, which ours does not know"


@dataclass(frozen=True, eq=False, kw_only=True)
class Probe:
    """Everything that an adapter needs from a trainer."""

    host: Host
    replacements: Callable[[], Iterable[Replacement]] = tuple
    uses: tuple[Use, ...] = ()
    # runs the trainer's functions and ours if they can run on a CPU, and yields differences; it
    # must not wait for other processes, which may not run it
    compare: Callable[[], Iterable[str]] = tuple
    override: str = "enable(any_version=True)"  # how to try it anyway; "": not possible

    @torch.compiler.disable
    def check(self, any_version: bool = False) -> None:
        """Compare once per process and version; log a version that was not tested.

        Raises:
            ImportError: the trainer is not installed, or it differs; the message lists all
                differences. With ``any_version`` they are a warning.
        """
        installed = self.host.installed()
        with LOCK:
            unlike_ours = differences(self, installed)
        if not unlike_ours:
            return
        package = self.host.package
        tested = self.host.tested
        listed = "\n".join(f"  * {each}" for each in unlike_ours)
        text = (
            f"{package} {installed} differs from what our adapter needs (tested with "
            f"{', '.join(tested)}):\n{listed}"
        )
        if not any_version:
            advice = f'Install a tested version: pip install "{package}=={tested[-1]}.*"'
            if self.override:
                advice += f"; or try this one: {self.override}"
            raise ImportError(f"{text}\n{advice}")
        warnings.warn(text, RuntimeWarning, stacklevel=4)


@functools.cache
def differences(probe: Probe, installed: str) -> tuple[str, ...]:
    """Return the differences of an installed version; numbers are compared only if names agree."""
    needed: tuple[Replacement | Use, ...] = (*probe.replacements(), *probe.uses)
    unlike_ours = [each for part in needed for each in part.differences()]
    if not unlike_ours:
        # modes of torch belong to a thread: a default device, autocast, fake tensors
        with ThreadPoolExecutor(1) as thread:
            unlike_ours = thread.submit(_unlike_numbers, probe).result()
    if not unlike_ours and not probe.host.was_tested(installed):
        _log.warning(
            "%s %s was not tested (tested: %s), but the probe passed: it has the functions and "
            "numbers that our adapter needs",
            probe.host.package,
            installed,
            ", ".join(probe.host.tested),
        )
    return tuple(unlike_ours)


def _unlike_numbers(probe: Probe) -> list[str]:
    with _undisturbed():
        try:
            return list(probe.compare())
        except Exception as error:  # any error of the trainer's code is a difference
            return [f"numbers could not be compared: {type(error).__name__}: {error}"]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Compute in fp32 regardless of the process's settings, and restore its state."""
    # without ZeRO-3, under which transformers treats parameters as partitioned
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    zero3 = "_hf_deepspeed_config_weak_ref"
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=[]),
        nullcontext() if deepspeed is None else patch.object(deepspeed, zero3, None),
        # accelerate's init_empty_weights replaces this
        patch.object(nn.Module, "register_parameter", _REGISTER_PARAMETER),
        # FlopCounterMode uses this to track modules
        patch.dict(nn.modules.module._global_forward_pre_hooks, clear=True),
        patch.dict(nn.modules.module._global_forward_hooks, clear=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # from the trainer's code, on probe tokens
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def find(place: str) -> Any:
    """Return the object at "package.module" or "package.module:name.name"."""
    module, _, path = place.partition(":")
    owner = import_module(module)
    return attrgetter(path)(owner) if path else owner


def missing(place: str) -> str:
    """Return an error if there is nothing at a place of :func:`find`; "" if there is something."""
    try:
        find(place)
    except ImportError as error:
        return f"{_dotted(place)}: missing ({error})"
    except AttributeError:
        return f"{_dotted(place)}: missing"
    return ""


def unlike_parameters(
    place: str, theirs: Any, ours: Any, more: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield differences between the parameters of a trainer's function and our function.

    Theirs may lack the parameters in ``more``, or have other defaults for them.
    """
    own, known = _parameters(ours), _parameters(theirs)
    if any(x.kind in _VARIADIC for x in (*known.values(), *own.values())):
        return  # there are no names to compare
    for name, parameter in known.items():
        if name not in own:
            yield f"{place}: new parameter {_written(parameter)}, which ours does not know"
    for name, parameter in own.items():
        if name not in known:
            if name not in more or parameter.default is parameter.empty:
                yield f"{place}: no parameter {name!r}"
        elif name not in more and repr(parameter.default) != repr(known[name].default):
            expected, got = _written(parameter), _written(known[name])
            yield f"{place}: expected parameter {expected}, got {got}"
    expected_order = [(name, x.kind) for name, x in own.items() if name in known]
    if expected_order != [(name, x.kind) for name, x in known.items() if name in own]:
        written = ", ".join(str(x.replace(annotation=x.empty)) for x in known.values())
        yield f"{place}: expected parameters in the order of {', '.join(own)}; got {written}"


def unlike(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """Yield which tensors and numbers differ by more than rounding; None: absent.

    Differences up to :data:`TOLERANCE` times the largest value, or :data:`FLOOR`, are allowed.
    """
    theirs = {name: value for name, value in theirs.items() if value is not None}
    ours = {name: value for name, value in ours.items() if value is not None}
    for name in sorted(theirs.keys() ^ ours.keys()):
        yield f"{what}: {name}: only {'ours' if name in ours else 'theirs'} has it"
    for name in sorted(theirs.keys() & ours.keys()):
        expected = torch.as_tensor(theirs[name]).detach().double()
        got = torch.as_tensor(ours[name]).detach().double()
        if expected.shape != got.shape:
            yield f"{what}: {name}: theirs has shape {(*expected.shape,)}, ours {(*got.shape,)}"
            continue
        allowed = TOLERANCE * float(expected.abs().max()) + FLOOR
        error = float((got - expected).abs().max())
        if not error <= allowed:
            yield f"{what}: {name} differs by {error:.2g} from ours (allowed {allowed:.2g})"


def gradients(loss: Tensor, **leaves: Tensor) -> dict[str, Tensor]:
    """Return the gradients of leaves, with names for :func:`unlike`."""
    values = torch.autograd.grad(loss, list(leaves.values()))
    return {f"gradient of {name}": x for name, x in zip(leaves, values, strict=True)}


def gradient(model: nn.Module) -> Tensor:
    """Return the gradient of all parameters as one vector, and clear it."""
    joined = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
    model.zero_grad()
    return joined


def tiny_model() -> PreTrainedModel:
    """Return a causal LM with fixed random weights, and a bias, scale and softcap of its logits.

    It belongs to no transformers family, since a family may have been patched for GPUs.
    """
    transformers = import_module("transformers")
    output = import_module("transformers.modeling_outputs").BaseModelOutput

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(19, 8), nn.Linear(8, 8)

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return output(last_hidden_state=torch.tanh(self.layer(self.embedding(input_ids))))

    class Model(transformers.PreTrainedModel):  # type: ignore[name-defined]
        config_class = transformers.PretrainedConfig
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model, self.lm_head = Backbone(), nn.Linear(8, 19)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
            return self.lm_head(self.model(input_ids).last_hidden_state)

    config = transformers.PretrainedConfig(vocab_size=19)
    config.logit_scale, config.final_logit_softcapping = 0.7, 3.0
    model = Model(config)
    g = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=g)
    return model


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers that are the same in every run, as a leaf that requires a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _dotted(place: str) -> str:
    return place.replace(":", ".")


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    follow = inspect.isclass(function)  # a wrapper of a function may have other parameters
    parameters = inspect.signature(function, follow_wrapped=follow).parameters
    return {name: x for name, x in parameters.items() if name not in ("self", "ctx")}


def _written(parameter: inspect.Parameter) -> str:
    return repr(str(parameter.replace(annotation=parameter.empty)))


def _names_used_by(cls: Any) -> set[str]:
    """Return the attribute names used in the methods of a class and its base classes."""
    functions = [
        inspect.unwrap(getattr(value, "__func__", value))
        for base in inspect.getmro(cls)
        for value in vars(base).values()
        if inspect.isroutine(value)
    ]
    codes = [each.__code__ for each in functions if inspect.isfunction(each)]
    return {name for code in codes for name in code.co_names}
