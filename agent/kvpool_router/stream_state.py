"""The order of an agent's event stream: begin, snapshot parts, ready, then deltas without a gap.

Pure. Invariant: a message is passed on only when it is the next one of one agent process' lifetime; anything else
breaks the stream, and the subscriber starts anew.
"""

from __future__ import annotations

from kvpool_core.errors import ProtocolError
from kvpool_core.wire import EventsAlive, EventsBegin, EventsDelta, EventsPart, EventsReady, StreamMessage

GAP = "gap"
BOOT_ID = "boot-id"
OUT_OF_ORDER = "out-of-order"


class StreamBrokenError(ProtocolError):
    """The stream cannot be continued; `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StreamOrder:
    """Checks one subscription's messages."""

    def __init__(self) -> None:
        self.boot_id = b""
        self.seq = 0
        self.ready = False

    def check(self, message: StreamMessage) -> None:
        """StreamBrokenError unless `message` may come now."""
        match message:
            case EventsBegin():
                self._begin(message)
            case EventsPart() | EventsReady():
                self._snapshot(message)
            case EventsDelta() | EventsAlive():
                self._live(message)

    def _begin(self, message: EventsBegin) -> None:
        if self.boot_id:
            raise StreamBrokenError(OUT_OF_ORDER, "a second EventsBegin in one stream")
        if not message.boot_id:
            raise StreamBrokenError(OUT_OF_ORDER, "EventsBegin without a boot id")
        self.boot_id, self.seq = message.boot_id, message.seq

    def _snapshot(self, message: EventsPart | EventsReady) -> None:
        if not self.boot_id or self.ready:
            raise StreamBrokenError(OUT_OF_ORDER, f"{type(message).__name__} outside of the snapshot")
        self.ready = isinstance(message, EventsReady)

    def _live(self, message: EventsDelta | EventsAlive) -> None:
        if not self.ready:
            raise StreamBrokenError(OUT_OF_ORDER, f"{type(message).__name__} before the snapshot was complete")
        if message.boot_id != self.boot_id:
            raise StreamBrokenError(BOOT_ID, "the stream continued with another agent process' events")
        expected = self.seq + 1 if isinstance(message, EventsDelta) else self.seq
        if message.seq != expected:
            raise StreamBrokenError(GAP, f"event {message.seq} where {expected} was due")
        self.seq = message.seq
