"""Listening TCP sockets of agent and router.

Invariant: a socket that is returned is bound; `*` serves whatever address families the host has.
"""

from __future__ import annotations

import errno
import socket

from kvpool_core.errors import ConfigError

EVERY_ADDRESS = "*"
"""All addresses of both families: the same setting for clusters of IPv4, of IPv6 and of both."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket (port 0: a free one) that does not listen yet; ConfigError when the address cannot be had."""
    try:
        return _bind_every_address(port) if host == EVERY_ADDRESS else _bind(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another host or port") from error


def _bind_every_address(port: int) -> socket.socket:
    """One socket of both families where the kernel has IPv6, else one of IPv4."""
    try:
        return _bind("::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _bind("0.0.0.0", port)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
