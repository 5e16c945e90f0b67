"""Events: the story of a pool, for `kubectl describe`.

Invariant: the same thing is told once: an Event's name is made from what it tells, so a second attempt finds it there; and the
same words are not repeated within QUIET_SECONDS.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvpool_operator import names
from kvpool_operator.kube import Kube
from kvpool_operator.kube_errors import ConflictError, KubeError, NotLeaderError
from kvpool_operator.names import Manifest

QUIET_SECONDS = 300.0
REMEMBERED = 4096
MESSAGE_MAX = 1000
"""The API server takes 1024."""

log = logging.getLogger("kvpool.operator.story")


class Storyteller:
    """Writes Events; failing to is not worth failing anything else: the log has what was to be told, and it may be told again."""

    def __init__(
        self, kube: Kube, *, identity: str, monotonic: Callable[[], float], wall_clock: Callable[[], str]
    ) -> None:
        self._kube = kube
        self._identity = identity
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._told: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def tell(self, about: Manifest, reason: str, message: str, *, is_warning: bool, once: str = "") -> None:
        """`about`: an object reference with kind, namespace, name, uid. once: what makes this telling unique for ever; ""
        lets it be told again after a while."""
        words = names.digest([about.get("uid"), reason, message, once])
        if not self._is_news(words, for_ever=bool(once)):
            return
        name = f"{about['name']}.{words if once else names.digest([words, self._wall_clock()])}"
        try:
            self._kube.create(self._event(about, name, reason, message, is_warning=is_warning))
        except ConflictError:
            return
        except NotLeaderError:
            raise
        except KubeError as error:
            self._forget(words)
            data = {"reason": reason, "message": message, "problem": str(error)}
            log.log(logging.WARNING if is_warning else logging.INFO, "could not write an Event", extra={"data": data})

    def _is_news(self, words: str, *, for_ever: bool) -> bool:
        now = self._monotonic()
        with self._lock:
            last = self._told.get(words)
            if last is not None and (for_ever or now - last <= QUIET_SECONDS):
                return False
            self._told[words] = now
            self._told.move_to_end(words)
            while len(self._told) > REMEMBERED:
                self._told.popitem(last=False)
        return True

    def _forget(self, words: str) -> None:
        with self._lock:
            self._told.pop(words, None)

    def _event(self, about: Manifest, name: str, reason: str, message: str, *, is_warning: bool) -> Manifest:
        now = self._wall_clock()
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": about["namespace"], "name": name},
            "involvedObject": about,
            "reason": reason,
            "message": message[:MESSAGE_MAX],
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": self._identity,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
