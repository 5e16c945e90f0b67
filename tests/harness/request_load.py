"""Clients that send completions while parts are killed.

Invariant: a client tries again only where the connection was refused, so every other failure is one that a user would see.
"""

from __future__ import annotations

import http.client
import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.harness.engine_client import Transport

RETRY_SECONDS = 60.0
IN_FLIGHT_SECONDS = 30.0


@dataclass(slots=True)
class Sent:
    """A request: when it was sent, when it ended (monotonic seconds; inf: it is in flight), and what a user would complain of."""

    started: float
    ended: float = math.inf
    problem: str = ""


class RequestLoad:
    """`clients` threads that take prompts through the router at `url`, until there are none or they are told to end."""

    def __init__(self, transport: Transport, url: str, *, model: str, prompts: Iterable[str], clients: int) -> None:
        self.clients = clients
        self.sent: list[Sent] = []
        self._kills: list[tuple[float, float]] = []
        self._transport = transport
        self._url = url
        self._model = model
        self._prompts = iter(prompts)
        self._is_ending = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    @property
    def done(self) -> int:
        """How many ended, well or not."""
        return sum(one.ended < math.inf for one in list(self.sent))

    @property
    def in_flight(self) -> int:
        """How many are under way."""
        return sum(one.ended == math.inf for one in list(self.sent))

    @property
    def failures(self) -> list[Sent]:
        """Those that a user would complain of."""
        return [one for one in list(self.sent) if one.problem]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Ends when every prompt was sent."""
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Send no more; ends when what was sent is answered."""
        self._is_ending = True
        self.join()

    def in_flight_at(self, moment: float) -> int:
        """How many were under way at a time (monotonic seconds)."""
        return sum(one.started <= moment <= one.ended for one in list(self.sent))

    def wait_in_flight(self) -> None:
        """Until a request is under way; TimeoutError when the load has ended or does not get on."""
        end = time.monotonic() + IN_FLIGHT_SECONDS
        while not self.in_flight:
            if time.monotonic() > end:
                raise TimeoutError(f"no request is in flight within {IN_FLIGHT_SECONDS:g} s: {self.done} are done")
            time.sleep(0.001)

    @contextmanager
    def kill(self) -> Iterator[None]:
        """Inside, a router or an engine is killed: requests in flight then may fail, and only these."""
        begins = time.monotonic()
        yield
        self._kills.append((begins, time.monotonic()))

    def assert_only_in_flight_failed(self, *kill: float) -> None:
        """Nothing failed but what was in flight at a kill; `kill`: of one more, when it began and when all was dead."""
        kills = [*self._kills, kill] if kill else self._kills
        unexcused = [
            one
            for one in self.failures
            if not any(one.started <= dead and one.ended >= begins for begins, dead in kills)
        ]
        assert not unexcused, f"failed though not in flight on what was killed: {unexcused}"
        # one in flight per client, and one into a dying router's backlog
        assert len(self.failures) <= 2 * self.clients * len(kills), self.failures

    def _run(self) -> None:
        while True:
            with self._lock:
                prompt = None if self._is_ending else next(self._prompts, None)
                if prompt is None:
                    return
                sent = Sent(time.monotonic())
                self.sent.append(sent)
            sent.problem = self._ask(prompt, sent.started)
            sent.ended = time.monotonic()

    def _ask(self, prompt: str, started: float) -> str:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        while True:
            try:
                reply = self._transport.request("POST", f"{self._url}/v1/completions", body)
            except ConnectionRefusedError:
                if time.monotonic() - started > RETRY_SECONDS:
                    return "refused for too long"
                time.sleep(0.05)
                continue
            except (OSError, http.client.HTTPException) as error:
                return f"{type(error).__name__}: {error}"
            return "" if reply.status == 200 else f"status {reply.status}: {reply.body[:200]!r}"
