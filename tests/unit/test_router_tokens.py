"""The cache of token ids, and the deadline of asking for them."""

from __future__ import annotations

import asyncio
from array import array

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from kvpool_router.config import Tokenization
from kvpool_router.tokens import TokenCache, TokenSource


def test_least_recently_used_prompt_is_dropped_first() -> None:
    cache = TokenCache(10)
    cache.put(b"a", array("I", range(5)))
    cache.put(b"b", array("I", range(5)))
    assert cache.get(b"a") is not None
    cache.put(b"c", array("I", range(5)))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None


@given(st.lists(st.tuples(st.binary(max_size=1), st.integers(0, 15)), max_size=40))
def test_cache_never_holds_more_tokens_than_its_bound(puts: list[tuple[bytes, int]]) -> None:
    cache = TokenCache(20)
    latest: dict[bytes, int] = {}
    for key, size in puts:
        cache.put(key, array("I", range(size)))
        latest[key] = size
    held = {key: tokens for key in latest if (tokens := cache.get(key)) is not None}
    assert sum(map(len, held.values())) <= 20
    assert {key: len(tokens) for key, tokens in held.items()} == {key: latest[key] for key in held}


def test_deadline_grows_with_the_prompt_up_to_a_bound() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            source = TokenSource(session, Tokenization())
            assert 0.25 <= source.deadline_seconds(100) < 0.27
            assert 0.5 < source.deadline_seconds(3_000) < source.deadline_seconds(10_000) < 3.0
            assert source.deadline_seconds(10**9) == 3.0

    asyncio.run(run())
