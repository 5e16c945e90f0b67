"""What an adapter's files were when the engine loaded it, which may be long before its first request.

Invariant: the state of the first load of a path is kept for good: later contents of the same path are told from it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

_states: dict[str, tuple[int, ...]] = {}


def watch(engine_core: Any) -> None:
    """From now on note the state of each adapter that this class of vLLM's is told to load; its workers read the files then."""
    load = engine_core.add_lora

    @functools.wraps(load)
    def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        path = lora_request.lora_path
        is_first = path not in _states
        state_at_load(path)
        try:
            return load(self, lora_request, *args, **kwargs)
        except Exception:
            if is_first:
                _states.pop(path, None)  # nothing was loaded
            raise

    engine_core.add_lora = add_lora


def state_at_load(path: str) -> tuple[int, ...]:
    """As it was when the engine was told to load the adapter; else as it is now: the engine reads it for a first request."""
    if path not in _states:
        _states[path] = state_of(path)
    return _states[path]


def state_of(path: str) -> tuple[int, ...]:
    """What changes when an adapter's files are replaced or written to: a few `stat` calls; () when there is none to read."""
    try:
        statuses = [file.stat() for file in sorted(Path(path).iterdir())]
    except OSError:
        return ()
    return tuple(number for status in statuses for number in (status.st_ino, status.st_size, status.st_ctime_ns))
