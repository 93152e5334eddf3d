"""Rollouts by a vLLM server: the first process talks to it, for all."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from grpo_trainer.common import in_thread
from grpo_trainer.engines import (
    BackgroundEngine,
    Completions,
    EngineContext,
    Images,
    Pending,
    Request,
    Sampling,
    TokenIds,
    WeightsLostError,
    WeightSource,
    requests_of,
    runs,
    vllm_params,
)
from grpo_trainer.vllm.client import VLLMClient
from grpo_trainer.vllm.http import ServerError

_WALK = "walk"  # the first process tells the others: gather the weights with me


class Together:
    """Runs work on the first process, while the others wait for its outcome.

    Args:
        accelerator: knows the processes.
        gathers: whether weights are read by all processes together.
    """

    def __init__(self, accelerator: Accelerator, gathers: bool) -> None:
        self._accelerator = accelerator
        self._gathers = gathers and accelerator.num_processes > 1
        self._weights: WeightSource | None = None
        self._walk: Iterator[tuple[str, Tensor]] = iter(())  # of the first process
        self._thread = 0  # in which the others wait

    def shared(self, weights: WeightSource) -> WeightSource:
        """Return ``weights`` for the first process alone, as often as it likes, within
        :meth:`on_main`."""
        self._weights = weights
        return self._lead if self._gathers else weights

    def on_main(self, work: Callable[[], Any], told: tuple[type[Exception], ...]) -> Any:
        """Return what ``work`` returns on the first process, on all of them; raise what it raises
        on all of them, too, if it is one of ``told``."""
        if self._accelerator.num_processes == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self._accelerator.is_main_process:
            self._thread = threading.get_ident()
            try:
                outcome[0] = work()
            except told as error:
                outcome[1] = error
            self._end_walk()
            broadcast_object_list(outcome)
        else:
            outcome = self._follow()
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _lead(self) -> Iterator[tuple[str, Tensor]]:
        if threading.get_ident() != self._thread:
            raise WeightsLostError("a sharded policy cannot be sent while it trains")
        self._end_walk()
        broadcast_object_list([_WALK, None])
        assert self._weights is not None  # this was made from them
        self._walk = self._weights()
        return self._walk

    def _end_walk(self) -> None:
        """Go to the end of a walk that was broken off: the others do."""
        for _ in self._walk:
            pass

    def _follow(self) -> list[Any]:
        while True:
            outcome = [None, None]
            broadcast_object_list(outcome)
            if outcome[0] != _WALK:
                return outcome
            assert self._weights is not None  # every process was given them
            for _ in self._weights():
                pass


class VLLMServer(BackgroundEngine):
    """Samples with a server that was started with ``grpo-train serve``.

    Raises:
        ConnectionError: no server answers in time.
    """

    def __init__(self, context: EngineContext) -> None:
        self._accelerator = context.accelerator
        self.client: VLLMClient | None = None
        self._task: Future[Completions] | None = None  # of the first process, by `start`
        self._count = 0  # prompts of this process in it
        self._together = Together(context.accelerator, context.placement.sharded)
        self._on_main(lambda: self._connect(context))
        atexit.register(self.close)

    def generate(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Completions:
        """Complete this process's prompts; those of all processes are sent together."""
        prompts = gather_object(requests_of(prompt_ids, images))
        return self._mine(lambda: self._generate(prompts, sampling), len(prompt_ids))

    def start(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Pending:
        """Generate on a thread of the first process; only ``result`` talks to the others."""
        prompts = gather_object(requests_of(prompt_ids, images))
        if self._accelerator.is_main_process:
            work = partial(self._generate, prompts, sampling, in_background=True)
            self._task = in_thread(work, "rollouts")
        self._count = len(prompt_ids)
        return self  # nothing else is asked of it meanwhile

    def result(self) -> Completions:
        completions = self._mine(lambda: self._task.result(), self._count)  # type: ignore[union-attr]
        self._task = None
        return completions

    def update_weights(self, weights: WeightSource) -> None:
        source = self._together.shared(weights)
        self._on_main(lambda: self.client.update_weights(source))  # type: ignore[union-attr]

    def close(self) -> None:
        atexit.unregister(self.close)
        self.cancel()
        if self.client is not None:
            self.client.close()

    def cancel(self) -> None:
        if self._task is not None and self.client is not None:
            with self.client.server.interrupted():
                wait([self._task])
        self._task = None

    def _mine(self, work: Callable[[], Completions], count: int) -> Completions:
        """Return this process's share of what ``work`` returns on the first one."""
        everyone = self._on_main(work)
        # they differ where some conversations have ended and others have not
        first = sum(gather_object([count])[: self._accelerator.process_index])
        return Completions(*(c and c[first : first + count] for c in everyone))

    def _connect(self, context: EngineContext) -> None:
        args = context.args
        self.client = VLLMClient(
            args.vllm_server_base_url,
            args.vllm_server_host,
            args.vllm_server_port,
            args.vllm_group_port,
            args.vllm_server_timeout,
            request_timeout=args.vllm_request_timeout,
            vocab_size=context.policy().config.get_text_config().vocab_size,
        )
        folder = args.vllm_weights_folder or Path(str(args.output_dir)) / "vllm_weights"
        device = context.accelerator.device
        self.client.init_communicator(device, args.vllm_weight_transfer, folder)

    def _generate(
        self, prompts: list[Request], sampling: Sampling, in_background: bool = False
    ) -> Completions:
        assert self.client is not None  # this is the first process
        params = vllm_params(sampling)
        # what the client has no arguments for
        names = ("stop_token_ids", "ignore_eos", *sampling.engine_options)
        others = {name: params.pop(name) for name in names}
        token_ids, logprobs, mask = [], [], []
        # almost always one request: every prompt has as many completions
        for n, part in groupby(runs(prompts), key=lambda run: run[1]):
            requests = [request for request, _ in part]
            images = [list(request.images) for request in requests]
            answer = self.client.generate(
                [request.short_ids if request.images else request.ids for request in requests],
                images if any(images) else None,
                n=n,
                structured_outputs_regex=sampling.structured_outputs_regex,
                generation_kwargs=others,
                in_background=in_background,
                **params,
            )
            for request, ids in zip(requests, answer["prompt_ids"], strict=True):
                request.check(ids)
            token_ids += answer["completion_ids"]
            logprobs += answer["logprobs"]
            mask += answer.get("sampling_mask", ())
        return Completions(token_ids, logprobs, mask if sampling.sampling_mask_size else None)

    def _on_main(self, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns or raises on the first process, on all of them."""
        return self._together.on_main(work, (ServerError, WeightsLostError, ValueError))
