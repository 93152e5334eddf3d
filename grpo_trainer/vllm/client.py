"""VLLMClient: sends prompts, and returns token ids and log-probabilities from the latest
weights."""

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

_COMPLETIONS = 512  # completion requests at the same time; others wait
_TEXT_PATH, _GENERATE_PATH = "/v1/completions", "/inference/v1/generate"
# fields of requests that every server knows
_KNOWN = {
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"),
    *("logprobs", "logit_bias", "structured_outputs"),
}


class Sent(NamedTuple):
    """The weights last sent to a server."""

    run: str = ""  # a name that is unique to this client
    updates: int = 0
    adapter: str = ""  # the name of the model with an adapter; empty: none

    @property
    def version(self) -> str:
        """Their name on the server."""
        return f"{self.run}-{self.updates}"

    def update_of(self, version: str) -> int:
        """Return the number of the update of a version.

        Raises:
            ValueError: this run did not send it.
        """
        run, _, number = version.rpartition("-")
        if run != self.run:
            raise ValueError(f"weights that this run did not send, version {version!r}")
        return int(number)


class VLLMClient:
    """Client of a vLLM server that was started with ``grpo-train serve``.

    Args:
        base_url: of the server, such as ``http://127.0.0.1:8000``; replaces the next two.
        host, server_port: of the server. The host 0.0.0.0 means this machine.
        group_port: port on this machine for sending weights from GPU to GPU.
        connection_timeout: seconds to wait until the server is up.
        request_timeout: time limit for one request, in seconds.
        api_key: of the server. Default: the environment variable VLLM_API_KEY.
        vocab_size: of the model: the server's token ids must be below it. None: not checked.

    Raises:
        ConnectionError: no server answers in time.
        ServerError: the server reports an error.
        ValueError: the URL is invalid, or has a password in addition to an API key.
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
        # the address that a server binds to for all interfaces is not a host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        host = f"[{host}]" if ":" in host else host
        url = f"http://{host}:{server_port}" if base_url is None else base_url
        check_url("host" if base_url is None else "base_url", url)
        self.server = JsonServer(url, api_key or os.environ.get("VLLM_API_KEY"))
        self.group_port = group_port
        self.request_timeout = request_timeout
        self._vocab_size = vocab_size
        self._schemas: dict[str, Any] | None = None  # of the server's requests
        self._nccl: NCCLTransfer | None = None  # for weights; adapters are sent as files
        self._files: FileTransfer | None = None  # for adapters, and for weights without NCCL
        self.sent = Sent()  # by this client, or by another client of the same run
        # other requests need not wait: a paused server does not end any completion
        self._room = asyncio.Semaphore(_COMPLETIONS)
        self.server.ask("GET", "/health", stop=stop_after_delay(connection_timeout))

    def get_world_size(self) -> int:
        """Return the number of processes that hold the server's model."""
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
        """Return ``n`` completions per prompt; the completions of a prompt are consecutive.

        Args:
            prompts: texts, which the server encodes as the trainer does, or token ids.
            images: for each prompt None, an image or a list of images (PIL images or URLs).
                Prompts have one placeholder token per image.
            temperature, max_tokens, repetition_penalty, top_p, top_k, min_p: as in vLLM.
            logprobs: 0: of the sampled tokens; None: none; above 0: also report which of this many
                likeliest ids the filters kept.
            generation_kwargs: more fields of vLLM's request, such as ``seed`` or
                ``structured_outputs``.

        Returns:
            ``prompt_ids`` (one list per prompt, with the model's number of tokens per image),
            ``completion_ids`` (``n`` lists per prompt) and ``logprobs`` (one number per token of
            these, or None); with ``logprobs`` above 0 also ``sampling_mask`` (a list of ids per
            token); from a server with ``--enable-return-routed-experts`` also ``routed_experts`` (a
            tensor per completion, (tokens, layers, experts per token), for all tokens of prompt and
            completion except the last).

        Raises:
            ServerError: the server fails, rejects the request, returns something unexpected, or was
                restarted and has lost the weights.
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
        """Return the ids of the prompts and their completions, with ``fields`` in the request.

        With ``in_flight``, weights may arrive meanwhile, and completions have ``versions``.
        """
        if self.sent.run and not in_flight:
            answer = await self.server.answer("GET", "/weight_info")
            if self.server.field(answer, "weight_version") != self.sent.version:
                raise ServerError(
                    f"{self.server.url}: expected the weights that were sent last, got others: the "
                    "server was restarted, or another run sends it weights; continue the run with "
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
                f"{self.server.url}{path}: expected {fields['n']} completions for "
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
            device: has the weights.
            way: ``nccl``: from GPU to GPU, with vLLM's own transfer; ``file``: through a folder
                that the server also sees; ``auto``: NCCL if device and server support it.
            folder: for files. Default: a temporary folder.

        Raises:
            ServerError: the server fails or rejects the request.
            ImportError: ``nccl`` without vLLM installed here.
        """
        self.close_communicator()
        if way == "auto":
            on_gpu = torch.cuda.is_available() and torch.device(device).type == "cuda"
            prepared = on_gpu and self.get_server_info().get("weight_transfer_config") is not None
            way = "nccl" if prepared else "file"
            logger.info("sending weights to %s by %s", self.server.url, way)
        if way == "nccl":
            from grpo_trainer.vllm.nccl import NCCLTransfer  # imports vllm

            workers = self.get_world_size()
            self._nccl = NCCLTransfer(workers, self.group_port, self.request_timeout)
        place = Path(folder or tempfile.gettempdir())
        self._files = FileTransfer(place, self.request_timeout)

    def update_weights(self, weights: WeightSource, adapter: bool = False) -> None:
        """Replace the server's weights, or its LoRA adapter, and clear its caches.

        Args:
            weights: names and tensors of a checkpoint, with the same names in every update.
            adapter: ``weights`` are the factors of a LoRA adapter on the weights that were sent
                before, under the names of PEFT's files, and with B multiplied by the scaling.

            Raises:
                ServerError: the server fails or rejects the request, or has lost the adapter.
            ValueError: :meth:`init_communicator` was not called.
        """
        if self._files is None:
            raise ValueError("init_communicator: expected a call before weights are sent, got none")
        old = self.sent
        sent = Sent(old.run or uuid.uuid4().hex, old.updates + 1)
        if adapter:  # under a new name, for which nothing is cached
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
        # only now the server has all of them
        self.server.ask("POST", "/update_weight_version", {"new_version": sent.version})
        self.server.ask("POST", "/resume")

    def close_communicator(self) -> None:
        """End the transfer of weights. The server keeps its current weights."""
        for transfer in (self._nccl, self._files):
            if transfer is not None:
                transfer.close()
        self._nccl, self._files = None, None
        self.sent = Sent()

    def prompt_logprobs(self, sequences: Sequence[TokenIds]) -> list[list[float]]:
        """Return the log-probability of each token except the first, given the tokens before it.

        At temperature 1, from the server's model, which need not be the policy.

        Raises:
            ServerError: the server fails, rejects the request or returns something unexpected.
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
        """Close the connection. The server continues to run."""
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
        """Return a path, and the bodies to send there: one, or one per prompt if there are images
        or the answer must report which weights sampled a token."""
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
                f"{self.server.url}: expected a server that accepts images together with token ids "
                "and reports which weights sampled a token: vLLM 0.32 or later, started with "
                "`grpo-train serve`"
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
        # keys and values of running requests are computed again with the new weights
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = await self.server.answer("POST", path)
        if not self.server.field(answer, "success"):
            raise RetryableError(
                f"{self.server.url}/reset_prefix_cache: failed, the cache is in use"
            )
