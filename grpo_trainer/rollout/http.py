"""JSON over HTTP with timeouts, retries with backoff, and errors that say what the server said."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import requests

from grpo_trainer.common import masked_urls
from grpo_trainer.rollout.connections import CuttableAdapter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 10.0  # seconds between tries; each is twice the one before
_FAULTS = 4  # answers 5xx, and silence, that are retried; they seldom go away
_CONNECT_TIMEOUT = 10.0
_SHOWN = 500  # characters of an answer in a message


class ServerError(RuntimeError):
    """A server did not do what it was asked; the message names it and its last answer."""


class RetryableError(ServerError):
    """It may work the next time."""


class _LostError(RetryableError):
    """The server is starting, restarting or gone."""


class JsonServer:
    """One server that speaks JSON.

    Args:
        url: of its root. User and password in it are sent as basic authentication.
        patience: seconds to keep trying to connect.
        api_key: sent as a bearer token; None: none is sent.
        advice: what to do about a path that it does not have.
    """

    def __init__(
        self, url: str, patience: float, api_key: str | None = None, advice: str = ""
    ) -> None:
        self._root = url.rstrip("/")
        self.url = masked_urls(self._root)  # for messages
        self.patience = patience
        self._advice = advice
        self._session = requests.Session()
        self._session.trust_env = False  # neither proxies nor passwords of the user's shell
        self._interrupted = threading.Event()
        self._adapter = CuttableAdapter(self._interrupted)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, self._adapter)
        if api_key:
            if self.url != self._root:
                raise ValueError(
                    f"api_key: expected none with a user and a password in the URL, {self.url}: a "
                    "request carries one of the two"
                )
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """The answer, of one try."""
        return self._once("GET", path, None, timeout)

    def field(self, answer: Any, name: str) -> Any:
        """What an answer says about ``name``.

        Raises:
            ServerError: nothing.
        """
        if not isinstance(answer, dict) or name not in answer:
            shown = str(answer)[:_SHOWN]
            raise ServerError(f"{self.url}: expected an answer with {name!r}, got {shown!r}")
        return answer[name]

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 60.0) -> Any:
        """The answer, of one try. Without ``body`` an empty object is sent: the server asks for a
        content type that no page in a browser may send elsewhere."""
        return self._once("POST", path, body or {}, timeout)

    def retrying(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; it is repeated from its start when the server fails meanwhile.

        Raises:
            ServerError: it still fails after ``patience`` seconds without a connection, or a few
                answers that say it is the server's fault.
        """
        delay, faults, lost_at = _FIRST_DELAY, 0, None
        while True:
            try:
                return work()
            except _LostError as error:
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                if now - lost_at >= self.patience:
                    raise ServerError(f"{error}, for {self.patience:g} seconds") from error
                fault: RetryableError = error
            except RetryableError as error:
                faults, lost_at = faults + 1, None
                if faults >= _FAULTS:
                    raise ServerError(f"{error}, {faults} times") from error
                fault = error
            logger.warning("%s; next try in %.1f s", fault, delay)
            self._interrupted.wait(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Meanwhile every request fails with ServerError, those that other threads wait for too."""
        self._interrupted.set()
        self._adapter.cut()
        try:
            yield
        finally:
            self._interrupted.clear()

    def close(self) -> None:
        self._session.close()

    def _check_interrupted(self, asked: str) -> None:
        if self._interrupted.is_set():
            raise ServerError(f"{asked}: interrupted")

    def _once(self, method: str, path: str, body: Any, timeout: float) -> Any:
        asked = f"{method} {self.url}{path}"
        self._check_interrupted(asked)
        try:
            response = self._session.request(
                method,
                self._root + path,
                json=body,
                timeout=(_CONNECT_TIMEOUT, timeout),
                allow_redirects=False,
            )
        except requests.RequestException as error:
            self._check_interrupted(asked)
            raise _fault(asked, timeout, error) from error
        if response.status_code != requests.codes.ok:
            kind = _kind(response.status_code)
            advice = self._advice if response.status_code == requests.codes.not_found else ""
            shown = response.text[:_SHOWN]
            raise kind(f"{asked}: got {response.status_code}: {shown!r}. {advice}".rstrip(". "))
        if not response.content:
            return None
        try:
            return response.json()
        except requests.exceptions.JSONDecodeError as error:
            raise ServerError(
                f"{asked}: expected JSON, got {response.text[:_SHOWN]!r} ({error})"
            ) from error


def _fault(asked: str, timeout: float, error: requests.RequestException) -> ServerError:
    """What it is to have no whole answer."""
    if isinstance(error, requests.exceptions.ReadTimeout):
        return RetryableError(f"{asked}: no answer within {timeout:g} seconds")
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return _LostError(f"{asked}: the connection broke in the answer ({_first_cause(error)})")
    if isinstance(error, requests.ConnectionError | requests.Timeout):
        return _LostError(f"{asked}: no connection ({_first_cause(error)})")
    return ServerError(f"{asked}: {error}")


def _kind(status: int) -> type[ServerError]:
    if status in (502, 503, 504):  # says a gateway, or a server whose engine has ended
        return _LostError
    return RetryableError if status >= 500 else ServerError


def _first_cause(error: BaseException) -> BaseException:
    """What happened, without the layers that passed it on."""
    cause = error.__cause__ or error.__context__
    return error if cause is None else _first_cause(cause)
