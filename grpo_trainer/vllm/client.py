"""VLLMClient: prompts in, token ids and log-probabilities out, by the weights last sent."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tenacity import stop_after_delay

from grpo_trainer.common import together
from grpo_trainer.config import check_url
from grpo_trainer.engines import Completions, TokenIds, WeightSource
from grpo_trainer.vllm.http import JsonServer, RetryableError, ServerError
from grpo_trainer.vllm.requests import (
    checked_images,
    checked_prompts,
    completions_of,
    image_url,
)
from grpo_trainer.vllm.transfer import FileTransfer

if TYPE_CHECKING:
    from grpo_trainer.vllm.nccl import NCCLTransfer

logger = logging.getLogger(__name__)

_COMPLETIONS = 512  # requests for them that run at the same time; others wait
_TEXT_PATH, _GENERATE_PATH = "/v1/completions", "/inference/v1/generate"
# fields of requests that every server knows
_KNOWN = {
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"),
    *("logprobs", "logit_bias", "structured_outputs"),
}


class Sent(NamedTuple):
    """The weights that a server was sent last."""

    run: str = ""  # a name that no other client gives
    updates: int = 0
    adapter: str = ""  # the model that is the weights with an adapter; empty: there is none

    @property
    def version(self) -> str:
        """What the server calls them."""
        return f"{self.run}-{self.updates}"

    def update_of(self, version: str) -> int:
        """Return the number of the update that a version came with.

        Raises:
            ValueError: nobody of this run sent it.
        """
        run, _, number = version.rpartition("-")
        if run != self.run:
            raise ValueError(f"weights that this run did not send, version {version!r}")
        return int(number)


class VLLMClient:
    """Talks to a vLLM server that was started with ``grpo-train serve``.

    Args:
        base_url: of the server, such as ``http://127.0.0.1:8000``; replaces the next two.
        host, server_port: of the server. The host 0.0.0.0 is this machine.
        group_port: port of this machine for weights that go from GPU to GPU.
        connection_timeout: seconds to wait for a server that is not up yet.
        request_timeout: seconds that one request may take.
        api_key: of the server. Default: the environment variable VLLM_API_KEY.
        vocab_size: of the model: a token id from the server is below it. None: it is not checked.

    Raises:
        ConnectionError: no server answers in time.
        ServerError: one answers that it cannot.
        ValueError: the URL is none, or has a password beside an API key.
    """

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        server_port: int = 8000,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        *,
        request_timeout: float = 1800.0,
        api_key: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        # what a server binds to reach it from everywhere is no host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        host = f"[{host}]" if ":" in host else host
        url = f"http://{host}:{server_port}" if base_url is None else base_url
        check_url("host" if base_url is None else "base_url", url)
        self.server = JsonServer(url, api_key or os.environ.get("VLLM_API_KEY"))
        self.group_port = group_port
        self.request_timeout = request_timeout
        self._vocab_size = vocab_size
        self._schemas: dict[str, Any] | None = None  # of the server's requests
        self._nccl: NCCLTransfer | None = None  # for weights; adapters go by file
        self._files: FileTransfer | None = None  # of adapters, and without NCCL of weights
        self.sent = Sent()  # by this client, or another one of the same run
        # other requests need not wait: a server that is paused ends no completion
        self._room = asyncio.Semaphore(_COMPLETIONS)
        self.server.ask("GET", "/health", stop=stop_after_delay(connection_timeout))

    def get_world_size(self) -> int:
        """Return processes that hold the server's model."""
        return int(self.server.field(self.server.ask("GET", "/get_world_size"), "world_size"))

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's configuration."""
        answer = self.server.ask("GET", "/server_info?config_format=json")
        return self.server.field(answer, "vllm_config")

    def generate(
        self,
        prompts: Sequence[str] | Sequence[TokenIds],
        images: Sequence[Any] | None = None,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 16,
        *,
        repetition_penalty: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        logprobs: int | None = 0,
        **generation_kwargs: Any,
    ) -> dict[str, Any]:
        """Return ``n`` completions of each prompt, those of a prompt in a row.

        Args:
            prompts: texts, which the server encodes as the trainer does, or token ids.
            images: of each prompt: None, an image or a list of them, which are PIL images or URLs.
                Prompts have one placeholder token per image.
            temperature, max_tokens, repetition_penalty, top_p, top_k, min_p: as in vLLM.
            logprobs: 0: of the tokens that were drawn; None: none; above: also find out which of
                so many of the likeliest ids the filters left.
            generation_kwargs: more fields of vLLM's request, such as ``seed`` or
                ``structured_outputs``.

        Returns:
            ``prompt_ids`` (one list per prompt, with as many tokens per image as the model has),
            ``completion_ids`` (``n`` lists per prompt) and ``logprobs`` (one number per token of
            these, or None); with ``logprobs`` above 0 also ``sampling_mask`` (a list of ids per
            token); from a server with ``--enable-return-routed-experts`` also ``routed_experts`` (a
            tensor per completion, (tokens, layers, experts of a token), of all tokens of prompt and
            completion but the last).

        Raises:
            ServerError: the server fails, refuses, answers something else, or was restarted since
                it was sent weights, and has lost them.
            ValueError: an argument is wrong.
        """
        prompts = checked_prompts(prompts)
        images_of = checked_images(images, len(prompts))
        if logprobs is not None and logprobs < 0:
            raise ValueError(f"logprobs: expected a number >= 0 or None, got {logprobs!r}")
        fields: dict[str, Any] = {
            "n": n,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            **generation_kwargs,
        }
        ids, answer = self.server.wait(self.complete(prompts, images_of, fields))
        more: dict[str, Any] = {"sampling_mask": answer.sampling_mask} if logprobs else {}
        if answer.routed_experts is not None:
            more["routed_experts"] = answer.routed_experts
        return {
            "prompt_ids": ids,
            "completion_ids": answer.token_ids,
            "logprobs": answer.logprobs,
            **more,
        }

    async def complete(
        self,
        prompts: list[Any],
        images_of: list[list[Any]],
        fields: dict[str, Any],
        in_flight: bool = False,
    ) -> tuple[list[TokenIds], Completions]:
        """Return the ids of the prompts and their completions, by ``fields`` of the request.

        With ``in_flight`` weights may come meanwhile, and completions have ``versions``.
        """
        if self.sent.run and not in_flight:
            answer = await self.server.answer("GET", "/weight_info")
            if self.server.field(answer, "weight_version") != self.sent.version:
                raise ServerError(
                    f"{self.server.url}: expected the weights that were sent last, got others: the "
                    "server was restarted, or somebody else sends it weights; a run goes on with "
                    "resume_from_checkpoint"
                )
        await self._check_known(fields)
        path, bodies = await self._requests(prompts, images_of, fields, in_flight)
        model = {"model": self.sent.adapter} if self.sent.adapter else {}
        answers = await together([self._completed(path, model | one) for one in bodies])
        ids = [None if isinstance(prompt, str) else prompt for prompt in prompts]
        sent = [ids] if path == _TEXT_PATH else [[None]] * len(bodies)
        try:
            update_of = self.sent.update_of if in_flight else None
            return completions_of(sent, answers, fields, self._vocab_size, update_of)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{self.server.url}{path}: expected {fields['n']} completions of "
                f"each of {len(prompts)} prompts: {error!r}; got {str(answers)[:500]}"
            ) from error

    def init_communicator(
        self,
        device: torch.device | str | int = 0,
        way: str = "auto",
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prepare for sending weights.

        Args:
            device: where they are.
            way: ``nccl``: from GPU to GPU, by vLLM's own transfer; ``file``: through a folder that
                the server sees, too; ``auto``: the first if device and server can.
            folder: for files. Default: one among the system's temporary files.

        Raises:
            ServerError: the server fails or refuses.
            ImportError: ``nccl`` without vLLM installed here.
        """
        self.close_communicator()
        if way == "auto":
            on_gpu = torch.cuda.is_available() and torch.device(device).type == "cuda"
            prepared = on_gpu and self.get_server_info().get("weight_transfer_config") is not None
            way = "nccl" if prepared else "file"
            logger.info("weights reach %s by %s", self.server.url, way)
        if way == "nccl":
            from grpo_trainer.vllm.nccl import NCCLTransfer  # imports vllm

            workers = self.get_world_size()
            self._nccl = NCCLTransfer(workers, self.group_port, self.request_timeout)
        place = Path(folder or tempfile.gettempdir())
        self._files = FileTransfer(place, self.request_timeout)

    def update_weights(self, weights: WeightSource, adapter: bool = False) -> None:
        """Replace the server's weights, or its LoRA adapter, and clear its caches.

        Args:
            weights: names of a checkpoint and their tensors, the same names in every update.
            adapter: ``weights`` are the factors of a LoRA adapter on the weights that were sent
                before. They have the names of PEFT's files, and B is multiplied by the scaling.

        Raises:
            ServerError: the server fails or refuses, or has lost the adapter before.
            ValueError: :meth:`init_communicator` was not called.
        """
        if self._files is None:
            raise ValueError(
                "init_communicator: expected to be called before weights are sent, got none"
            )
        old = self.sent
        sent = Sent(old.run or uuid.uuid4().hex, old.updates + 1)
        if adapter:  # under a new name, which no key and value in the cache belongs to
            sent = sent._replace(adapter=sent.version)
        self.sent = old._replace(updates=sent.updates)  # it counts even if it fails
        self.server.ask("POST", "/pause?mode=keep")
        if old.adapter:
            self.server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": old.adapter})
        self.sent = sent
        if adapter:
            self._files.send(self.server, weights, sent.adapter)
        else:
            (self._nccl or self._files).send(self.server, weights)
        self.server.wait(self.server.retrying()(self._reset))
        # only now has the server all of them
        self.server.ask("POST", "/update_weight_version", {"new_version": sent.version})
        self.server.ask("POST", "/resume")

    def close_communicator(self) -> None:
        """End the transfer of weights. The server keeps those that it has."""
        for transfer in (self._nccl, self._files):
            if transfer is not None:
                transfer.close()
        self._nccl, self._files = None, None
        self.sent = Sent()

    def prompt_logprobs(self, sequences: Sequence[TokenIds]) -> list[list[float]]:
        """Return the log-probability of each token but the first, given those before it.

        At temperature 1, by whatever model the server has: it need not be the policy's.

        Raises:
            ServerError: the server fails, refuses or answers something else.
        """
        body = {"prompt": [list(ids) for ids in sequences], "max_tokens": 1, "prompt_logprobs": 0}
        answer = self.server.ask("POST", _TEXT_PATH, body, timeout=self.request_timeout)
        choices = sorted(self.server.field(answer, "choices"), key=lambda choice: choice["index"])
        try:
            return [
                [found[str(id)]["logprob"] for id, found in zip(ids[1:], said[1:], strict=True)]
                for ids, said in zip(
                    sequences, [choice["prompt_logprobs"] for choice in choices], strict=True
                )
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.server.url}/v1/completions: expected the log-probabilities of "
                f"{len(sequences)} prompts: {error!r}; got {str(answer)[:500]}"
            ) from error

    def close(self) -> None:
        """End the connection. The server goes on."""
        self.close_communicator()
        self.server.close()

    async def _completed(self, path: str, body: dict[str, Any]) -> Any:
        async with self._room:
            return await self.server.answer("POST", path, body, self.request_timeout)

    async def _check_known(self, fields: dict[str, Any]) -> None:
        """Raise ValueError if the server would ignore one of ``fields``."""
        extra = fields.keys() - _KNOWN
        unknown = sorted(extra - await self._fields("CompletionRequest")) if extra else []
        if unknown:
            raise ValueError(
                f"generation_kwargs: {self.server.url} does not know {', '.join(unknown)}"
            )

    async def _requests(
        self,
        prompts: list[Any],
        images_of: list[list[Any]],
        fields: dict[str, Any],
        in_flight: bool,
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return a path, and the bodies to send there: one, or one per prompt with images or where
        the answer has to say which weights drew a token."""
        if not any(images_of) and not in_flight:
            body = {
                "prompt": prompts,
                **fields,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "add_special_tokens": True,  # to texts
            }
            return _TEXT_PATH, [body]
        if "content_parts" not in await self._fields("GenerateRequest"):
            raise ServerError(
                f"{self.server.url}: expected a server that takes images next to token ids and "
                "says which weights drew a token: vLLM 0.32 or later, as `grpo-train serve` "
                "starts it"
            )
        return _GENERATE_PATH, [
            {
                "token_ids": await self._encoded(prompt),
                "content_parts": [{"type": "image_url", "url": image_url(one)} for one in images],
                "sampling_params": fields,
                "return_token_ids": True,
            }
            for prompt, images in zip(prompts, images_of, strict=True)
        ]

    async def _encoded(self, prompt: str | TokenIds) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        body = {"prompt": prompt, "add_special_tokens": True}
        return self.server.field(await self.server.answer("POST", "/tokenize", body), "tokens")

    async def _fields(self, request: str) -> set[str]:
        if self._schemas is None:
            answer = await self.server.answer("GET", "/openapi.json")
            self._schemas = self.server.field(answer, "components")["schemas"]
        return set(self._schemas.get(request, {}).get("properties", ()))

    async def _reset(self) -> None:
        await self.server.answer("POST", "/reset_encoder_cache")
        # keys and values of requests that go on are computed again, by the new weights
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = await self.server.answer("POST", path)
        if not self.server.field(answer, "success"):
            raise RetryableError(
                f"{self.server.url}/reset_prefix_cache: failed, its cache is in use"
            )
