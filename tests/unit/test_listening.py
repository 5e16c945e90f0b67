"""Addresses to listen on: one family, both, or what is there already."""

from __future__ import annotations

import socket

import pytest

from kvpool_core.errors import ConfigError
from kvpool_core.listening import bind


def connects(host: str, port: int) -> bool:
    """Whether a connection is accepted."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def has_ipv6() -> bool:
    """Whether this machine has it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_star_is_every_address_of_both_families() -> None:
    with bind("*", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        assert connects("127.0.0.1", port)
        assert connects("::1", port) == has_ipv6()


def test_single_address_is_that_one() -> None:
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        assert bound.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="choose another host or port"):
            bind("127.0.0.1", bound.getsockname()[1])
