"""The `x-kvpool-route` header: where an answer came from, what was expected there, and why.

Invariant: `parse_route(format_route(...))` gives back what was put in. Form: `key=value` pairs joined by "; ", in the
order endpoint, dp_rank (only where ranks are named), agent ("-" when unknown), gpu, ram, valkey (blocks), reason.
"""

from __future__ import annotations

from kvpool_router.picker import Route

ROUTE_HEADER = "x-kvpool-route"


def format_route(route: Route, reason: str) -> str:
    """The header's value for an answer."""
    target, blocks = route.target, route.blocks
    agent = target.ref.agent if target.ref is not None else target.endpoint.spec.agent
    rank = f"; dp_rank={target.dp_rank}" if target.dp_rank is not None else ""
    return (
        f"endpoint={target.endpoint.address}{rank}; agent={agent or '-'}; "
        f"gpu={blocks.gpu}; ram={blocks.ram}; valkey={blocks.valkey}; reason={reason}"
    )


def format_refusal(reason: str) -> str:
    """The header's value for an answer of the router itself."""
    return f"reason={reason}"


def parse_route(value: str) -> dict[str, str]:
    """The header's pairs; what is no pair is left out."""
    pairs = (part.strip().partition("=") for part in value.split(";"))
    return {key: text for key, mark, text in pairs if mark}
