"""Log lines: one JSON object a line with pool and namespace.

Invariant: a line never holds a secret, a prompt or a tenant; values come through `extra=fields(...)` and are plain.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping


def fields(**values: str | int | float | bool | None) -> dict[str, dict[str, str | int | float | bool | None]]:
    """The `extra` of a log call."""
    return {"data": values}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with `always` in every line."""

    def __init__(self, always: Mapping[str, str]) -> None:
        super().__init__()
        self._always = dict(always)

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **getattr(record, "data", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(level: str, always: Mapping[str, str]) -> None:
    """Send everything at `level` and above to standard error.

    uvicorn's own lines are silenced: an answer that an engine broke off ends in an exception on purpose, which the
    proxy has logged and counted already.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(always))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
