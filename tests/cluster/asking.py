"""Asks a service without end while something is done to what stands behind or beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PAUSE_SECONDS = 0.1


@dataclass(slots=True)
class Asked:
    """How often it answered, and what was wrong with the other answers."""

    answered: int = 0
    problems: list[str] = field(default_factory=list)


@contextmanager
def asking(*questions: Callable[[], object]) -> Iterator[Asked]:
    """Each question, which raises when it is not answered well, is asked again and again until the block ends."""
    asked, ended = Asked(), threading.Event()

    def ask(question: Callable[[], object]) -> None:
        while not ended.wait(PAUSE_SECONDS):
            try:
                question()
                asked.answered += 1
            except Exception as error:  # noqa: BLE001  # whatever it is, a user would have seen it
                asked.problems.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask, args=(question,), daemon=True) for question in questions]
    for thread in threads:
        thread.start()
    try:
        yield asked
    finally:
        ended.set()
        for thread in threads:
            thread.join()
