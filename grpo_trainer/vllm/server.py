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
from grpo_trainer.vllm.requests import Request, joined, requests_of

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
        self.client: VLLMClient | None = None  # on the first process
        self._running: Future[list[Any]] | None = None  # there, too
        self._mine = slice(0)  # of its completions, those of this process
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
        params = vllm_params(sampling)
        parts = gather_object([requests_of(prompt_ids, images)])
        requests, self._mine = joined(parts, self._accelerator.process_index)
        if self.client is not None:
            # almost always one part: every prompt has as many completions
            self._running = start(
                [
                    self._complete(self.client, [one for one, _ in part], params | {"n": n})
                    for n, part in groupby(requests, key=lambda pair: pair[1])
                ]
            )
        return self  # nothing else is asked of it meanwhile

    def result(self) -> Completions:
        """Return this process's share of what the first one has."""
        answers = self._on_first(lambda _: self._running.result())  # type: ignore[union-attr]
        self._running = None
        token_ids, logprobs, mask = (
            [row for answer in answers for row in answer.get(name, ())][self._mine]
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
        self, client: VLLMClient, requests: list[Request], params: dict[str, Any]
    ) -> dict[str, list[Any]]:
        """Return completions of each prompt, as the client does."""
        ids = [request.short_ids for request in requests]
        answer = await client.complete(ids, [list(one.images) for one in requests], params)
        for request, as_read in zip(requests, answer["prompt_ids"], strict=True):
            request.check(as_read)
        return answer
