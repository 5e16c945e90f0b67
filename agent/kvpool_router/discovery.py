"""Who belongs to the fleet: engines to route to, agents to listen to. From the configuration file here, from pods in `pod_watch`.

Invariant: a source yields whole sets; what is absent from the latest set is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from kvpool_router.config import RouterConfig, endpoint_address, read_token
from kvpool_router.metrics import RouterMetrics


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """An engine's serving address. `agent`: its node's agent, "" when any agent may report it."""

    address: str
    url: str
    agent: str
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """An agent's name, admin address and the file with its bearer token, read anew for every subscription."""

    name: str
    url: str
    token_file: str


@dataclass(frozen=True, slots=True)
class Members:
    """The whole fleet at one time; addresses and agents' names are each unique."""

    endpoints: tuple[EndpointSpec, ...] = ()
    agents: tuple[AgentAddress, ...] = ()


class MemberSource(Protocol):
    """Yields the complete fleet, again whenever it changes."""

    def watch(self, metrics: RouterMetrics) -> AsyncIterator[Members]:
        """An endless or finite series of sets."""
        ...


class ConfiguredMembers:
    """The endpoints and agents of the configuration file."""

    def __init__(self, config: RouterConfig) -> None:
        endpoints = [
            EndpointSpec(
                endpoint_address(endpoint),
                endpoint.url.rstrip("/"),
                endpoint.agent,
                read_token(endpoint.api_key_file, "endpoints[].api_key_file") if endpoint.api_key_file else "",
            )
            for endpoint in config.endpoints or ()
        ]
        agents = [AgentAddress(agent.name, agent.url, agent.token_file) for agent in config.agents]
        self._members = Members(tuple(endpoints), tuple(agents))

    async def watch(self, metrics: RouterMetrics) -> AsyncIterator[Members]:  # noqa: ARG002  # nothing can fail
        """The one set there is."""
        yield self._members
