"""Log lines of every kvpool process: one JSON object a line on standard error.

Invariant: a line never holds a secret, a prompt, a payload or a tenant; values come plain in `extra={"data": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with the process's own fields in every line."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        data = getattr(record, "data", None)
        if isinstance(data, dict):
            line.update(data)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_log_lines(level: str, fields: Mapping[str, str]) -> None:
    """Send everything at `level` and above to standard error, with `fields` in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
