"""Token ids of a prompt, asked from an engine's /tokenize, in time or not at all.

Invariant: `fetch` never takes longer than its deadline and never raises for what an engine does: routing goes on
without tokens. Answers are kept in a cache bounded by the number of tokens in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import aiohttp
import msgspec

from kvpool_router.config import Tokenization
from kvpool_router.endpoints import EndpointState
from kvpool_router.request_body import RenderedPrompt
from kvpool_router.upstream import sendable

log = logging.getLogger(__name__)


class _Answer(msgspec.Struct):
    tokens: list[int]


_decoder = msgspec.json.Decoder(_Answer)


class TokenCache:
    """Recent answers, the least recently used dropped first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()

    def get(self, key: bytes) -> array[int] | None:
        """The tokens kept under `key`."""
        tokens = self._entries.get(key)
        if tokens is not None:
            self._entries.move_to_end(key)
        return tokens

    def put(self, key: bytes, tokens: array[int]) -> None:
        """Keep `tokens`, dropping others for them; more than fit at all are not kept."""
        if len(tokens) > self._max_tokens:
            return
        self._held += len(tokens) - len(self._entries.pop(key, ()))
        self._entries[key] = tokens
        while self._held > self._max_tokens:
            _, dropped = self._entries.popitem(last=False)
            self._held -= len(dropped)


class TokenSource:
    """Asks engines."""

    def __init__(self, session: aiohttp.ClientSession, settings: Tokenization) -> None:
        self._session = session
        self._settings = settings
        self._cache = TokenCache(settings.cache_tokens)
        self._late = False

    def deadline_seconds(self, chars: int) -> float:
        """How long a prompt of this size may take."""
        scaled = self._settings.base_seconds + self._settings.per_thousand_chars_seconds * chars / 1000
        return min(scaled, self._settings.max_seconds)

    async def fetch(
        self, prompt: RenderedPrompt, endpoints: Sequence[EndpointState], *, authorization: str | None
    ) -> array[int] | None:
        """The prompt's tokens from the first of `endpoints` that answers; None when none does in time.

        `authorization` is the client's header: an engine that asks for a key gets the client's own.
        """
        key = hashlib.blake2b(prompt.payload, digest_size=16).digest()
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        try:
            async with asyncio.timeout(self.deadline_seconds(prompt.chars)):
                tokens = await self._ask_each(prompt, endpoints, authorization)
        except TimeoutError:
            tokens = None
        self._tell(is_late=tokens is None)
        if tokens is not None:
            self._cache.put(key, tokens)
        return tokens

    def _tell(self, *, is_late: bool) -> None:
        """One line when tokens begin to be missing, and one when they come again."""
        if is_late == self._late:
            return
        self._late = is_late
        if is_late:
            log.warning("no tokens in time from any engine: such requests go by load")
        else:
            log.info("tokens come in time again")

    async def _ask_each(
        self, prompt: RenderedPrompt, endpoints: Sequence[EndpointState], authorization: str | None
    ) -> array[int] | None:
        headers = {"Content-Type": "application/json"}
        if authorization:
            headers["Authorization"] = authorization
        for endpoint in endpoints:
            try:
                return await self._ask(f"{endpoint.spec.url}/tokenize", prompt.payload, headers)
            except (aiohttp.ClientError, msgspec.MsgspecError, OverflowError, OSError):
                continue
        return None

    async def _ask(self, url: str, payload: bytes, headers: dict[str, str]) -> array[int] | None:
        async with self._session.post(url, data=sendable(payload), headers=headers) as response:
            if response.status != 200:
                return None
            return array("I", _decoder.decode(await response.read()).tokens)
