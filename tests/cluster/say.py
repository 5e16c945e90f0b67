"""One line of progress for each stage, with its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(line: str) -> None:
    """One line of progress."""
    print(f"cluster: {line}", file=sys.stderr, flush=True)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Says how long the stage took when it is over."""
    started = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - started:.1f} s")
