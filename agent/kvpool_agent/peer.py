"""Who is at the other end of a connection, once it has said Hello.

Invariant: whoever holds a Peer owns its connection and its process descriptor.
"""

from __future__ import annotations

import select
from dataclasses import dataclass

from kvpool_agent.connection import Connection
from kvpool_agent.pod_identity import PodIdentity
from kvpool_core.wire import Hello


@dataclass(slots=True)
class Peer:
    """An engine's process. `pod`: None where engines are not authenticated. `pid`: 0 where it cannot be seen."""

    connection: Connection
    number: int
    hello: Hello
    protocol: int
    pod: PodIdentity | None
    pid: int
    pidfd: int | None

    def __str__(self) -> str:
        """For people."""
        where = f" of pod {self.pod.namespace}/{self.pod.name}" if self.pod is not None else ""
        return f"process {self.pid or '(of another container)'}{where}"

    def is_alive(self) -> bool:
        """Whether the process is known to be there."""
        if self.pidfd is None:
            return False
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)
