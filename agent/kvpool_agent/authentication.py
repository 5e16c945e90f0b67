"""Lets engines in by their pod's token: who they are, and whether their namespace may use the pool.

Invariant: a pod is let in only on the API server's word, at most FRESH_SECONDS old while the server answers; while it
does not, an earlier word counts until shortly before the token ends. The loop never waits: reviews run on threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.pod_identity import TOKEN_MISSING, PodIdentity, Refusal, not_allowed, read_review, token_expiry
from kvpool_agent.token_review import ReviewUnavailableError
from kvpool_core.namespace_file import NamespaceFile
from kvpool_core.wire import AUTHENTICATION_UNAVAILABLE

FRESH_SECONDS = 60.0
"""Scheduler and workers of one engine, and an agent's restart, cost one review; a revoked token is noticed after this."""
EXPIRY_MARGIN_SECONDS = 10.0
UNDATED_SECONDS = 600.0
"""How long a review of a token counts that does not say when it ends."""
CACHE_MAX = 4096
REVIEW_THREADS = 4
REVIEW_DEADLINE_SECONDS = 4.5
"""On top of the request's own timeouts: name resolution has none. An engine waits 5 s for its Welcome."""
UNAVAILABLE = Refusal(
    AUTHENTICATION_UNAVAILABLE, "the API server gives no verdict on the token now: the engine serves on and tries again"
)

Review = Callable[[str, str], dict[str, Any]]
"""(token, audience) -> status of a TokenReview; blocks; ReviewUnavailableError without a verdict."""

log = logging.getLogger("kvpool.agent.authentication")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the API server said at `at` (monotonic seconds) on a token that ends at `expiry` (Unix seconds; None: undated).

    The wall clock may be set back: it judges nothing but the token's own end.
    """

    pod: PodIdentity
    at: float
    expiry: float | None

    def is_fresh(self, *, now: float, wall: float) -> bool:
        """Whether it counts without asking again."""
        return now - self.at < FRESH_SECONDS and self.counts(now=now, wall=wall)

    def counts(self, *, now: float, wall: float) -> bool:
        """Whether it counts while the API server does not answer."""
        if self.expiry is None:
            return now - self.at < UNDATED_SECONDS
        return wall < self.expiry - EXPIRY_MARGIN_SECONDS


class Authenticator:
    """Reviews tokens, remembers verdicts by the token's hash, asks once for several connections with one token."""

    def __init__(self, review: Review, *, audience: str, namespaces: NamespaceFile, metrics: AgentMetrics) -> None:
        self._review = review
        self._audience = audience
        self._namespaces = namespaces
        self._metrics = metrics
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[PodIdentity | Refusal]] = {}
        self._threads = ThreadPoolExecutor(REVIEW_THREADS, thread_name_prefix="token-review")
        self._told = ""
        self.refresh_namespaces()

    async def admit(self, token: str) -> PodIdentity | Refusal:
        """The pod whose token this is, or why it is not let in."""
        outcome = await self._identify(token)
        if isinstance(outcome, PodIdentity) and not self.is_allowed(outcome):
            outcome = not_allowed(outcome)
        self._metrics.authentications.labels(outcome.code if isinstance(outcome, Refusal) else "admitted").inc()
        return outcome

    def is_allowed(self, pod: PodIdentity) -> bool:
        """Whether the pod's namespace may use the pool by now."""
        return pod.namespace in self._namespaces.allowed

    def refresh_namespaces(self) -> bool:
        """Read the allowed namespaces anew; whether they changed."""
        changed = self._namespaces.refresh()
        if self._namespaces.problem != self._told:
            self._told = self._namespaces.problem
            if self._told:
                log.warning("allowed namespaces stay as they were", extra={"data": {"reason": self._told}})
        return changed

    def close(self) -> None:
        """End the threads; a review under way is not waited for."""
        for task in self._asking.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _identify(self, token: str) -> PodIdentity | Refusal:
        if not token:
            return Refusal(TOKEN_MISSING, "Hello brought no token: set KVPOOL_TOKEN_FILE to the projected token")
        key = hashlib.sha256(token.encode()).digest()
        known = self._verdicts.get(key)
        if known is not None and known.is_fresh(now=time.monotonic(), wall=time.time()):
            return known.pod
        task = self._asking.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(key, token), name="token review")
            self._asking[key] = task
            task.add_done_callback(lambda _task: self._asking.pop(key, None))
        return await asyncio.shield(task)

    async def _ask(self, key: bytes, token: str) -> PodIdentity | Refusal:
        started = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            asked = loop.run_in_executor(self._threads, self._review, token, self._audience)
            status = await asyncio.wait_for(asked, REVIEW_DEADLINE_SECONDS)
        except (ReviewUnavailableError, TimeoutError) as error:
            return self._without_verdict(key, str(error) or "no answer in time")
        finally:
            self._metrics.token_review_seconds.observe(time.monotonic() - started)
        outcome = read_review(status, self._audience)
        if isinstance(outcome, PodIdentity):
            self._remember(key, outcome, token)
        else:
            self._verdicts.pop(key, None)
            log.warning("refused a token", extra={"data": {"code": outcome.code, "reason": outcome.message}})
        return outcome

    def _without_verdict(self, key: bytes, reason: str) -> PodIdentity | Refusal:
        known = self._verdicts.get(key)
        is_known = known is not None and known.counts(now=time.monotonic(), wall=time.time())
        log.warning("no verdict on a token", extra={"data": {"reason": reason, "known_from_before": is_known}})
        return known.pod if known is not None and is_known else UNAVAILABLE

    def _remember(self, key: bytes, pod: PodIdentity, token: str) -> None:
        self._verdicts[key] = Verdict(pod, time.monotonic(), token_expiry(token))
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > CACHE_MAX:
            self._verdicts.popitem(last=False)
