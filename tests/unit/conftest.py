"""The unit suite talks to nobody but itself: a connection that leaves this machine is an error. And what many tests share."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator

import pytest

from tests.unit.fake_api_server import FakeApiServer, fake_api_server


class NetworkUsedError(RuntimeError):
    """A unit test tried to reach another machine."""


def _refuse_other_machines(event: str, arguments: tuple[object, ...]) -> None:
    if event != "socket.connect":
        return
    address = arguments[1]
    if isinstance(address, tuple) and isinstance(address[0], str) and not is_loopback(address[0]):
        raise NetworkUsedError(f"a unit test connects to {address[0]}: unit tests stay on loopback")


def is_loopback(host: str) -> bool:
    """Whether a numeric address, or the name localhost, stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


sys.addaudithook(_refuse_other_machines)


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    """With the namespace `inference` and one node that pools select."""
    with fake_api_server() as server:
        server.put({"kind": "Namespace", "metadata": {"name": "inference"}})
        server.put(
            {
                "kind": "Node",
                "metadata": {"name": "node-1", "labels": {"gpu": "yes"}},
                "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"memory": "64Gi"}},
            }
        )
        yield server
