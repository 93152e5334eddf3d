"""Completions of the current policy, with any engine.

Engines get its weights as in a checkpoint: plain names, tied heads, adapters merged in. Engines
that can apply a LoRA adapter get the base weights once, unless they load these themselves, and
then only the adapter's factors.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any, Protocol, TypeVar

from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from grpo_kernels.losses import Metrics
from grpo_trainer.common import is_in_background, shortened, start
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import ImageInputs, Sample, has_images
from grpo_trainer.engines.answers import Completion, Completions, TokenIds
from grpo_trainer.engines.base import (
    EngineContext,
    Images,
    RolloutEngine,
    Sampling,
    Weights,
    WeightSource,
)
from grpo_trainer.engines.transformers import TransformersEngine
from grpo_trainer.monitor import log_value, phase
from grpo_trainer.policy import WHOLE, Placement, base_policy, is_quantized, stay_tied, ties_ends

_BLOCK = re.compile(r".*?\.\d+\.|")  # the name up to the first number: a block of the model

T = TypeVar("T")
EngineFactory = Callable[[EngineContext], RolloutEngine]

# by name; engines of higher packages are imported when they are created
ENGINES: dict[str, EngineFactory | str] = {
    "transformers": TransformersEngine,
    "vllm_colocate": "grpo_trainer.vllm.engines.ColocatedVLLM",
    "vllm_server": "grpo_trainer.vllm.engines.VLLMServer",
}


def register_rollout_engine(name: str, factory: EngineFactory) -> None:
    """Register ``factory``, so that GRPOConfig accepts ``rollout_engine=name``.

    Raises:
        ValueError: the name is taken.
    """
    if name in ENGINES:
        raise ValueError(f"name: expected a new name, got {name!r}, which is registered")
    ENGINES[name] = factory


@dataclass(eq=False)
class Sampler:
    """Sends the policy's weights to the engine whenever they have changed, then samples.

    Work begun by :meth:`start` continues in the background with the engine's weights. New weights
    are sent only when it is finished, unless they are sent ``in_flight``.
    """

    engine: RolloutEngine
    context: EngineContext  # for the policy
    sampling: Sampling
    step: Callable[[], int]  # optimizer steps so far
    name: str  # of the engine
    in_flight: bool = False  # send weights while the engine generates
    _args: GRPOConfig | None = field(default=None, init=False)  # replaces the context's
    _version: object = field(default=None, init=False)  # of the weights that the engine has
    _sent: int = field(default=0, init=False)  # bytes of the last update
    _updates: list[int] = field(default_factory=list, init=False)  # optimizer steps before each
    _running: set[Future[Any]] = field(default_factory=set, init=False)
    _thread: int | None = field(default=None, init=False)  # the training thread; None: not started

    def follow(self, args: GRPOConfig) -> None:
        """Sample with ``args`` from now on."""
        if args is not (self._args or self.context.args):
            context, self._args = self.context, args
            self.sampling = Sampling.from_config(
                args, context.tokenizer, context.policy(), context.vocab_size
            )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids; a completion that ends with none of them was truncated."""
        return self.sampling.eos_token_ids

    @property
    def version(self) -> int:
        """Optimizer steps before the engine's weights."""
        return self._updates[-1] if self._updates else 0

    def generate(
        self, prompt_ids: list[TokenIds], max_tokens: int | None = None, images: Images = None
    ) -> Completions:
        """Return one completion per prompt with the current policy.

        ``max_tokens`` replaces max_completion_length. With several processes it must be the same
        on all of them; some may have no prompts.

        In work begun by :meth:`start` it uses the engine's weights. There, each process calls it
        separately, from any thread.

        Raises:
            ValueError: the engine returns something else, or does not accept ``images``.
            RuntimeError: the run that started the calling thread has ended.
        """
        if self._thread is None and is_in_background():
            raise RuntimeError("rollouts.generate: the run has ended")
        if self._thread not in (None, threading.get_ident()):
            shown = images or [None] * len(prompt_ids)
            pairs = zip(prompt_ids, shown, strict=True)
            work = [self.complete(ids, max_tokens, image) for ids, image in pairs]
            return Completions.of(self._begun(work).result())
        self.send()
        self.settle()
        more = self._images(images, self.engine.generate)
        completions = self.engine.generate(prompt_ids, self._limited(max_tokens), **more)
        return self._checked(completions, prompt_ids, max_tokens)

    async def complete(
        self,
        prompt_ids: TokenIds,
        max_tokens: int | None = None,
        images: ImageInputs | None = None,
    ) -> Completion:
        """Return one completion with the engine's weights, while the policy may change.

        Raises:
            ValueError: as in :meth:`generate`, or the engine reports no log-probabilities.
        """
        engine: Any = self.engine  # checked to have the method
        more = {"images": images} if self._images([images], engine.complete_one) else {}
        completion = await engine.complete_one(prompt_ids, self._limited(max_tokens), **more)
        if not isinstance(completion, Completion):
            what = shortened(completion)
            raise ValueError(f"{self._engine}: expected a Completion of `complete_one`, got {what}")
        if self.in_flight and completion.versions is None:
            raise ValueError(
                f"{self._engine}: expected versions of its tokens from `complete_one` with "
                "max_staleness, since weights arrive meanwhile, got None"
            )
        [checked] = self._checked(Completions.of([completion]), [prompt_ids], max_tokens).rows()
        if checked.logprobs is None:
            raise ValueError(
                "generation_batches_ahead: expected an engine that reports log-probabilities, with "
                "which the loss corrects for its older weights, got none"
            )
        return checked

    def start(self, work: Coroutine[Any, Any, T]) -> Future[list[T]]:
        """Start ``work`` in the background; the future's result is a list with its result."""
        self._thread = threading.get_ident()
        return self._begun([work])

    def cancel(self) -> None:
        """Cancel work that is still running."""
        for future in list(self._running):
            future.cancel()
        self._thread = None

    def close(self) -> None:
        self.cancel()
        self.engine.close()

    def outdated(self) -> None:
        """Send the weights before the next generation in any case, since they were loaded."""
        self._version = None

    def send(self) -> None:
        """Send the weights if they have changed; every process calls it.

        Unless they are sent in flight, it first waits for work that was begun.
        """
        policy, placement = self.context.policy(), self.context.placement
        # fused optimizers leave no trace on the parameters, and loading is not a step
        version = (self.step(), parameter_versions(policy, placement))
        keeps = getattr(self.engine, "keeps_weights", True)
        adapter = getattr(self.engine, "takes_adapter", False)
        has_base = adapter and getattr(self.engine, "has_base", False)
        sends_base = not has_base and (not adapter or not keeps or self._version is None)
        if self._version != version or not keeps:
            self.settle()
            source = partial(policy_weights, policy, placement, merged=not adapter)
            with phase("sync"):
                if sends_base:
                    self._update(lambda: self._counted(source()))
                if adapter:
                    # unchanged weights are not part of an update
                    below = self._sent if sends_base and not keeps else 0
                    factors = partial(adapter_weights, policy, placement)
                    self._update(lambda: self._counted(factors(), below), adapter=True)
            self._version = version
        log_value("weight_update_bytes", self._sent, count=int(self._sent != 0))

    def _update(self, weights: WeightSource, adapter: bool = False) -> None:
        self._updates.append(self.step())
        if adapter:
            self.engine.update_weights(weights, True)
        else:
            self.engine.update_weights(weights)

    def _begun(self, work: list[Coroutine[Any, Any, T]]) -> Future[list[T]]:
        future = start(work)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def settle(self) -> None:
        """Wait until nothing runs in the background; errors are raised when results are used."""
        if not self.in_flight:
            wait(list(self._running))

    def _limited(self, max_tokens: int | None) -> Sampling:
        sampling = self.sampling
        return sampling if max_tokens is None else replace(sampling, max_tokens=max_tokens)

    def _images(self, images: Images, method: Callable[..., Any]) -> dict[str, Any]:
        """Return the argument of the engine's ``method`` for ``images``, if there are any."""
        if not has_images(images):
            return {}
        if "images" not in inspect.signature(method).parameters:
            raise ValueError(
                f"rollout_engine: expected an engine whose {method.__name__} accepts images, "
                f"got {type(self.engine).__name__} for prompts with images"
            )
        return {"images": images}

    @property
    def _engine(self) -> str:
        return f"rollout engine {type(self.engine).__name__}"

    def _counted(self, weights: Weights, sent: int = 0) -> Weights:
        self._sent = sent
        for name, value in weights:
            self._sent += value.nbytes
            yield name, value
            del value  # else it stays in memory while the next one is computed

    def _checked(
        self, completions: Completions, prompt_ids: list[TokenIds], max_tokens: int | None = None
    ) -> Completions:
        """Return ``completions``; ValueError unless they fit the prompts."""
        if not isinstance(completions, Completions):
            raise ValueError(f"{self._engine}: expected Completions, got {shortened(completions)}")
        if self.sampling.sampling_mask_size and completions.sampling_mask is None:
            raise ValueError(
                "use_sampling_mask: expected an engine that reports which ids its filters kept, "
                f"got none from {type(self.engine).__name__}"
            )
        if not self.context.args.use_rollout_routing_replay:
            completions = completions._replace(routed_experts=None)  # they are not used
        elif completions.routed_experts is None:
            raise ValueError(
                "use_rollout_routing_replay: expected an engine that reports which experts it sent "
                f"tokens through, got none from {type(self.engine).__name__}"
            )
        try:
            checked = completions.checked(
                len(prompt_ids),
                max_tokens=self._limited(max_tokens).max_tokens,
                vocab_size=self.context.vocab_size,
                eos_token_ids=self.eos_token_ids,
            )
            versions = [self._steps_of(row) for row in checked.rows()]
            _check_experts(prompt_ids, checked)
        except ValueError as error:
            raise ValueError(f"{self._engine}: {error}") from error
        return checked._replace(versions=versions)

    def _steps_of(self, completion: Completion) -> list[int]:
        """Return the optimizer steps before the weights of each token."""
        if completion.versions is None:
            return [self.version] * len(completion.token_ids)
        for update in completion.versions:
            if type(update) is not int or not 0 < update <= len(self._updates):
                raise ValueError(
                    f"expected versions from 1 to {len(self._updates)}, the number of updates "
                    f"sent, got {update!r}"
                )
        return [self._updates[update - 1] for update in completion.versions]


def _check_experts(prompt_ids: list[TokenIds], completions: Completions) -> None:
    for number, (prompt, row) in enumerate(zip(prompt_ids, completions.rows(), strict=True)):
        expected = len(prompt) + len(row.token_ids) - 1
        if row.routed_experts is not None and len(row.routed_experts) != expected:
            raise ValueError(
                f"completion {number}: expected routed_experts of {expected} tokens, all tokens of "
                f"prompt and completion except the last, got {len(row.routed_experts)}"
            )


def make_sampler(
    context: EngineContext, step: Callable[[], int], engine: RolloutEngine | None = None
) -> Sampler:
    """Return the sampler for ``engine``, or for the engine that the configuration names.

    ``step`` returns the optimizer steps so far.

    Raises:
        ValueError: the engine is unknown, or cannot run here.
    """
    args = context.args
    name = args.rollout_engine
    if name is None:
        name = f"vllm_{args.vllm_mode}" if args.use_vllm else "transformers"
    if engine is not None and name != "transformers":
        raise ValueError(f"rollout_engine: expected one engine, got it and {name} in args")
    if name not in ENGINES:
        raise ValueError(f"rollout_engine: expected one of {', '.join(ENGINES)}; got {name!r}")
    policy, vocab_size = context.policy(), context.vocab_size
    sampling = Sampling.from_config(args, context.tokenizer, policy, vocab_size)
    if engine is None:
        if name != "transformers" and is_peft_model(policy):
            _adapted_modules(policy)  # only to check it, before an engine starts
        factory = ENGINES[name]
        engine = (pkgutil.resolve_name(factory) if isinstance(factory, str) else factory)(context)
    else:
        name = type(engine).__name__
    if args.generation_batches_ahead and not hasattr(engine, "complete_one"):
        raise ValueError(
            "generation_batches_ahead: expected 0, or an engine with its own weights, which can "
            "generate while the policy trains (use_vllm with vllm_mode='server', or an engine with "
            f"the method `complete_one`), got {type(engine).__name__}"
        )
    in_flight = args.max_staleness is not None
    if in_flight and not getattr(engine, "updates_in_flight", False):
        raise ValueError(
            "max_staleness: expected None, or an engine that accepts weights while it generates "
            "(use_vllm with vllm_mode='server', or an engine with updates_in_flight), got "
            f"{type(engine).__name__}"
        )
    return Sampler(engine, context, sampling, step, name, in_flight)


class Source(Protocol):
    """Completes samples, and returns metrics to log."""

    def __call__(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples`` with the current policy; every process calls it."""
        ...

    async def ahead(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples`` with the engine's weights, in the background. Each process calls it
        separately."""
        ...


def parameter_versions(policy: nn.Module, placement: Placement = WHOLE) -> list[tuple[int, int]]:
    """Return a value that stays equal while no trainable parameter is replaced or written to.

    Writes of fused optimizers do not show: they do not change the version counter of autograd.
    """
    placement.at_rest(policy)
    trained = (placement.local(p) for p in policy.parameters() if p.requires_grad)
    return [(parameter.data_ptr(), parameter._version) for parameter in trained]


def policy_weights(
    policy: PreTrainedModel, placement: Placement = WHOLE, merged: bool = True
) -> Weights:
    """Yield names and tensors of ``policy``'s checkpoint, one by one; without ``merged``, as if its
    adapter had no effect.

    Tensors share the policy's memory if nothing is sharded, merged or converted. A tied LM head is
    also included under its own name, since an engine may have a copy of it. Shards are gathered one
    parameter at a time, by all processes together, and adapters are merged one layer at a time, in
    a copy of that layer, so there is never a second model in memory.

    Raises:
        ValueError: the policy's base is quantized: an adapter cannot be merged into it exactly, and
            no engine accepts its packed weights.
    """
    base = base_policy(policy)
    if is_peft_model(policy):
        if is_quantized(base):
            raise ValueError(
                "policy: expected weights in full precision, got an adapter on a quantized base, "
                "into which it cannot be merged exactly; an engine with takes_adapter and has_base "
                "gets only the adapter"
            )
        weights = _unwrapped(policy, placement, merged)
    else:
        weights = placement.weights(policy)
    shapes = placement.described(base)
    saved = revert_weight_conversion(base, shapes)
    if all(saved.get(name) is value for name, value in shapes.items()):
        return weights
    # the model has another layout (stacked experts): copy one block at a time
    blocks = groupby(weights, key=lambda item: _BLOCK.match(item[0])[0])  # type: ignore[index]
    return chain.from_iterable(
        revert_weight_conversion(base, dict(block)).items() for _, block in blocks
    )


def adapter_weights(policy: Any, placement: Placement = WHOLE) -> Weights:
    """Yield the LoRA adapter's factors under the names of PEFT's files, with B times the scaling;
    shards are gathered as in :func:`policy_weights`."""
    [adapter] = policy.active_adapters
    endings = (f".lora_A.{adapter}.weight", f".lora_B.{adapter}.weight")
    for name, value in placement.weights(policy, lambda name: name.endswith(endings)):
        layer, _, factor = name.removesuffix(f".{adapter}.weight").rpartition(".")
        scaling = policy.get_submodule(layer).scaling[adapter] if factor == "lora_B" else 1.0
        yield f"{layer}.{factor}.weight", value * scaling


def _unwrapped(policy: PreTrainedModel, placement: Placement, merged: bool) -> Weights:
    base = base_policy(policy)
    [adapter] = policy.active_adapters
    adapted = _adapted_modules(policy)
    prefixes = tuple(f"{name}." for name in adapted)
    yield from placement.weights(base, lambda name: not name.startswith(prefixes))
    for name, module in adapted.items():
        in_use = _has(module, adapter)  # else it belongs to another adapter, such as a teacher
        if hasattr(module, "modules_to_save"):
            own = module.modules_to_save[adapter] if in_use else module.original_module
            weights = placement.weights(own)
        else:
            layer = placement.whole_copy(module)
            layer.merge(adapter_names=[adapter] if merged and in_use else [])
            weights = iter(layer.get_base_layer().state_dict().items())
            del layer  # else it stays in memory while the next one is copied
        for key, value in weights:
            yield f"{name}.{key}", value


def _adapted_modules(policy: Any) -> dict[str, Any]:
    """Return PEFT's modules by the name of the module they replaced; ValueError unless they can be
    merged and fit an engine that ties the head."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    base, [adapter] = base_policy(policy), policy.active_adapters
    adapted: dict[str, Any] = {}
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper | TrainableTokensWrapper):
            place = name.removesuffix(".token_adapter")  # it merges what its wrapper replaces
            if place.rpartition(".")[0] in adapted:
                raise ValueError(f"peft_config: expected whole layers for use_vllm, got {place}")
            adapted[place] = module
    if ties_ends(base):
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        names = [
            name
            for name, module in adapted.items()
            if base.get_submodule(name) in ends and _has(module, adapter)
        ]
        if names and not stay_tied(*ends, adapter):
            raise ValueError(
                "peft_config: expected no adapter on tied embeddings, since embeddings and head "
                f"would differ (an engine has one weight for both), got one on {', '.join(names)}; "
                "to keep them tied, set ensure_weight_tying=True in the LoraConfig, with "
                "modules_to_save or trainable_token_indices"
            )
    return adapted


def _has(module: Any, adapter: str) -> bool:
    """Return whether one of PEFT's layers or wrappers has weights of ``adapter``."""
    return any(adapter in getattr(module, name, ()) for name in module.adapter_layer_names)
