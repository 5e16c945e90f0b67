"""What tests and demo ask of a vLLM engine over HTTP, wherever it runs.

Invariant: all traffic goes through the given transport, so an engine in a pod is asked exactly as one on this machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tests.harness.web import Reply, Streamed

BLOCK_SIZE = 32


class Transport(Protocol):
    """How requests travel: `tests.harness.web` from this machine."""

    def request(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = ...,
    ) -> Reply:
        """One request; OSError without an answer."""

    def stream(
        self, url: str, body: object, *, headers: Mapping[str, str] | None = None, seconds: float = ...
    ) -> Streamed:
        """POST and read Server-Sent Events until they end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated. Bit for bit comparable: token texts and their log probabilities as floats."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    @staticmethod
    def of(choice: dict[str, Any]) -> Answer:
        """From a completion's choice (or the pieces of a stream put together)."""
        logprobs = choice["logprobs"]
        return Answer(tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]))


@dataclass(frozen=True, slots=True)
class Timed:
    """A streamed completion: answer, seconds to the first token, prompt tokens, and the router's header if there was one."""

    answer: Answer
    ttft_seconds: float
    prompt_tokens: int
    route: str


class EngineClient:
    """One engine's OpenAI API. `endpoint`: ip:port, as router and agents name it."""

    def __init__(self, name: str, endpoint: str, *, served_name: str, transport: Transport) -> None:
        self.name = name
        self.endpoint = endpoint
        self.url = f"http://{endpoint}"
        self.served_name = served_name
        self._transport = transport

    def wait_until(self, ready: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Poll until `ready()`; TimeoutError names what did not come."""
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name}: no {what} within {seconds:g} s")
            time.sleep(0.05)

    def is_healthy(self) -> bool:
        """Whether it serves."""
        try:
            return self._transport.request("GET", f"{self.url}/health", seconds=2.0).status == 200
        except OSError:
            return False

    def wait_identified(self, seconds: float = 60.0) -> None:
        """Wait until its domain is known; asks for a token now and then, since an idle engine reports nothing."""
        self.wait_until(self._is_identified, seconds=seconds, what="known domain")

    def _is_identified(self) -> bool:
        self.complete("warm", max_tokens=1)
        return self.metric("kvpool_connector_domain_known") == 1.0

    def body(self, prompt: str | list[int], *, max_tokens: int, **more: object) -> dict[str, object]:
        """A greedy completion with log probabilities."""
        return {
            "model": self.served_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            **more,
        }

    def complete(self, prompt: str | list[int], *, max_tokens: int = 64, url: str = "", **more: object) -> Answer:
        """The answer of this engine, or through the router at `url`."""
        reply = self._transport.request(
            "POST", f"{url or self.url}/v1/completions", self.body(prompt, max_tokens=max_tokens, **more)
        )
        assert reply.status == 200, f"{self.name} answered {reply.status}: {reply.body[:500]!r}"
        return Answer.of(reply.json()["choices"][0])

    def complete_timed(self, prompt: str | list[int], *, max_tokens: int = 64, url: str = "", **more: object) -> Timed:
        """The same, streamed and timed."""
        body = self.body(prompt, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}, **more)
        reply = self._transport.stream(f"{url or self.url}/v1/completions", body)
        assert reply.status == 200, f"{self.name} answered {reply.status}: {reply.events}"
        pieces = [event["choices"][0]["logprobs"] for event in reply.events if event.get("choices")]
        answer = Answer(
            tuple(token for piece in pieces if piece for token in piece["tokens"]),
            tuple(value for piece in pieces if piece for value in piece["token_logprobs"]),
        )
        usage = next(event["usage"] for event in reversed(reply.events) if event.get("usage"))
        return Timed(answer, reply.first_event_seconds, usage["prompt_tokens"], reply.headers.get("x-kvpool-route", ""))

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a prompt, the engine's own."""
        return self._tokenize({"prompt": prompt})

    def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The same of a conversation, with the start of the answer."""
        return self._tokenize({"messages": messages})

    def _tokenize(self, what: Mapping[str, object]) -> list[int]:
        reply = self._transport.request("POST", f"{self.url}/tokenize", {"model": self.served_name, **what})
        assert reply.status == 200, f"{self.name} answered {reply.status}: {reply.body[:300]!r}"
        return [int(token) for token in reply.json()["tokens"]]

    def reset_own_cache(self) -> None:
        """Forget the engine's own prefix cache; the tiers keep theirs."""
        self.wait_until(lambda: self._try_reset(""), seconds=30.0, what="reset of the prefix cache")

    def reset_all_caches(self) -> None:
        """What vLLM does with a weight update: the connector's cache is reset too."""
        self.wait_until(lambda: self._try_reset("?reset_external=true"), seconds=30.0, what="reset of all caches")

    def _try_reset(self, query: str) -> bool:
        reply = self._transport.request("POST", f"{self.url}/reset_prefix_cache{query}")
        return reply.status == 200 and b"false" not in reply.body.lower()

    def metrics(self) -> str:
        """The engine's /metrics."""
        return self._transport.request("GET", f"{self.url}/metrics").body.decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` whose labels include `labels`; 0 when there are none."""
        return metric_sum(self.metrics(), name, **labels)


def metric_sum(text: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples in Prometheus text format."""
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total
