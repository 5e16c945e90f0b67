"""Log lines of the operator's processes.

Invariant: a line never holds a secret; callers pass plain values in `extra={"data": {...}}`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvpool_core.log_lines import write_log_lines


def set_up_logging(level: str, always: Mapping[str, str]) -> None:
    """Send everything at `level` and above to standard error; libraries only from WARNING on."""
    write_log_lines(level, always)
    for library in ("kopf", "uvicorn", "kubernetes", "asyncio"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLevelName(level)))
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # what it says of retries comes again as our own error
