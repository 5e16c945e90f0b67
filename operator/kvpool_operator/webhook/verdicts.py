"""Whether the API server lets a pod in as injected, found out by dry runs of the user's own pod: as injected and as it came.

That finds what labels do not show: Pod Security set for the whole cluster, admission policies, quotas, other webhooks. Invariants:
a refusal counts unless the pod as it came is known to be refused in the same words; where it cannot be found out whether
the injected pod is refused, what was found out last counts, and before that it counts as admitted; a verdict holds for pods
that differ in nothing but what is random.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.dry_runs import build_trial

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 30.0
"""How long a verdict holds: for the pods of one Deployment; a new policy is to be seen soon, or pods could not be made."""
REMEMBERED_SECONDS = 600.0
"""For how much longer a refusal counts where nothing newer can be found out."""
AGAIN_WITHIN_SECONDS = 1.5
"""After a review's first dry run the last one must begin: it takes at most 1.25 s of the webhook's 3 s."""
MOST_VERDICTS = 10_000

DryRun = Callable[[Manifest], str]
"""Pod -> "" when the API server admits the pod in a dry run, else its message. Raises when it cannot say."""

_RANDOM_VOLUME = re.compile(r"kube-api-access-[a-z0-9]{5}")
"""Of the volume that the API server adds to every pod for its service account's token."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    refusal: str
    expires: float


class VerdictCache:
    """Verdicts by what was tried; thread-safe."""

    def __init__(self, dry_run: DryRun, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._dry_run = dry_run
        self._clock = clock
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, _Verdict] = {}

    def refusal(self, namespace: str, pod: Manifest, injected: Manifest) -> str:
        """Why the API server refuses `injected` while it lets `pod` in; "" when it does not, or that cannot be found out."""
        plain, changed = build_trial(pod, namespace), build_trial(injected, namespace)
        key = _key(plain, changed)
        known = self._known(key)
        return known.refusal if known is not None else self._ask(key, plain, changed)

    def _known(self, key: bytes) -> _Verdict | None:
        known = self._last(key)
        return known if known is not None and known.expires > self._clock() else None

    def _last(self, key: bytes) -> _Verdict | None:
        with self._lock:
            return self._verdicts.get(key)

    def _ask(self, key: bytes, plain: Manifest, changed: Manifest) -> str:
        began = self._clock()
        refusal = self._try(changed)
        if refusal is None:
            last = self._last(key)
            return last.refusal if last is not None else ""
        of_plain = self._try(plain) if refusal else ""
        if of_plain is None:
            return refusal  # it may be for what was added: a missed cache rather than a missed engine
        if refusal and not of_plain and self._clock() - began < AGAIN_WITHIN_SECONDS:
            again = self._try(changed)  # a quota may have become free in between
            refusal = refusal if again is None else again
        if refusal == of_plain:
            refusal = ""
        if not of_plain:  # else every pod is refused, as by a quota that is used up, which may change at any time
            self._keep(key, refusal)
        return refusal

    def _try(self, trial: Manifest) -> str | None:
        """Message of the refusal, "" without one; None: not known."""
        try:
            return self._dry_run(trial)
        except Exception as error:  # noqa: BLE001 whatever the client raises
            logger.warning("no verdict on a pod of namespace %s: %s", trial["metadata"]["namespace"], error)
            return None

    def _keep(self, key: bytes, refusal: str) -> None:
        now = self._clock()
        with self._lock:
            self._verdicts = {
                asked: each for asked, each in self._verdicts.items() if each.expires + REMEMBERED_SECONDS > now
            }
            if len(self._verdicts) < MOST_VERDICTS:
                self._verdicts[key] = _Verdict(refusal, now + VERDICT_SECONDS)


def _key(plain: Manifest, changed: Manifest) -> bytes:
    text = json.dumps([plain, changed], sort_keys=True)
    return hashlib.sha256(_RANDOM_VOLUME.sub("kube-api-access", text).encode()).digest()
