"""VLLMClient: prompts in, token ids and log-probabilities out, by the weights last sent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tenacity import stop_after_delay

from grpo_trainer.common import together
from grpo_trainer.config import check_url
from grpo_trainer.engines import TokenIds
from grpo_trainer.vllm.http import ONCE, JsonServer, ServerError
from grpo_trainer.vllm.requests import (
    Messages,
    Question,
    are_messages,
    ask_all,
    ask_in_chat,
    ask_with_images,
    checked_images,
    checked_prompts,
    completions_of,
)
from grpo_trainer.vllm.transfer import TakesWeights


class VLLMClient(TakesWeights):
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
        if base_url is not None:
            check_url("base_url", base_url)
        url = base_url or f"http://{_address(host)}:{server_port}"
        key = api_key or os.environ.get("VLLM_API_KEY")
        advice = "`grpo-train serve --model MODEL --port PORT` starts a server that takes weights"
        super().__init__(JsonServer(url, key, advice), group_port, request_timeout)
        self._vocab_size = vocab_size
        self._schemas: dict[str, Any] | None = None  # of the server's requests
        self.server.ask("GET", "/health", stop=stop_after_delay(connection_timeout))

    def health(self) -> bool:
        """Return whether the server answers and its engine runs."""
        try:
            self.server.ask("GET", "/health", timeout=5.0, stop=ONCE)
        except ServerError:
            return False
        return True

    def generate(
        self,
        prompts: Sequence[str] | Sequence[TokenIds] | Sequence[Messages],
        images: Sequence[Any] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return ``n`` completions of each prompt, those of a prompt in a row.

        Args:
            prompts: texts, which the server encodes as the trainer does; token ids; or messages for
                its chat template.
            images: of each prompt: None, an image or a list of them, which are PIL images or URLs.
                Texts and token ids have one placeholder token per image, messages a part
                ``{"type": "image"}``, if that does not have the image itself.
            repetition_penalty, temperature, top_p, top_k, min_p, max_tokens: as in vLLM.
            logprobs: 0: of the tokens that were drawn; None: none; above: also find out which of
                so many of the likeliest ids the filters left.
            structured_outputs_regex: what the text of a completion matches.
            generation_kwargs: more fields of vLLM's request; they may be arguments as well. With
                messages also ``tools`` (functions or schemas), ``chat_template`` and
                ``chat_template_kwargs``.

        Returns:
            ``prompt_ids`` (one list per prompt, with as many tokens per image as the model has),
            ``completion_ids`` (``n`` lists per prompt) and ``logprobs`` (one number per token of
            these, or None); with ``logprobs`` above 0 also ``sampling_mask`` (a list of ids per
            token).

        Raises:
            ServerError: the server fails, refuses, answers something else, or was restarted since
                it was sent weights, and has lost them.
            ValueError: an argument is wrong.
        """
        prompts = checked_prompts(prompts)
        images_of = checked_images(images, len(prompts))
        if logprobs is not None and logprobs < 0:
            raise ValueError(f"logprobs: expected a number >= 0 or None, got {logprobs!r}")
        sampling: dict[str, Any] = {
            "n": n,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }
        if structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        extra = {**(generation_kwargs or {}), **more}
        again = sorted(extra.keys() & sampling.keys() | more.keys() & (generation_kwargs or {}))
        if again:
            raise ValueError(f"generation_kwargs: {', '.join(again)} have arguments of their own")
        self._send_named()
        return self.server.wait(self.complete(prompts, images_of, sampling, extra))

    async def complete(
        self,
        prompts: list[Any],
        images_of: list[list[Any]],
        sampling: dict[str, Any],
        extra: dict[str, Any],
    ) -> dict[str, Any]:
        """Return what :meth:`generate` does, for its arguments as the server's fields."""
        await self._check_weights()
        questions = await self._questions(prompts, images_of, sampling, extra)
        answers = await together(
            [
                self.server.answer("POST", *question[:2], self.request_timeout)
                for question in questions
            ]
        )
        settings = (sampling["n"], sampling["max_tokens"], sampling["logprobs"], self._vocab_size)
        try:
            return completions_of(questions, answers, *settings)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{self.server.url}{questions[0].path}: expected {sampling['n']} completions of "
                f"each of {len(prompts)} prompts: {error!r}; got {str(answers)[:500]}"
            ) from error

    def chat(self, messages: Sequence[Messages], **settings: Any) -> dict[str, Any]:
        """Return completions of conversations: :meth:`generate` with ``settings``."""
        return self.generate(messages, **settings)

    def close(self) -> None:
        """End the connection. The server goes on."""
        self.close_communicator()
        self.server.close()

    async def _questions(
        self,
        prompts: list[Any],
        images_of: list[list[Any]],
        sampling: dict[str, Any],
        extra: dict[str, Any],
    ) -> list[Question]:
        in_chat, fields = are_messages(prompts[0]), sampling | extra
        request = "ChatCompletionRequest" if in_chat else "CompletionRequest"
        unknown = sorted(extra.keys() - await self._fields(request)) if extra else []
        if unknown:  # which the server would ignore
            raise ValueError(
                f"generation_kwargs: {self.server.url} does not know {', '.join(unknown)}"
            )
        pairs = list(zip(prompts, images_of, strict=True))
        if in_chat:
            return [ask_in_chat(*pair, fields) for pair in pairs]
        if not any(images_of):
            return [ask_all(prompts, fields)]
        if "content_parts" not in await self._fields("GenerateRequest"):
            raise ServerError(
                f"{self.server.url}: expected a server that takes images beside token ids: vLLM "
                "0.32 or later, as `grpo-train serve` starts it"
            )
        return [ask_with_images(await self._encoded(prompt), own, fields) for prompt, own in pairs]

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


def _address(host: str) -> str:
    """Return the host of a URL; what a server binds to reach it from everywhere is no host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
