"""How the cluster's readiness is asked for, without a client library: API server, names, nodes.

Invariant: a probe answers true or false; whatever goes wrong on the way is false.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import socket
import ssl
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.layout import API_PORT, CONTROL, DNS_SERVICE, DOMAIN

_SECONDS = 2.0


def api_is_ready(authority: Path) -> bool:
    """Whether the API server says that it serves."""
    trusted = ssl.create_default_context(cafile=str(authority))
    connection = http.client.HTTPSConnection(CONTROL, API_PORT, timeout=_SECONDS, context=trusted)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def names_resolve() -> bool:
    """Whether the name of the API server's Service is answered through the Service of the DNS: kube-proxy and CoreDNS work."""
    name = b"".join(bytes([len(label)]) + label.encode() for label in f"kubernetes.default.svc.{DOMAIN}".split("."))
    query = b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + name + b"\x00\x00\x01\x00\x01"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(0.5)
            asking.sendto(query, (DNS_SERVICE, 53))
            reply = asking.recv(512)
    except OSError:
        return False
    return reply[3] & 0x0F == 0 and reply[6:8] != b"\x00\x00"


def nodes_are_ready(kubectl: Callable[..., str], since: Mapping[str, float]) -> bool:
    """Whether every node of `since` is Ready, and said so after its time (seconds since 1970)."""
    try:
        found = json.loads(kubectl("get", "nodes", "--output=json"))["items"]
    except (subprocess.SubprocessError, ValueError):
        return False
    said = {node["metadata"]["name"]: _ready_since(node) for node in found}
    return all(said.get(name, -1.0) >= time for name, time in since.items())


def _ready_since(node: Mapping[str, Any]) -> float:
    for condition in node["status"].get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            return datetime.datetime.fromisoformat(condition["lastHeartbeatTime"]).timestamp()
    return -1.0
