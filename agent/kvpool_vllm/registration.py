"""Registration of the arena's mapping with the device's driver, in the background: it may take seconds.

Invariant: after `undo` nothing is registered any more, so the mapping may go.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_vllm.copiers import Copier

logger = logging.getLogger("vllm.kvpool")


class Registration:
    """Begun at construction; copies work before it is done, only slower."""

    def __init__(self, copier: Copier, address: int, size: int) -> None:
        self._copier = copier
        self._registered: list[int] = []
        self._thread = threading.Thread(target=self._run, args=(address, size), name="kvpool-register", daemon=True)
        self._thread.start()

    def undo(self) -> None:
        """Wait until it is done, then take it back."""
        self._thread.join()
        try:
            self._copier.unregister(self._registered)
        except Exception:
            logger.exception("kvpool: the arena's registration could not be undone")

    def _run(self, address: int, size: int) -> None:
        try:
            self._registered = self._copier.register(address, size)
        except Exception:
            logger.exception("kvpool: the arena could not be registered; copies are slower")
