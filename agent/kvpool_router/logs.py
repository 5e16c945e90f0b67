"""Logging of the router.

Invariant: a line never holds a secret, a prompt or a tenant; values come through `extra=fields(...)` and are plain.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvpool_core.log_lines import write_log_lines


def fields(**values: str | int | float | bool | None) -> dict[str, dict[str, str | int | float | bool | None]]:
    """The `extra` of a log call."""
    return {"data": values}


def set_up_logging(level: str, always: Mapping[str, str]) -> None:
    """Send everything at `level` and above to standard error, with `always` in every line.

    uvicorn's own lines are silenced: an answer that an engine broke off ends in an exception on purpose, which the
    proxy has logged and counted already. urllib3 warns of each failed try: the pod watch says once what it means.
    """
    write_log_lines(level, always)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
