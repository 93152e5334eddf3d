"""JSON over HTTP with timeouts, a few retries, and errors with the server's answer."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)
from tenacity.stop import stop_base

from grpo_trainer.common import start
from grpo_trainer.masking import masked_url

logger = logging.getLogger(__name__)

T = TypeVar("T")

ONCE, A_FEW = stop_after_attempt(1), stop_after_attempt(4)  # attempts, for retryable errors
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 10.0  # seconds between attempts, doubled each time
_CONNECT_TIMEOUT = 10.0
_SHOWN = 500  # characters of an answer in a message
# advice if no server answers, or a server lacks a path
_ADVICE = "`grpo-train serve --model MODEL --port PORT` starts a server that accepts weights"
# for a missing path; TRL's server had a slash after it before TRL used vLLM's server
_ANOTHER_SERVER = (httpx.codes.NOT_FOUND, httpx.codes.TEMPORARY_REDIRECT)

_IN_WORDS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # answer with text, not JSON
_TEXT = ("/metrics",)  # answers are returned as they are


class ServerError(RuntimeError):
    """A server's request failed; the message has the server and its last answer."""


class RetryableError(ServerError):
    """The request may succeed if repeated."""


class NoServerError(RetryableError, ConnectionError):
    """No server answers; the message says where, and how to start one."""


class JsonServer:
    """One server that speaks JSON at ``url``, which :func:`check_url` accepts.

    A user and a password in the URL are sent as basic authentication, ``api_key`` as a bearer
    token. Requests run on the event loop's thread, where they can be canceled.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        root = url.rstrip("/")
        self.url = masked_url(root)  # for messages
        parts = httpx.URL(root)
        if parts.query or parts.fragment:  # paths are appended to the URL
            raise ValueError(
                f"url: expected http://host:port without a query, got {self.url!r}; put an API key "
                "in VLLM_API_KEY"
            )
        if api_key and parts.userinfo:
            raise ValueError(
                f"api_key: expected none with a user and a password in the URL, {self.url}: a "
                "request can have only one of the two"
            )
        self._root = str(parts.copy_with(userinfo=b"")).rstrip("/")  # httpx logs it
        self._client = httpx.AsyncClient(
            auth=(parts.username, parts.password) if parts.userinfo else None,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # ignore proxies and passwords of the environment
        )

    def ask(self, method: str, path: str, body: Any = None, **limits: Any) -> Any:
        """Return the answer; see :meth:`answer`."""
        return self.wait(self.answer(method, path, body, **limits))

    async def answer(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = 60.0,
        stop: stop_base = A_FEW,
    ) -> Any:
        """Return the answer of the first attempt that succeeds; each has ``timeout`` seconds.

        Raises:
            NoServerError: there is no connection.
            ServerError: the server rejects the request, or fails repeatedly.
        """
        # servers require a content type that web pages cannot send to other sites
        body = {} if body is None and method == "POST" else body
        return await self.retrying(stop)(self._once, method, path, body, timeout)

    def retrying(self, stop: stop_base = A_FEW) -> AsyncRetrying:
        """Return a retrier that repeats work from its start if it raises RetryableError."""
        return AsyncRetrying(
            retry=retry_if_exception_type(RetryableError),
            wait=wait_exponential(multiplier=_FIRST_DELAY, max=_LONGEST_DELAY),
            stop=stop,
            before_sleep=_warn,
            retry_error_callback=self._give_up,
        )

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. An interrupt cancels it."""
        running = start([work])
        try:
            return running.result()[0]
        finally:
            running.cancel()

    def field(self, answer: Any, name: str) -> Any:
        """Return the field ``name`` of an answer; ServerError if it is missing."""
        if not isinstance(answer, dict) or name not in answer:
            shown = str(answer)[:_SHOWN]
            raise ServerError(f"{self.url}: expected an answer with {name!r}, got {shown!r}")
        return answer[name]

    def close(self) -> None:
        self.wait(self._client.aclose())

    async def _once(self, method: str, path: str, body: Any, timeout: float) -> Any:
        request = f"{method} {self.url}{path}"
        limits = httpx.Timeout(timeout, connect=_CONNECT_TIMEOUT, pool=None)
        try:
            response = await self._client.request(
                method, self._root + path, json=body, timeout=limits
            )
        except httpx.ReadTimeout as error:
            raise RetryableError(f"{request}: no answer within {timeout:g} seconds") from error
        except httpx.TransportError as error:
            never = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            what = "no connection" if never else "the connection broke"
            raise NoServerError(f"{request}: {what} ({_first_cause(error)})") from error
        except httpx.HTTPError as error:
            raise ServerError(f"{request}: {error}") from error
        if response.status_code != httpx.codes.OK:
            kind = RetryableError if response.is_server_error else ServerError
            advice = _ADVICE if response.status_code in _ANOTHER_SERVER else ""
            shown = response.text[:_SHOWN]
            raise kind(f"{request}: got {response.status_code}: {shown!r}. {advice}".rstrip(". "))
        if not response.content or path in _IN_WORDS:
            return None
        if path in _TEXT:
            return response.text
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(
                f"{request}: expected JSON, got {response.text[:_SHOWN]!r} ({error})"
            ) from error

    def _give_up(self, state: RetryCallState) -> NoReturn:
        error: Any = state.outcome and state.outcome.exception()
        advice = _ADVICE if isinstance(error, NoServerError) else ""
        count, seconds = state.attempt_number, state.seconds_since_start
        tries = f", {count} times in {seconds:.1f} seconds" if count > 1 else ""
        raise type(error)(f"{error}{tries}. {advice}".rstrip(". ")) from error


def _warn(state: RetryCallState) -> None:
    """Warn once that a request is repeated, and why."""
    if state.attempt_number == 1 and state.outcome is not None:
        logger.warning("%s; trying again", state.outcome.exception())


def _first_cause(error: BaseException) -> str:
    """Return the original error's message, without outer layers."""
    cause = error.__cause__ or error.__context__
    return str(error) or type(error).__name__ if cause is None else _first_cause(cause)
