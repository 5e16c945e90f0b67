"""Who wrote which object: the API server's audit log, followed from a point on.

Invariant: every complete line after that point is read once, also those of a log that was rotated meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_POD_NAME = "authentication.kubernetes.io/pod-name"


@dataclass(frozen=True, slots=True)
class Write:
    """A request that changed something. `by`: the pod, or the user where it was none; `received`: RFC 3339, sorts as text."""

    by: str
    verb: str
    namespace: str
    resource: str
    subresource: str
    name: str
    received: str

    @property
    def target(self) -> tuple[str, str, str]:
        """(namespace, resource, name) of what was written, "" for "status" and the like of it."""
        return self.namespace, self.resource, self.name


class AuditLog:
    """Begins at the log's present end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = path.open()
        self._file.seek(0, os.SEEK_END)
        self._rest = ""

    def close(self) -> None:
        """Follow it no more."""
        self._file.close()

    def writes(self) -> list[Write]:
        """What was written since the last time."""
        return list(self._read())

    def _read(self) -> Iterator[Write]:
        yield from self._parse()
        if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
            yield from self._parse()  # what came between the two lines
            self._file.close()
            self._file = self._path.open()
            yield from self._parse()

    def _parse(self) -> Iterator[Write]:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            found = _write(json.loads(line))
            if found is not None:
                yield found


def _write(event: dict[str, Any]) -> Write | None:
    code = event.get("responseStatus", {}).get("code", 0)
    if event["verb"] not in WRITES or not 200 <= code < 300 or "dryRun=" in event["requestURI"]:
        return None
    at = event.get("objectRef", {})
    pod = event["user"].get("extra", {}).get(_POD_NAME, [])
    return Write(
        by=pod[0] if pod else event["user"]["username"],
        verb=event["verb"],
        namespace=at.get("namespace", ""),
        resource=at.get("resource", ""),
        subresource=at.get("subresource", ""),
        name=at.get("name", ""),
        received=event["requestReceivedTimestamp"],
    )
