"""The error tree of kvpool. Foreign exceptions are translated into it at the edge that meets them.

KVPoolError
├── ConfigError            a configuration file or flag is wrong; names the key and the remedy
├── ProtocolError          a peer broke the wire protocol; the connection is closed
│   ├── FrameError         a frame is too long, truncated or not decodable
│   └── VersionError       no common protocol version
├── ValueFormatError       bytes in a tier are not the block they should be
├── ArenaError             the arena cannot be created, adopted or mapped
└── UnsupportedModelError  the engine's configuration cannot be offloaded; the connector runs inert
"""

from __future__ import annotations


class KVPoolError(Exception):
    """Base of every error that kvpool raises on purpose."""


class ConfigError(KVPoolError):
    """A configuration value is wrong; the message names key, problem and remedy."""


class ProtocolError(KVPoolError):
    """A peer broke the wire protocol."""


class FrameError(ProtocolError):
    """A frame is too long, truncated or not decodable."""


class VersionError(ProtocolError):
    """The peers have no protocol version in common."""


class ValueFormatError(KVPoolError):
    """Bytes read from a tier are not the block that was asked for; `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ArenaError(KVPoolError):
    """The arena cannot be created, adopted or mapped."""


class UnsupportedModelError(KVPoolError):
    """The engine's configuration cannot be offloaded."""
