"""vLLM as an engine: in the training process, on the same device, or as a server."""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from grpo_kernels.tools import install_command
from grpo_trainer.common import together
from grpo_trainer.config import options
from grpo_trainer.data import ImageInputs
from grpo_trainer.engines import (
    Completion,
    Completions,
    EngineContext,
    Images,
    RolloutEngine,
    Sampling,
    TokenIds,
    WeightSource,
    on_first_process,
    vllm_params,
)
from grpo_trainer.policy import loading_whole
from grpo_trainer.vllm.client import Sent, VLLMClient
from grpo_trainer.vllm.requests import Request, joined, requests_of
from grpo_trainer.vllm.settings import (
    base_source,
    check_engine_options,
    check_reports_experts,
    check_requantized,
    describe,
    engine_ranks,
    engine_settings,
    loads_base,
    quantization_of,
    server_ranks,
)
from grpo_trainer.vllm.speculative import (
    Counts,
    Speculation,
    check_server_speculation,
    counts_of_server,
    drafter_has_weights,
    speculation_of_engine,
    with_speculation,
)
from grpo_trainer.vllm.transfer import adapter_rank, save_adapter

_QUANTIZATION = "vllm_engine_kwargs['quantization']"
_STRIDE = 1_000_003  # between the seeds of processes
# warnings that vLLM repeats at every update: the logger, and words of the message
_NOISE = {
    # tables of angles are computed, not loaded
    "vllm.model_executor.model_loader.reload.layerwise": "Rotary",
    # an fp32 policy is rounded to the engine's dtype, as intended
    "vllm.model_executor.models.utils": "Attempted to load weight",
}


def _lacks(words: str, record: logging.LogRecord) -> bool:
    return words not in record.getMessage()


class ColocatedVLLM:
    """Samples with one vLLM engine per process, or per tensor-parallel group.

    Raises:
        ValueError: vLLM is not installed, or rejects the settings.
    """

    def __init__(self, context: EngineContext) -> None:
        args = context.args
        # the engine runs in this process: weights are passed by reference, never serialized
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # on a CPU it would pin the threads of this training process to some of the cores
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # it reports every update
        for name, words in _NOISE.items():
            logging.getLogger(name).addFilter(partial(_lacks, words))
        try:
            import vllm
        except ImportError as error:
            raise ValueError(
                f"use_vllm: expected vllm to be installed: {error}; {install_command('vllm')}"
            ) from error
        self._vllm = vllm
        self._accelerator = context.accelerator
        self._group = _tensor_parallel_group(context)  # None: no group
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        own = options("vllm_engine_kwargs", args.vllm_engine_kwargs)
        check_engine_options(own)
        settings = engine_settings(context) | own
        rank = adapter_rank(context, partial(engine_ranks, context, settings))
        settings |= {"enable_lora": True, "max_lora_rank": rank} if rank else {}
        self.takes_adapter = rank > 0
        self._adapter: Any = None  # vLLM's request for the adapter
        self.has_base = loads_base(
            context,
            takes_adapter=self.takes_adapter,
            quantization=quantization_of(own),
            setting=_QUANTIZATION,
            model=own.get("model"),
        )
        own = with_speculation(context, own, loads_weights=self.has_base)
        settings |= own
        if self.has_base:
            source = {} if "model" in own else base_source(context)
            settings |= {"load_format": "auto"} | source | own
        self._reports_experts = args.use_rollout_routing_replay
        self._llm = self._made(context, settings)
        if not self.has_base:  # also if weights were quantized
            check_requantized(self._llm.llm_engine.model_config.quantization, _QUANTIZATION)
        # Level 2 keeps no copy of the weights: the policy has them, and sends them. A base that the
        # policy does not have moves to CPU memory at level 1, and returns unchanged, in its
        # kernels' layout; reloading would read and quantize its files for each generation. The
        # policy does not have a drafter's weights either.
        self._sleep_level = 0
        if args.vllm_enable_sleep_mode:
            keeps = self.has_base or drafter_has_weights(own.get("speculative_config"))
            self._sleep_level = 1 if keeps else 2
        self._asleep: set[str] = set()  # parts without memory now
        atexit.register(self.close)
        self._speculation = speculation_of_engine(self._llm, context.accelerator.device)

    @property
    def keeps_weights(self) -> bool:
        return self._sleep_level < 2

    def generate(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Completions:
        """Return completions of this process's prompts; each group is one request.

        Raises:
            ValueError: vLLM and the processor write different tokens for an image.
        """
        self._wake("weights")
        self._wake("kv_cache")
        parts: list[Any] = [requests_of(prompt_ids, images)]
        if self._group is not None:  # together they run each request
            own, parts = parts[0], [None] * dist.get_world_size(self._group)
            dist.all_gather_object(parts, own, group=self._group)
        requests, mine = joined(parts, self._rank)
        prompts = [
            {"prompt_token_ids": one.short_ids}
            | ({"multi_modal_data": {"image": list(one.images)}} if one.images else {})
            for one, _ in requests
        ]
        params = [self._params(sampling, count) for _, count in requests]
        with self._own_random_numbers():
            adapter = {"lora_request": self._adapter}
            outputs = self._llm.generate(prompts, params, use_tqdm=False, **adapter)
        self._speculation.log()
        if self._sleep_level:
            self._llm.sleep(level=self._sleep_level)
            self._asleep = {"weights", "kv_cache"}
        for (request, _), output in zip(requests, outputs, strict=True):
            request.check(output.prompt_token_ids)
        samples = [sample for output in outputs for sample in output.outputs][mine]
        token_ids = [list(sample.token_ids) for sample in samples]
        logprobs = [
            [at[token].logprob for at, token in zip(sample.logprobs, ids, strict=True)]
            for sample, ids in zip(samples, token_ids, strict=True)
        ]
        completions = Completions(token_ids, logprobs)
        if self._reports_experts:
            experts = [sample.routed_experts for sample in samples]
            completions = completions._replace(routed_experts=experts)
        if not sampling.sampling_mask_size:
            return completions
        mask = [
            [[i for i, entry in at.items() if entry.logprob > -math.inf] for at in sample.logprobs]
            for sample in samples
        ]
        return completions._replace(sampling_mask=mask)

    def update_weights(self, weights: WeightSource, adapter: bool = False) -> None:
        """Replace the weights in place, tensor by tensor, and clear caches; with ``adapter``,
        replace the LoRA adapter that completions are sampled with."""
        self._wake("weights")
        if adapter:
            number = self._adapter.lora_int_id + 1 if self._adapter else 1
            request = self._vllm.lora.request.LoRARequest
            with tempfile.TemporaryDirectory() as folder:
                save_adapter(folder, weights)
                self._adapter = request(f"update {number}", number, folder)
                self._llm.llm_engine.add_lora(self._adapter)
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        self._llm.llm_engine.reset_encoder_cache()  # of images
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM: expected a free prefix cache between generations")

    def _wake(self, tag: str) -> None:
        """Restore the memory of a sleeping part; the cache comes after the weights."""
        if tag in self._asleep:
            torch.cuda.empty_cache()  # release training's unused memory; no effect without a GPU
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._llm.llm_engine.engine_core.shutdown()

    def _made(self, context: EngineContext, settings: dict[str, Any]) -> Any:
        """Return ``vllm.LLM`` with ``settings``.

        If weights come from the policy, only their description is read from disk.
        """
        place = tempfile.TemporaryDirectory()
        with place as folder, self._own_random_numbers(), loading_whole():
            if not context.args.trust_remote_code:  # the code is next to the description
                describe(context, folder)
                settings = {"tokenizer": folder} | settings
                settings |= {} if self.has_base else {"model": folder}
            try:
                return self._vllm.LLM(**settings)
            except ValueError as error:
                if not self.has_base:
                    raise
                raise ValueError(
                    f"use_vllm: expected a base that vLLM can load, got {settings['model']!r}: "
                    f"{error}; set vllm_engine_kwargs={{'model': ...}} to a folder or hub id with "
                    "the same weights in another format"
                ) from error

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Give the engine its own random numbers: it would use and seed the whole process's.

        They are seeded from the trainer's generator, which checkpoints store. Processes that sample
        the same tokens share a seed; all others have different seeds.
        """
        seed = [int(torch.randint(2**31, ()))]
        first = self._accelerator.process_index - self._rank
        if self._group is not None:
            dist.broadcast_object_list(seed, src=first, group=self._group)
        states = random.getstate(), np.random.get_state()
        device = self._accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed[0] + _STRIDE * first)
            yield
        random.setstate(states[0])
        np.random.set_state(states[1])

    def _params(self, sampling: Sampling, count: int) -> Any:
        params = vllm_params(sampling)
        structured = params.get("structured_outputs")
        if isinstance(structured, dict):
            kind = self._vllm.sampling_params.StructuredOutputsParams
            params["structured_outputs"] = kind(**structured)
        try:
            return self._vllm.SamplingParams(n=count, detokenize=False, **params)
        except TypeError as error:  # an unknown name
            raise ValueError(f"generation_kwargs: {error}") from error


def _tensor_parallel_group(context: EngineContext) -> Any | None:
    size, processes = context.args.vllm_tensor_parallel_size, context.accelerator.num_processes
    if processes % size:
        raise ValueError(
            "vllm_tensor_parallel_size: expected a divisor of the number of processes, "
            f"{processes}, got {size}"
        )
    if size == 1:
        return None
    return dist.new_subgroups(size)[0]


class VLLMServer(RolloutEngine):
    """Samples with a server that was started with ``grpo-train serve``.

    Each process requests the completions that it samples ahead; the first process requests all
    others, and sends the weights.

    Raises:
        ConnectionError: no server answers in time.
    """

    updates_in_flight = True

    def __init__(self, context: EngineContext) -> None:
        args = context.args
        self._accelerator = context.accelerator
        self._in_flight = args.max_staleness is not None
        self.client: VLLMClient | None = None
        if context.accelerator.is_main_process or args.generation_batches_ahead:
            self.client = VLLMClient(
                args.vllm_server_base_url,
                args.vllm_server_host,
                args.vllm_server_port,
                args.vllm_group_port,
                args.vllm_server_timeout,
                request_timeout=args.vllm_request_timeout,
                vocab_size=context.vocab_size,
            )
        sharded = context.placement.sharded
        self._on_first = partial(on_first_process, context.accelerator, sharded)
        self.takes_adapter, self.has_base, drafts = self._on_first(lambda _: self._connect(context))
        self._speculation = Speculation(self._counts if drafts else None)
        atexit.register(self.close)

    def generate(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Completions:
        """Complete this process's prompts; those of all processes are sent together."""
        params = vllm_params(sampling)
        parts = gather_object([requests_of(prompt_ids, images)])
        requests, mine = joined(parts, self._accelerator.process_index)

        def ask(_: WeightSource) -> list[Completions]:
            # almost always one part: every prompt has the same number of completions
            work = [
                self._complete([one for one, _ in part], params | {"n": n})
                for n, part in groupby(requests, key=lambda pair: pair[1])
            ]
            return self._here.server.wait(together(work))

        answers = self._on_first(ask)
        self._speculation.log()
        return Completions.of([row for answer in answers for row in answer.rows()][mine])

    async def complete_one(
        self, prompt_ids: TokenIds, sampling: Sampling, images: ImageInputs | None = None
    ) -> Completion:
        """Request one completion, for this process."""
        params = vllm_params(sampling) | {"n": 1}
        answer = await self._complete(requests_of([prompt_ids], [images]), params, self._in_flight)
        [completion] = answer.rows()
        return completion

    def update_weights(self, weights: WeightSource, adapter: bool = False) -> None:
        def send(source: WeightSource) -> Sent:
            self._here.update_weights(source, adapter)
            return self._here.sent

        sent = self._on_first(send, weights)
        if self.client is not None:
            self.client.sent = sent
        self._speculation.log()  # for completions sampled ahead with the previous weights

    def close(self) -> None:
        atexit.unregister(self.close)
        if self.client is not None:
            self.client.close()

    @property
    def _here(self) -> VLLMClient:
        assert self.client is not None  # on the first process, or with completions ahead
        return self.client

    def _counts(self) -> Counts:
        """Return the server's counts of drafted tokens."""
        return counts_of_server(self._on_first(lambda _: self._here.server.ask("GET", "/metrics")))

    def _connect(self, context: EngineContext) -> tuple[bool, bool, bool]:
        """Return whether the server applies the policy's adapter, whether it has the base itself,
        and whether it has a drafter."""
        args = context.args
        folder = args.vllm_weights_folder or Path(str(args.output_dir)) / "vllm_weights"
        device = context.accelerator.device
        self._here.init_communicator(device, args.vllm_weight_transfer, folder)
        server = self._here.get_server_info()
        if args.use_rollout_routing_replay:
            check_reports_experts(server)
        takes_adapter = adapter_rank(context, partial(server_ranks, server)) > 0
        has_base = loads_base(
            context,
            takes_adapter=takes_adapter,
            quantization=server["model_config"]["quantization"],
            setting="the server's --quantization",
        )
        drafter = server["speculative_config"]
        if drafter is not None:
            check_server_speculation(context, server)
        return takes_adapter, has_base, drafter is not None

    async def _complete(
        self, requests: list[Request], params: dict[str, Any], in_flight: bool = False
    ) -> Completions:
        """Return completions of each prompt."""
        ids = [request.short_ids for request in requests]
        images = [list(one.images) for one in requests]
        as_read, answer = await self._here.complete(ids, images, params, in_flight)
        for request, read in zip(requests, as_read, strict=True):
            request.check(read)
        return answer
