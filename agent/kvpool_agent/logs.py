"""Logging of the agent and of the holder.

Invariant: at INFO and above, a library's chatter is not in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvpool_core.log_lines import write_log_lines


def set_up_logging(level: str, fields: Mapping[str, str]) -> None:
    """Send everything at `level` and above to standard error, libraries' lines from WARNING on only."""
    write_log_lines(level, fields)
    for library in ("uvicorn", "urllib3", "kubernetes"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLevelName(level)))
