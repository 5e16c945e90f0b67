"""Addresses `host:port` as endpoints are named by them.

Pure. Invariant: one address has one spelling, whether it comes from a configuration, a pod or an engine's own Hello.
"""

from __future__ import annotations

import ipaddress


def join_address(host: str, port: int | str) -> str:
    """`host:port`, an IPv6 address in its shortest form and in brackets."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host.lower()}:{port}"
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def canonical_address(text: str) -> str:
    """An address, with or without scheme, brackets or a closing slash; what has no port stays as it is."""
    bare = text.removeprefix("http://").removeprefix("https://").rstrip("/")
    host, colon, port = bare.rpartition(":")
    if not colon or not host:
        return bare
    return join_address(host.removeprefix("[").removesuffix("]"), port)
