"""The unit suite talks to nobody but itself: a connection that leaves this machine is an error."""

from __future__ import annotations

import ipaddress
import sys


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
