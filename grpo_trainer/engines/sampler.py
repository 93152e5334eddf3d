"""Completions of the policy as it is now, whichever engine samples them.

Engines get its weights as a checkpoint has them: plain names, tied heads, adapters merged in. Those
that can apply a LoRA adapter get the weights below it once, unless they load them, and then its
factors.
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

_BLOCK = re.compile(r".*?\.\d+\.|")  # up to the first number: a block of the model, or nothing

T = TypeVar("T")
EngineFactory = Callable[[EngineContext], RolloutEngine]

# by name; those of the room above are imported when they are made
ENGINES: dict[str, EngineFactory | str] = {
    "transformers": TransformersEngine,
    "vllm_colocate": "grpo_trainer.vllm.engines.ColocatedVLLM",
    "vllm_server": "grpo_trainer.vllm.engines.VLLMServer",
}


def register_rollout_engine(name: str, factory: EngineFactory) -> None:
    """Make ``rollout_engine=name`` a choice of GRPOConfig.

    Raises:
        ValueError: there is an engine of that name.
    """
    if name in ENGINES:
        raise ValueError(f"name: expected a new one, got {name!r}, which is registered")
    ENGINES[name] = factory


@dataclass(eq=False)
class Sampler:
    """Gives the engine the policy's weights whenever they have changed, then samples.

    What :meth:`start` has begun goes on in the background, by the weights that the engine has.
    Before others are sent it is waited for, unless they are sent ``in_flight``.
    """

    engine: RolloutEngine
    context: EngineContext  # of the policy
    sampling: Sampling
    step: Callable[[], int]  # optimizer steps taken
    name: str  # of the engine
    in_flight: bool = False  # weights are sent while the engine generates
    _args: GRPOConfig | None = field(default=None, init=False)  # in place of the context's
    _version: object = field(default=None, init=False)  # of the weights that the engine has
    _sent: int = field(default=0, init=False)  # bytes of the last update
    _updates: list[int] = field(default_factory=list, init=False)  # optimizer steps before each
    _running: set[Future[Any]] = field(default_factory=set, init=False)
    _thread: int | None = field(default=None, init=False)  # that trains; None: nothing was begun

    def follow(self, args: GRPOConfig) -> None:
        """Sample by ``args`` from now on."""
        if args is not (self._args or self.context.args):
            context, self._args = self.context, args
            self.sampling = Sampling.from_config(
                args, context.tokenizer, context.policy(), context.vocab_size
            )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """A completion that ends in none of them was truncated."""
        return self.sampling.eos_token_ids

    @property
    def version(self) -> int:
        """Optimizer steps that the engine's weights have seen."""
        return self._updates[-1] if self._updates else 0

    def generate(
        self, prompt_ids: list[TokenIds], max_tokens: int | None = None, images: Images = None
    ) -> Completions:
        """Return one completion per prompt, by the policy as it is now.

        ``max_tokens`` is in place of max_completion_length. With several processes it is the same
        on all of them; some may have no prompts.

        In what :meth:`start` has begun it completes by the weights that the engine has. Each
        process calls it for itself there, from any thread.

        Raises:
            ValueError: what the engine returns is no such thing, or it takes no ``images``.
            RuntimeError: the run that has begun the calling thread has ended.
        """
        if self._thread is None and is_in_background():
            raise RuntimeError("rollouts.generate: expected a run that goes on, got one that ended")
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
        """Return one completion by the weights that the engine has, while the policy may move.

        Raises:
            ValueError: as :meth:`generate`, or the engine reports no log-probabilities.
        """
        engine: Any = self.engine  # has been checked to have the method
        more = {"images": images} if self._images([images], engine.complete_one) else {}
        completion = await engine.complete_one(prompt_ids, self._limited(max_tokens), **more)
        if not isinstance(completion, Completion):
            what = shortened(completion)
            raise ValueError(f"{self._engine}: expected a Completion of `complete_one`, got {what}")
        if self.in_flight and completion.versions is None:
            raise ValueError(
                f"{self._engine}: expected versions of its tokens from `complete_one` with "
                "max_staleness, under which weights come meanwhile, got None"
            )
        [checked] = self._checked(Completions.of([completion]), [prompt_ids], max_tokens).rows()
        if checked.logprobs is None:
            raise ValueError(
                "generation_batches_ahead: expected an engine that reports log-probabilities, by "
                "which the loss corrects for its older weights, got none"
            )
        return checked

    def start(self, work: Coroutine[Any, Any, T]) -> Future[list[T]]:
        """Begin ``work`` in the background; its result is a list of one."""
        self._thread = threading.get_ident()
        return self._begun([work])

    def cancel(self) -> None:
        """End what was begun and still runs."""
        for future in list(self._running):
            future.cancel()
        self._thread = None

    def close(self) -> None:
        self.cancel()
        self.engine.close()

    def outdated(self) -> None:
        """Send the weights before the next generation in any case: they were loaded."""
        self._version = None

    def send(self) -> None:
        """Send the weights if they have changed; every process calls it.

        Unless they go in flight, what was begun is waited for.
        """
        policy, placement = self.context.policy(), self.context.placement
        # fused optimizers leave no trace on the parameters, and loading takes no step
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
                    # what stays is no part of an update
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
        """Wait until nothing runs in the background; what went wrong is raised where it is used."""
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
                f"rollout_engine: expected one whose {method.__name__} takes images, got "
                f"{type(self.engine).__name__} for prompts with images"
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
            del value  # or it would live as long as the next one is made

    def _checked(
        self, completions: Completions, prompt_ids: list[TokenIds], max_tokens: int | None = None
    ) -> Completions:
        """Return ``completions``; raise ValueError unless they are those of the prompts."""
        if not isinstance(completions, Completions):
            raise ValueError(f"{self._engine}: expected Completions, got {shortened(completions)}")
        if self.sampling.sampling_mask_size and completions.sampling_mask is None:
            raise ValueError(
                "use_sampling_mask: expected an engine that reports which ids its filters left, "
                f"got none from {type(self.engine).__name__}"
            )
        if not self.context.args.use_rollout_routing_replay:
            completions = completions._replace(routed_experts=None)  # nobody reads them
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
        """Return the optimizer steps that the weights of each token had seen."""
        if completion.versions is None:
            return [self.version] * len(completion.token_ids)
        for update in completion.versions:
            if type(update) is not int or not 0 < update <= len(self._updates):
                raise ValueError(
                    f"expected versions of 1 to {len(self._updates)}, the weights that were sent, "
                    f"got {update!r}"
                )
        return [self._updates[update - 1] for update in completion.versions]


def _check_experts(prompt_ids: list[TokenIds], completions: Completions) -> None:
    for number, (prompt, row) in enumerate(zip(prompt_ids, completions.rows(), strict=True)):
        expected = len(prompt) + len(row.token_ids) - 1
        if row.routed_experts is not None and len(row.routed_experts) != expected:
            raise ValueError(
                f"completion {number}: expected routed_experts of {expected} tokens, all of prompt "
                f"and completion but the last, got {len(row.routed_experts)}"
            )


def make_sampler(
    context: EngineContext, step: Callable[[], int], engine: RolloutEngine | None = None
) -> Sampler:
    """Return what samples by ``engine``, or by the one that the configuration names.

    ``step`` counts the optimizer's steps.

    Raises:
        ValueError: there is no such engine, or it cannot run here.
    """
    args = context.args
    name = args.rollout_engine
    if name is None:
        name = f"vllm_{args.vllm_mode}" if args.use_vllm else "transformers"
    if engine is not None and name != "transformers":
        raise ValueError(f"rollout_engine: expected it once, got one beside the {name} of args")
    if name not in ENGINES:
        raise ValueError(f"rollout_engine: expected one of {', '.join(ENGINES)}; got {name!r}")
    policy, vocab_size = context.policy(), context.vocab_size
    sampling = Sampling.from_config(args, context.tokenizer, policy, vocab_size)
    if engine is None:
        if name != "transformers" and is_peft_model(policy):
            _adapted_modules(policy)  # for its checks, before an engine starts
        factory = ENGINES[name]
        engine = (pkgutil.resolve_name(factory) if isinstance(factory, str) else factory)(context)
    else:
        name = type(engine).__name__
    if args.generation_batches_ahead and not hasattr(engine, "complete_one"):
        raise ValueError(
            "generation_batches_ahead: expected 0, or an engine with weights of its own, which can "
            "generate while the policy trains (use_vllm with vllm_mode='server', or one with the "
            f"method `complete_one`), got {type(engine).__name__}"
        )
    in_flight = args.max_staleness is not None
    if in_flight and not getattr(engine, "updates_in_flight", False):
        raise ValueError(
            "max_staleness: expected None, or an engine that takes weights while it generates "
            "(use_vllm with vllm_mode='server', or one with updates_in_flight), got "
            f"{type(engine).__name__}"
        )
    return Sampler(engine, context, sampling, step, name, in_flight)


class Source(Protocol):
    """Completes samples, and returns what is logged of that."""

    def __call__(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples`` by the policy as it is now; every process calls it."""
        ...

    async def ahead(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples`` by the weights that the engine has, in the background. Each process
        calls it for itself."""
        ...


def parameter_versions(policy: nn.Module, placement: Placement = WHOLE) -> list[tuple[int, int]]:
    """Return what is equal as long as no trainable parameter is replaced or written to.

    A fused optimizer's writing does not show: it does not count up what autograd watches.
    """
    placement.at_rest(policy)
    trained = (placement.local(p) for p in policy.parameters() if p.requires_grad)
    return [(parameter.data_ptr(), parameter._version) for parameter in trained]


def policy_weights(
    policy: PreTrainedModel, placement: Placement = WHOLE, merged: bool = True
) -> Weights:
    """Yield names and tensors of the checkpoint that ``policy`` would be, one after the other;
    without ``merged`` as if its adapter did nothing.

    Tensors are the policy's own where nothing is sharded, merged or converted. A tied LM head comes
    under its name as well, since an engine may keep a copy of it. Shards are gathered one parameter
    at a time, which all processes do together, and adapters are merged one layer at a time, in a
    copy of that layer, so there is never a second model in memory.

    Raises:
        ValueError: the policy's base is quantized: no adapter can be merged into it exactly, and
            no engine takes its weights as they are packed.
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
    # the model is held in another layout (experts as a stack): one block is copied at a time
    blocks = groupby(weights, key=lambda item: _BLOCK.match(item[0])[0])  # type: ignore[index]
    return chain.from_iterable(
        revert_weight_conversion(base, dict(block)).items() for _, block in blocks
    )


def adapter_weights(policy: Any, placement: Placement = WHOLE) -> Weights:
    """Yield the factors of the LoRA adapter under the names of PEFT's files, B times the scaling;
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
        in_use = _has(module, adapter)  # else it is another adapter's, such as a teacher's
        if hasattr(module, "modules_to_save"):
            own = module.modules_to_save[adapter] if in_use else module.original_module
            weights = placement.weights(own)
        else:
            layer = placement.whole_copy(module)
            layer.merge(adapter_names=[adapter] if merged and in_use else [])
            weights = iter(layer.get_base_layer().state_dict().items())
            del layer  # or it would live as long as the next one is copied
        for key, value in weights:
            yield f"{name}.{key}", value


def _adapted_modules(policy: Any) -> dict[str, Any]:
    """Return what PEFT put into the model, by the name of the module it replaced, if it can be
    merged and an engine that ties the head could hold it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    base, [adapter] = base_policy(policy), policy.active_adapters
    adapted: dict[str, Any] = {}
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper | TrainableTokensWrapper):
            place = name.removesuffix(".token_adapter")  # which merges what its wrapper replaces
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
                "peft_config: expected no adapter on tied embeddings, whose ends then differ (an "
                f"engine has one weight for both), got one on {', '.join(names)}; "
                "ensure_weight_tying=True in the LoraConfig, with modules_to_save or "
                "trainable_token_indices, keeps them tied"
            )
    return adapted


def _has(module: Any, adapter: str) -> bool:
    """Return whether a layer or wrapper of PEFT's has weights of ``adapter``."""
    return any(adapter in getattr(module, name, ()) for name in module.adapter_layer_names)
