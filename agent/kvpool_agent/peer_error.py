"""What a peer did wrong, with the label under which it is counted.

Invariant: `reason` is one of the constants here, so that the metric's labels are bounded.
"""

from __future__ import annotations

from kvpool_core.errors import ProtocolError

GARBAGE = "garbage"
"""Bytes that decode to no message."""
FRAME_TOO_LONG = "frame_too_long"
TRUNCATED = "truncated"
"""The stream ended inside a frame."""
HELLO_MISSING = "hello_missing"
"""No Hello in time, or something else first."""
HELLO_INVALID = "hello_invalid"
VERSION = "version"
NOT_ADMITTED = "not_admitted"
"""No token, a wrong one, a namespace that may not use the pool, or no verdict on the token."""
STANDING_BY = "standing_by"
"""A peer that cannot wait for the arena: it tries again."""
WRONG_ROLE = "wrong_role"
"""A message that only the other role may send."""
WRONG_STATE = "wrong_state"
"""A message before the domain is known, or a second Hello."""
WRONG_KEYS = "wrong_keys"
"""Hashes, domains, groups or counts that cannot be."""
SLOW_READER = "slow_reader"
"""It does not read what it is sent."""


class PeerError(ProtocolError):
    """The connection is closed; others are unharmed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
