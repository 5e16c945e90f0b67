"""Whether a namespace lets injected pods in, found out by dry runs of two sample pods.

That finds what labels do not show: cluster-wide defaults and other policies. Invariants: only a pod that is refused while
its plain twin is admitted counts; what is not known counts as admitted; a verdict holds for just what was tried, so pools
with another image or folder have their own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.sample import sample_pods
from kvpool_operator.webhook.views import PoolView

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 300.0
"""How long a verdict holds; policies change seldom, and a wrong one only costs the cache."""

DryRun = Callable[[str, Manifest], str]
"""(namespace, pod) -> "" when the API server admits the pod in a dry run, else its message. Raises when it cannot say."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A namespace and the two sample pods, as JSON."""

    namespace: str
    plain: str
    injected: str


def _question(namespace: str, pool: PoolView) -> _Question:
    plain, injected = sample_pods(pool)
    return _Question(namespace, json.dumps(plain), json.dumps(injected))


@dataclass(frozen=True, slots=True)
class _Verdict:
    refusal: str
    expires: float


class VerdictCache:
    """Verdicts by namespace and what is put into the pod; thread-safe."""

    def __init__(self, dry_run: DryRun, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._dry_run = dry_run
        self._clock = clock
        self._lock = threading.Lock()
        self._verdicts: dict[_Question, _Verdict] = {}

    def refresh(self, namespaces: Iterable[str], pool: PoolView) -> None:
        """Ask for every namespace whose verdict is older than half its life."""
        for namespace in namespaces:
            question = _question(namespace, pool)
            known = self._known(question)
            if known is None or known.expires - self._clock() < VERDICT_SECONDS / 2:
                self._ask(question)

    def refusal(self, namespace: str, pool: PoolView) -> str:
        """Why injected pods are refused; "" when they are not, or when that cannot be found out."""
        question = _question(namespace, pool)
        known = self._known(question) or self._ask(question)
        return known.refusal if known is not None else ""

    def _known(self, question: _Question) -> _Verdict | None:
        with self._lock:
            known = self._verdicts.get(question)
        return known if known is not None and known.expires > self._clock() else None

    def _ask(self, question: _Question) -> _Verdict | None:
        namespace = question.namespace
        try:
            refusal = self._dry_run(namespace, json.loads(question.injected))
            if refusal and self._dry_run(namespace, json.loads(question.plain)):
                refusal = ""  # every pod is refused, as by a quota that is used up: not for what we add
        except Exception as error:  # noqa: BLE001 whatever the client raises: not known
            logger.warning("no verdict on namespace %s: %s", namespace, error)
            return None
        verdict = _Verdict(refusal, self._clock() + VERDICT_SECONDS)
        with self._lock:
            self._verdicts = {asked: each for asked, each in self._verdicts.items() if each.expires > self._clock()}
            self._verdicts[question] = verdict
        return verdict
