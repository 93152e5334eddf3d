"""VLLMClient: prompts in, token ids and log-probabilities out, by the weights last sent."""

from __future__ import annotations

import ipaddress
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer.config import check_url
from grpo_trainer.engines import TokenIds, WeightSource, policy_weights
from grpo_trainer.vllm.http import JsonServer, ServerError
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
    in_order,
    joined,
)
from grpo_trainer.vllm.transfer import FileTransfer, ServedWeights

logger = logging.getLogger(__name__)

_TOGETHER = 64  # requests that run at the same time
_TEMPLATE = ("tools", "chat_template", "chat_template_kwargs")


class VLLMClient:
    """Talks to a vLLM server that was started with ``grpo-train serve``.

    Args:
        base_url: of the server, such as ``http://127.0.0.1:8000``; replaces the next two.
        host, server_port: of the server. The host 0.0.0.0 is this machine.
        group_port: port of this machine for weights that go from GPU to GPU.
        connection_timeout: seconds to wait for a server that is not up yet, or is gone.
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
        self.server = JsonServer(url, connection_timeout, key, advice)
        self.group_port = group_port
        self.request_timeout = request_timeout
        self._vocab_size = vocab_size
        self._schemas: dict[str, Any] | None = None  # of the server's requests
        self._weights = ServedWeights(self.server)
        self.server.retrying(lambda: self.server.get("/health"))

    def health(self) -> bool:
        """Return whether the server answers and its engine runs."""
        try:
            self.server.get("/health", timeout=5.0)
        except ServerError:
            return False
        return True

    def get_world_size(self) -> int:
        """Return processes that hold the server's model."""
        return int(self._retried("/get_world_size", "world_size"))

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's configuration."""
        return self._retried("/server_info?config_format=json", "vllm_config")

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
        *,
        in_background: bool = False,
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
            in_background: the policy trains meanwhile, so it no longer has the weights last sent.

        Returns:
            ``prompt_ids`` (one list per prompt, with as many tokens per image as the model has),
            ``completion_ids`` (``n`` lists per prompt) and ``logprobs`` (one number per token of
            these, or None); with ``logprobs`` above 0 also ``sampling_mask`` (a list of ids per
            token).

        Raises:
            ServerError: the server fails, refuses, or answers something else.
            WeightsLostError: ``in_background``, the server was restarted, and the weights that it
                had are nowhere else.
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
        extra = joined(generation_kwargs or {}, more, sampling)
        questions = self._questions(prompts, images_of, sampling, extra)
        self._weights.send_named()
        answers = self.server.retrying(lambda: self._ask(questions, in_background))
        known = [ids for question in questions for ids in question.prompt_ids]
        asked = (known, n, max_tokens, logprobs, self._vocab_size)
        try:
            choices = in_order(questions, answers, n)
            prompt_ids, (ids, values, mask) = completions_of(choices, *asked)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{self.server.url}{questions[0].path}: expected {n} completions of each of "
                f"{len(prompts)} prompts: {error!r}; got {str(answers)[:500]}"
            ) from error
        found = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": values}
        return found if mask is None else found | {"sampling_mask": mask}

    def chat(self, messages: Sequence[Messages], **settings: Any) -> dict[str, Any]:
        """Return completions of conversations: :meth:`generate` with ``settings``."""
        return self.generate(messages, **settings)

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

            self._weights.transfer = NCCLTransfer(
                self.get_world_size(), self.group_port, self.request_timeout
            )
        else:
            place = Path(folder or tempfile.gettempdir())
            self._weights.transfer = FileTransfer(place, self.request_timeout)

    def update_weights(self, weights: WeightSource) -> None:
        """Replace the server's weights. One that restarts later gets them before it generates.

        Raises:
            ServerError: the server fails or refuses.
            ValueError: :meth:`init_communicator` was not called.
        """
        self._weights.send(weights)

    def update_model_params(self, model: PreTrainedModel) -> None:
        """Replace the server's weights by those of ``model``, adapters merged in."""
        self.update_weights(lambda: policy_weights(model))

    def update_named_param(self, name: str, weights: Tensor) -> None:
        """Take a copy of one parameter of a checkpoint.

        All that were taken are sent together, before the next completion, at the latest by
        :meth:`reset_prefix_cache`. They replace those of the last :meth:`update_model_params`;
        without one every parameter has to be taken.
        """
        self._weights.keep(name, weights)

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Send what :meth:`update_named_param` takes inside at the end."""
        yield
        self._weights.send_named()

    def reset_prefix_cache(self) -> None:
        """Make the server forget the keys and values of earlier prompts.

        Raises:
            ServerError: it fails, or requests are running.
        """
        self._weights.send_named()
        self.server.retrying(self._weights.reset_prefix_cache)

    def close_communicator(self) -> None:
        """End the transfer of weights. The server keeps those that it has."""
        self._weights.close()

    def close(self) -> None:
        """End the connection. The server goes on."""
        self.close_communicator()
        self.server.close()

    def _retried(self, path: str, name: str) -> Any:
        return self.server.field(self.server.retrying(lambda: self.server.get(path)), name)

    def _questions(
        self,
        prompts: list[Any],
        images_of: list[list[Any]],
        sampling: dict[str, Any],
        extra: dict[str, Any],
    ) -> list[Question]:
        if are_messages(prompts[0]):
            template = {name: extra.pop(name) for name in _TEMPLATE if name in extra}
            self._check_known(extra, "ChatCompletionRequest")
            fields = sampling | extra
            pairs = zip(prompts, images_of, strict=True)
            return [ask_in_chat(*pair, fields, template) for pair in pairs]
        self._check_known(extra, "CompletionRequest")
        if not any(images_of):
            return [ask_all(prompts, sampling | extra)]
        if "content_parts" not in self._fields("GenerateRequest"):
            raise ServerError(
                f"{self.server.url}: expected a server that takes images beside token ids: vLLM "
                "0.32 or later, as `grpo-train serve` starts it"
            )
        pairs = zip(map(self._encoded, prompts), images_of, strict=True)
        return [ask_with_images(*pair, sampling | extra) for pair in pairs]

    def _encoded(self, prompt: str | TokenIds) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        body = {"prompt": prompt, "add_special_tokens": True}
        answer = self.server.retrying(lambda: self.server.post("/tokenize", body))
        return self.server.field(answer, "tokens")

    def _ask(self, questions: list[Question], in_background: bool) -> list[Any]:
        self._weights.restore(in_background)
        with ThreadPoolExecutor(min(_TOGETHER, len(questions))) as pool:
            return list(pool.map(self._post, questions))

    def _post(self, question: Question) -> Any:
        return self.server.post(question.path, question.body, self.request_timeout)

    def _check_known(self, extra: Mapping[str, Any], request: str) -> None:
        """Raise ValueError for what the server would ignore."""
        if not extra:
            return
        unknown = sorted(set(extra) - self._fields(request))
        if unknown:
            raise ValueError(
                f"generation_kwargs: {self.server.url} does not know {', '.join(unknown)}"
            )

    def _fields(self, request: str) -> set[str]:
        if self._schemas is None:
            self._schemas = self._retried("/openapi.json", "components")["schemas"]
        return set(self._schemas.get(request, {}).get("properties", ()))


def _address(host: str) -> str:
    """Return the host of a URL; what a server binds to reach it from everywhere is no host."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"[{host}]" if ":" in host else host
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host
