"""Where endpoints come from. Today: the configuration file; the operator's pod watch will be another EndpointSource.

Invariant: a source yields whole sets; what is absent from the latest set is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool_router.config import RouterConfig, endpoint_address, read_token


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """An engine's serving address. `agent`: its node's agent, "" when any agent may report it."""

    address: str
    url: str
    agent: str
    api_key: str = field(default="", repr=False)


class EndpointSource(Protocol):
    """Yields the complete set of endpoints, again whenever it changes."""

    def watch(self) -> AsyncIterator[Sequence[EndpointSpec]]:
        """An endless or finite series of sets."""
        ...


class StaticEndpoints:
    """The endpoints of the configuration file."""

    def __init__(self, config: RouterConfig) -> None:
        self._specs = [
            EndpointSpec(
                endpoint_address(endpoint),
                endpoint.url.rstrip("/"),
                endpoint.agent,
                read_token(endpoint.api_key_file, "endpoints[].api_key_file") if endpoint.api_key_file else "",
            )
            for endpoint in config.endpoints
        ]

    async def watch(self) -> AsyncIterator[Sequence[EndpointSpec]]:
        """The one set there is."""
        yield self._specs
