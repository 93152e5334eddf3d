"""Connections that another thread can cut, so that nobody has to wait for a silent server."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import requests
from requests.adapters import HTTPAdapter


class CuttableAdapter(HTTPAdapter):
    """Knows the connections that it has open.

    Args:
        closed: while it is set, none is opened.
    """

    def __init__(self, closed: threading.Event) -> None:
        super().__init__()
        self._closed = closed
        self._connections: WeakSet[Any] = WeakSet()

    def get_connection_with_tls_context(
        self, request: requests.PreparedRequest, verify: Any, proxies: Any = None, cert: Any = None
    ) -> Any:
        pool: Any = super().get_connection_with_tls_context(request, verify, proxies, cert)
        if not hasattr(pool.ConnectionCls, "cuttable"):
            pool.ConnectionCls = _cuttable(pool.ConnectionCls, self._connections, self._closed)
        return pool

    def cut(self) -> None:
        """Whoever waits for an answer gets an error."""
        for connection in list(self._connections):
            if connection.sock is not None:
                with suppress(OSError):  # it is closed already
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _cuttable(kind: type, connections: WeakSet[Any], closed: threading.Event) -> type:
    class Cuttable(kind):
        cuttable = True

        def connect(self) -> None:
            super().connect()
            connections.add(self)
            if closed.is_set():  # it may have been set before the connection was known
                self.close()
                raise ConnectionAbortedError("cut")

    return Cuttable
