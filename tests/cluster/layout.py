"""Names and addresses of the test cluster. There is one per machine, so they are fixed.

Invariant: everything that the cluster makes outside its own folder carries one of these names, so that it can be found and
removed by whoever comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

NAME = "kvpool-test-cluster"
"""Of its cgroup in every hierarchy, and of its folder in /run."""
LINK = "kvpool0"
"""The host's end of the wire into the cluster."""

# 198.18.0.0/15 is set apart for tests of networks (RFC 2544): no office network or VPN uses it.
NETWORK = "198.18.0.0/15"
LAN = "198.18.0.{}/24"
"""Control plane, nodes and host."""
CONTROL = "198.18.0.1"
HOST = "198.18.0.254"
PODS = "198.18.8.0/21"
"""Not the nodes' network: what comes from elsewhere, as from the host, is masqueraded on its way to a Service."""
SERVICES = "198.19.0.0/16"
API_SERVICE = "198.19.0.1"
DNS_SERVICE = "198.19.0.10"
DOMAIN = "cluster.local"
API_PORT = 6443


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its own network and mount namespace."""

    name: str
    address: str
    pods: str
    """The subnet of its pods."""


NODES = (
    Node("node-a", "198.18.0.11", "198.18.11.0/24"),
    Node("node-b", "198.18.0.12", "198.18.12.0/24"),
)
LAN_ANCHOR = "lan"
"""The namespace of the control plane and of the bridge between the nodes."""


def api_url() -> str:
    """Where the API server is reached from nodes and host."""
    return f"https://{CONTROL}:{API_PORT}"
