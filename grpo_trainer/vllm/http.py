"""JSON over HTTP with timeouts, retries with backoff, and errors that say what the server said."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    wait_exponential,
)

from grpo_trainer.common import masked_urls, start

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 10.0  # seconds between tries; each is twice the one before
_FAULTS = 4  # answers 5xx, and silence, that are retried; they seldom go away
_CONNECT_TIMEOUT = 10.0
_SHOWN = 500  # characters of an answer in a message
# without that path; TRL's server had a slash behind it before it was vLLM's own
_ANOTHER_SERVER = (httpx.codes.NOT_FOUND, httpx.codes.TEMPORARY_REDIRECT)


class ServerError(RuntimeError):
    """A server did not do what it was asked; the message names it and its last answer."""


class NoServerError(ServerError, ConnectionError):
    """No server answers; the message says where, and how to start one."""


class RetryableError(ServerError):
    """It may work the next time."""


class _LostError(RetryableError):
    """The server is starting, restarting or gone."""


class JsonServer:
    """One server that speaks JSON. Several threads may ask it at once.

    Args:
        url: of its root. User and password in it are sent as basic authentication.
        patience: seconds to keep trying to connect.
        api_key: sent as a bearer token; None: none is sent.
        advice: what to do if no server answers, or one that does not have a path.
    """

    def __init__(
        self, url: str, patience: float, api_key: str | None = None, advice: str = ""
    ) -> None:
        root = url.rstrip("/")
        self.url = masked_urls(root)  # for messages
        self.patience = patience
        self._advice = advice
        if api_key and self.url != root:
            raise ValueError(
                f"api_key: expected none with a user and a password in the URL, {self.url}: a "
                "request carries one of the two"
            )
        try:
            parts = httpx.URL(root)
        except httpx.InvalidURL as error:
            raise ValueError(
                f"url: expected http://host:port, got {self.url!r}: {error}"
            ) from error
        self._root = str(parts.copy_with(userinfo=b"")).rstrip("/")  # httpx logs it
        self._client = httpx.AsyncClient(
            auth=(parts.username, parts.password) if parts.userinfo else None,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # neither proxies nor passwords of the user's shell
        )
        self._waiting: set[Future[Any]] = set()  # requests, of all threads
        self._interrupted = threading.Event()

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """Return the answer, of one try."""
        return self._once("GET", path, None, timeout)

    def field(self, answer: Any, name: str) -> Any:
        """Return what an answer says about ``name``.

        Raises:
            ServerError: nothing.
        """
        if not isinstance(answer, dict) or name not in answer:
            shown = str(answer)[:_SHOWN]
            raise ServerError(f"{self.url}: expected an answer with {name!r}, got {shown!r}")
        return answer[name]

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 60.0) -> Any:
        """Return the answer, of one try. Without ``body`` an empty object is sent: the server asks
        for a content type that no page in a browser may send elsewhere."""
        return self._once("POST", path, body or {}, timeout)

    def retrying(self, work: Callable[[], T]) -> T:
        """Return what ``work`` does; it is repeated from its start when the server fails meanwhile.

        Raises:
            NoServerError: there is no connection for ``patience`` seconds.
            ServerError: it still fails after a few answers that say it is the server's fault.
        """
        end = _End(self.patience, self._advice)
        retry = Retrying(
            retry=retry_if_exception_type(RetryableError),
            wait=wait_exponential(multiplier=_FIRST_DELAY, max=_LONGEST_DELAY),
            stop=end,
            sleep=sleep_using_event(self._interrupted),
            before_sleep=end.warn,
            retry_error_callback=end.give_up,
        )
        return retry(work)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Make every request fail with ServerError, those that other threads wait for too."""
        self._interrupted.set()
        for request in list(self._waiting):
            request.cancel()
        try:
            yield
        finally:
            self._interrupted.clear()

    def close(self) -> None:
        start([self._client.aclose()]).result()

    def _once(self, method: str, path: str, body: Any, timeout: float) -> Any:
        asked = f"{method} {self.url}{path}"
        try:
            response = self._response(method, path, body, timeout)
        except CancelledError:
            raise ServerError(f"{asked}: interrupted") from None
        except httpx.HTTPError as error:
            raise _fault(asked, timeout, error) from error
        if response.status_code != httpx.codes.OK:
            kind = _kind(response.status_code)
            advice = self._advice if response.status_code in _ANOTHER_SERVER else ""
            shown = response.text[:_SHOWN]
            raise kind(f"{asked}: got {response.status_code}: {shown!r}. {advice}".rstrip(". "))
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(
                f"{asked}: expected JSON, got {response.text[:_SHOWN]!r} ({error})"
            ) from error

    def _response(self, method: str, path: str, body: Any, timeout: float) -> httpx.Response:
        limits = httpx.Timeout(timeout, connect=_CONNECT_TIMEOUT)
        request = start(
            [self._client.request(method, self._root + path, json=body, timeout=limits)]
        )
        self._waiting.add(request)
        try:
            if self._interrupted.is_set():  # it may have been set before the request was known
                request.cancel()
            [response] = request.result()
            return response
        finally:
            self._waiting.discard(request)
            request.cancel()  # where the wait itself was interrupted


class _End:
    """Says when to give up: after ``patience`` seconds without a connection, or a few faults."""

    def __init__(self, patience: float, advice: str) -> None:
        self._patience = patience
        self._advice = advice
        self._faults = 0
        self._waits = False  # has been said
        self._lost_at: float | None = None

    def __call__(self, state: RetryCallState) -> bool:
        if not isinstance(_error(state), _LostError):
            self._faults, self._lost_at = self._faults + 1, None
            return self._faults >= _FAULTS
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        return now - self._lost_at >= self._patience

    def warn(self, state: RetryCallState) -> None:
        """Say that it is tried again; of a server that is waited for once."""
        if self._lost_at is None:
            logger.warning("%s; next try in %.1f s", _error(state), state.upcoming_sleep)
        elif not self._waits:
            logger.warning("%s; waiting up to %g s for it", _error(state), self._patience)
        self._waits = self._lost_at is not None

    def give_up(self, state: RetryCallState) -> NoReturn:
        error = _error(state)
        if self._lost_at is None:
            raise ServerError(f"{error}, {self._faults} times") from error
        told = f"{error}, for {self._patience:g} seconds. {self._advice}"
        raise NoServerError(told.rstrip(". ")) from error


def _error(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


def _fault(asked: str, timeout: float, error: httpx.HTTPError) -> ServerError:
    """Return what it is to have no whole answer."""
    if isinstance(error, httpx.ReadTimeout):
        return RetryableError(f"{asked}: no answer within {timeout:g} seconds")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return _LostError(f"{asked}: no connection ({_first_cause(error)})")
    if isinstance(error, httpx.TransportError):
        return _LostError(f"{asked}: the connection broke ({_first_cause(error)})")
    return ServerError(f"{asked}: {error}")


def _kind(status: int) -> type[ServerError]:
    if status in (502, 503, 504):  # says a gateway, or a server whose engine has ended
        return _LostError
    return RetryableError if status >= 500 else ServerError


def _first_cause(error: Exception) -> str:
    """Say what happened, without the layers that passed it on."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, Exception):
        return _first_cause(cause)
    return str(error) or type(error).__name__
