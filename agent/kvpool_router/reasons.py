"""Why a request went where it went: the `reason` of the route header, of metrics and of explain.

Invariant: every answer of the proxy carries exactly one of these; each has an entry in the troubleshooting page.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "prefix"
"""The endpoint holds, or loads soonest, the longest useful prefix of the prompt."""
AFFINITY: Final = "affinity"
"""Scores were close; the hash of the prompt's first blocks decided, so that its siblings go there too."""
LOAD: Final = "load"
"""No useful prefix anywhere, or a route without prompt: the least queued work decided."""
SINGLE: Final = "single"
"""Only one endpoint is ready for this model."""
NO_TOKENS: Final = "no-tokens"
"""No engine gave the prompt's tokens in time; by load."""
UNHASHABLE: Final = "unhashable"
"""Several prompts, embeddings, images, truncation, prompt log probabilities or over 8 MiB: not hashed; by load."""
STALE_INDEX: Final = "stale-index"
"""No agent's event stream is in step, so nothing is known of any prefix; by load."""
RETRY: Final = "retry"
"""The endpoint chosen first refused or broke the connection before its first byte; this is the next best."""
UNKNOWN_MODEL: Final = "unknown-model"
"""No endpoint lists the model; an engine's own answer says so."""
NO_ENDPOINT: Final = "no-endpoint"
"""503: no endpoint that serves this model is ready."""
UPSTREAM_FAILED: Final = "upstream-failed"
"""502: the engine broke the connection before its first byte and no other could take the request."""
ROUTER_FULL: Final = "router-full"
"""503: the bodies of requests in flight take all the memory that the router has for them."""
BAD_REQUEST: Final = "bad-request"
"""4xx by the router itself: not JSON, too large, or no tenant where one is required."""

ALL_REASONS: Final = (
    PREFIX,
    AFFINITY,
    LOAD,
    SINGLE,
    NO_TOKENS,
    UNHASHABLE,
    STALE_INDEX,
    RETRY,
    UNKNOWN_MODEL,
    NO_ENDPOINT,
    UPSTREAM_FAILED,
    ROUTER_FULL,
    BAD_REQUEST,
)
