"""A vLLM server as an engine: the first process talks to it, for all."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from grpo_trainer.common import start
from grpo_trainer.engines import (
    BackgroundEngine,
    Completions,
    EngineContext,
    Images,
    Pending,
    Sampling,
    TokenIds,
    WeightSource,
    vllm_params,
)
from grpo_trainer.vllm.client import VLLMClient
from grpo_trainer.vllm.http import ServerError
from grpo_trainer.vllm.requests import Request, requests_of, runs

_WALK = "walk"  # the first process tells the others: gather the weights with me


def on_first_process(
    accelerator: Accelerator,
    gathers: bool,
    work: Callable[[WeightSource], Any],
    weights: WeightSource = lambda: iter(()),
) -> Any:
    """Return what ``work`` returns on the first process, on all of them; raise what it raises on
    all of them, too.

    It may read the ``weights`` as often as it likes. ``gathers``: all processes read them together.
    """
    if accelerator.num_processes == 1:
        return work(weights)
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        walk: Iterator[tuple[str, Tensor]] = iter(())

        def lead() -> Iterator[tuple[str, Tensor]]:
            nonlocal walk
            deque(walk, maxlen=0)  # where it was broken off: the others go to its end
            broadcast_object_list([_WALK, None])
            walk = weights()
            return walk

        try:
            outcome[0] = work(lead if gathers else weights)
        except (ServerError, ValueError) as error:
            outcome[1] = error
        deque(walk, maxlen=0)
        broadcast_object_list(outcome)
    else:
        broadcast_object_list(outcome)
        while outcome[0] == _WALK:
            deque(weights(), maxlen=0)
            broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


class VLLMServer(BackgroundEngine):
    """Samples with a server that was started with ``grpo-train serve``.

    Raises:
        ConnectionError: no server answers in time.
    """

    def __init__(self, context: EngineContext) -> None:
        self._accelerator = context.accelerator
        self.client: VLLMClient | None = None
        self._running: Future[list[Any]] | None = None  # on the first process
        self._count = 0  # prompts of this process in it
        sharded = context.placement.sharded
        self._on_first = partial(on_first_process, context.accelerator, sharded)
        self._on_first(lambda _: self._connect(context))
        atexit.register(self.close)

    def generate(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Completions:
        """Complete this process's prompts; those of all processes are sent together."""
        try:
            return self.start(prompt_ids, sampling, images).result()
        finally:
            self.cancel()  # where it was interrupted

    def start(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Pending:
        """Have the first process ask; only ``result`` talks to the others."""
        prompts = gather_object(requests_of(prompt_ids, images))
        if self._accelerator.is_main_process:
            # almost always one part: every prompt has as many completions
            parts = groupby(runs(prompts), key=lambda run: run[1])
            self._running = start(
                [self._complete([one for one, _ in part], n, sampling) for n, part in parts]
            )
        self._count = len(prompt_ids)
        return self  # nothing else is asked of it meanwhile

    def result(self) -> Completions:
        """Return this process's share of what the first one has."""
        answers = self._on_first(lambda _: self._running.result())  # type: ignore[union-attr]
        self._running = None
        # they differ where some conversations have ended and others have not
        first = sum(gather_object([self._count])[: self._accelerator.process_index])
        mine = slice(first, first + self._count)
        token_ids, logprobs, mask = (
            [row for answer in answers for row in answer.get(name, ())][mine]
            for name in ("completion_ids", "logprobs", "sampling_mask")
        )
        return Completions(token_ids, logprobs, mask or None)

    def update_weights(self, weights: WeightSource) -> None:
        self._on_first(lambda source: self.client.update_weights(source), weights)  # type: ignore[union-attr]

    def close(self) -> None:
        atexit.unregister(self.close)
        self.cancel()
        if self.client is not None:
            self.client.close()

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()
        self._running = None

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

    async def _complete(
        self, prompts: list[Request], n: int, sampling: Sampling
    ) -> dict[str, list[Any]]:
        """Return ``n`` completions of each prompt, as the client does."""
        assert self.client is not None  # this is the first process
        params = vllm_params(sampling) | {"n": n}
        # what not every server knows
        names = ("stop_token_ids", "ignore_eos", *sampling.engine_options)
        others = {name: params.pop(name) for name in names}
        if sampling.structured_outputs_regex is not None:
            params["structured_outputs"] = {"regex": sampling.structured_outputs_regex}
        ids = [prompt.short_ids if prompt.images else prompt.ids for prompt in prompts]
        images = [list(prompt.images) for prompt in prompts]
        answer = await self.client.complete(ids, images, params, others)
        for prompt, as_read in zip(prompts, answer["prompt_ids"], strict=True):
            prompt.check(as_read)
        return answer
