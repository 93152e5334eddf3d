"""VLLMClient: token ids in, token ids and log-probabilities out, by the weights last sent."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo_trainer.config import check_url
from grpo_trainer.data import shortened
from grpo_trainer.rollout.base import TokenIds, WeightsLostError, WeightSource
from grpo_trainer.rollout.http import JsonServer, RetryableError, ServerError
from grpo_trainer.rollout.vllm_answer import completions_of

logger = logging.getLogger(__name__)

_ADVICE = "Is it a vLLM server that takes weights, as `grpo-train serve` starts it?"


class WeightTransfer(Protocol):
    """One way for weights to reach the server's workers."""

    keeps_a_copy: bool  # what was sent can be sent again, also when the policy has moved on

    def send(self, server: JsonServer, weights: WeightSource, version: str) -> None:
        """Replace the server's weights. Repeating it, with a server that was restarted, works."""
        ...

    def close(self) -> None: ...


class VLLMClient:
    """Talks to a vLLM server that was started with ``grpo-train serve``.

    Args:
        base_url: of the server, such as ``http://127.0.0.1:8000``; replaces the next two.
        host, server_port: of the server.
        group_port: port of this machine for weights that go from GPU to GPU.
        connection_timeout: seconds to wait for a server that is not up yet, or is gone.
        request_timeout: seconds that one request may take.
        api_key: of the server. Default: the environment variable VLLM_API_KEY.
        transfer: how weights reach the server; None: this client sends none.
        vocab_size: of the model: a token id from the server is below it. None: it is not checked.

    Raises:
        ServerError: no server answers in time.
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
        transfer: Callable[[VLLMClient], WeightTransfer] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if base_url is not None:
            check_url("base_url", base_url)
        url = base_url or f"http://{f'[{host}]' if ':' in host else host}:{server_port}"
        key = api_key or os.environ.get("VLLM_API_KEY")
        self.server = JsonServer(url, connection_timeout, key, _ADVICE)
        self._known: set[str] | None = None  # fields of a completion request
        self._vocab_size = vocab_size
        self.group_port = group_port
        self.request_timeout = request_timeout
        self._weights: WeightSource | None = None
        self._version = ""
        self._updates = 0
        self._name = uuid.uuid4().hex[:12]  # of this client, in versions of weights
        self.server.retrying(lambda: self.server.get("/health"))
        self._transfer = None if transfer is None else transfer(self)

    def health(self) -> bool:
        """Return whether the server answers and its engine runs."""
        try:
            self.server.get("/health", timeout=5.0)
        except ServerError:
            return False
        return True

    def world_size(self) -> int:
        """Return processes that hold the server's model."""
        return int(self._retried("/get_world_size", "world_size"))

    def settings(self) -> dict[str, Any]:
        """Return the server's configuration."""
        return self._retried("/server_info?config_format=json", "vllm_config")

    def generate(
        self,
        prompts: Sequence[TokenIds | str],
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        in_background: bool = False,
    ) -> dict[str, Any]:
        """Return ``n`` completions of each prompt, those of a prompt in a row.

        Args:
            prompts: token ids; or texts, which the server encodes as the trainer does.
            temperature, top_p, top_k, min_p, repetition_penalty, max_tokens: as in vLLM.
            logprobs: 0: of the tokens that were drawn; None: none; above: also find out which of
                so many of the likeliest ids the filters left.
            structured_outputs_regex: what the text of a completion matches.
            generation_kwargs: more fields of vLLM's completion request.
            in_background: the policy trains meanwhile, so it no longer has the weights last sent.

        Returns:
            ``prompt_ids`` (one list per prompt), ``completion_ids`` (``n`` lists per prompt) and
            ``logprobs`` (one number per token of these, or None); with ``logprobs`` above 0 also
            ``sampling_mask`` (a list of ids per token).

        Raises:
            ServerError: the server fails, refuses, or answers something else.
            WeightsLostError: ``in_background``, the server was restarted, and the weights that it
                had are nowhere else.
            ValueError: an argument is wrong.
        """
        prompts = _checked(prompts)
        if logprobs is not None and logprobs < 0:
            raise ValueError(f"logprobs: expected a number >= 0 or None, got {logprobs!r}")
        body: dict[str, Any] = {
            "prompt": prompts,
            "n": n,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": True,  # to texts
        }
        if structured_outputs_regex is not None:
            body["structured_outputs"] = {"regex": structured_outputs_regex}
        self._check_names(generation_kwargs or {}, body)
        body |= generation_kwargs or {}
        answer = self.server.retrying(lambda: self._complete(body, in_background))
        asked = (prompts, n, max_tokens, logprobs, self._vocab_size)
        try:
            prompt_ids, (ids, values, mask) = completions_of(answer, *asked)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.server.url}/v1/completions: expected {n} completions of each of "
                f"{len(prompts)} prompts: {error!r}; got {str(answer)[:500]}"
            ) from error
        found = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": values}
        return found if mask is None else found | {"sampling_mask": mask}

    def update_weights(self, weights: WeightSource) -> None:
        """Replace the server's weights. One that restarts later gets them before it generates.

        Raises:
            ServerError: the server fails or refuses.
        """
        if self._transfer is None:
            raise ValueError("transfer: expected one to send weights with, got None")
        self._weights = weights
        self._updates += 1
        self._version = f"{self._name}-{self._updates}"
        self.server.retrying(self._send_weights)

    def reset_prefix_cache(self) -> None:
        """Make the server forget the keys and values of earlier prompts.

        Raises:
            ServerError: it fails, or requests are running.
        """
        self.server.retrying(self._reset_prefix_cache)

    def close(self) -> None:
        """End the connection. The server goes on."""
        if self._transfer is not None:
            self._transfer.close()
        self.server.close()

    def _retried(self, path: str, name: str) -> Any:
        return self.server.field(self.server.retrying(lambda: self.server.get(path)), name)

    def _complete(self, body: dict[str, Any], in_background: bool) -> Any:
        if self._weights is not None and self._served_version() != self._version:
            assert self._transfer is not None  # it has sent them
            if in_background and not self._transfer.keeps_a_copy:
                raise WeightsLostError(f"{self.server.url} was restarted in mid-generation")
            logger.warning("%s was restarted: its weights are sent again", self.server.url)
            self._send_weights()
        return self.server.post("/v1/completions", body, self.request_timeout)

    def _served_version(self) -> str:
        return self.server.field(self.server.get("/weight_info"), "weight_version")

    def _send_weights(self) -> None:
        """Try once. The server has the version only if it has all of the weights: one that dies
        and comes back meanwhile has neither the mark of the start nor the version."""
        assert self._weights is not None and self._transfer is not None
        loading = f"{self._version}-loading"
        self.server.post("/pause?mode=keep")
        self.server.post("/update_weight_version", {"new_version": loading})
        self._transfer.send(self.server, self._weights, self._version)
        self._reset_prefix_cache()
        if self._served_version() != loading:
            raise RetryableError(f"{self.server.url}: restarted while it got new weights")
        self.server.post("/update_weight_version", {"new_version": self._version})
        self.server.post("/resume")

    def _reset_prefix_cache(self) -> None:
        if not self.server.field(self.server.post("/reset_prefix_cache"), "success"):
            raise RetryableError(
                f"{self.server.url}/reset_prefix_cache: failed, requests are running"
            )

    def _check_names(self, extra: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        """Raise ValueError for what the server would ignore."""
        again = sorted(set(extra) & set(body))
        if again:
            raise ValueError(f"generation_kwargs: {', '.join(again)} have arguments of their own")
        if not extra:
            return
        if self._known is None:
            schemas = self._retried("/openapi.json", "components")["schemas"]
            self._known = set(schemas["CompletionRequest"]["properties"])
        unknown = sorted(set(extra) - self._known)
        if unknown:
            raise ValueError(
                f"generation_kwargs: {self.server.url} does not know {', '.join(unknown)}"
            )


def _checked(prompts: Any) -> list[TokenIds | str]:
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        if all(isinstance(prompt, str) for prompt in prompts):
            return list(prompts)
        if all(_are_ids(prompt) for prompt in prompts):
            return [list(prompt) for prompt in prompts]
    raise ValueError(
        "prompts: expected a list of texts, or a list of lists of token ids, got "
        f"{shortened(prompts)}"
    )


def _are_ids(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple)
    return is_list and all(type(token) is int and token >= 0 for token in prompt)
