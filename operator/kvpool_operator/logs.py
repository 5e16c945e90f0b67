"""Log lines: one JSON object a line.

Invariant: a line never holds a secret; callers pass plain values in `extra={"data": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping


class JsonFormatter(logging.Formatter):
    """Formats a record with the process's own fields first."""

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
        }
        data = getattr(record, "data", None)
        if isinstance(data, dict):
            line.update(data)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(level: str, always: Mapping[str, str]) -> None:
    """Send everything at `level` and above to standard error; libraries only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(always))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for library in ("kopf", "uvicorn", "kubernetes", "asyncio"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLevelName(level)))
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # what it says of retries comes again as our own error
