"""Never a block of another model; no blocks at all where the weights cannot be identified or the set-up is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from kvpool_core.block_hash import block_hashes
from tests.engine.answers import Loads, reference_pair
from tests.engine.conftest import Starting, fresh_prompt, settle, wait_for
from tests.harness.engine import Engine
from tests.harness.engine_client import BLOCK_SIZE
from tests.harness.stack import Stack


@pytest.fixture(scope="module")
def strangers(strangers_starting: Starting) -> Iterator[tuple[Engine, ...]]:
    """Beside node a: other weights under the same served name, weights that are no files, another hash algorithm."""
    try:
        twin, dummy, wrong = strangers_starting.wait()
        twin.wait_identified()
        yield twin, dummy, wrong
    finally:
        strangers_starting.kill()


def test_same_shapes_and_name_with_other_weights_share_nothing(fleet: Stack, strangers: tuple[Engine, ...]) -> None:
    a, twin, prompt = fleet.engines[0], strangers[0], fresh_prompt()
    theirs = a.complete(prompt)
    settle(fleet.nodes[0])
    loads = Loads(twin)
    own = twin.complete(prompt)
    assert loads.by_tier() == {"ram": 0, "valkey": 0}
    assert own != theirs
    settle(fleet.nodes[0])
    engines = {engine["endpoint"]: engine for engine in fleet.nodes[0].stats()["engines"]}
    assert engines[a.endpoint]["domain"] != engines[twin.endpoint]["domain"]
    assert engines[a.endpoint]["served_names"] == engines[twin.endpoint]["served_names"]
    for engine in (a, twin):
        engine.reset_own_cache()
    assert twin.complete(prompt, max_tokens=1).tokens == own.tokens[:1]
    assert loads.by_tier()["ram"] > 0


def test_blocks_of_twins_lie_side_by_side_in_valkey_and_neither_loads_the_others(
    fleet: Stack, strangers: tuple[Engine, ...], reference: Engine
) -> None:
    (a, b), twin, prompt, other = fleet.engines, strangers[0], fresh_prompt(), fresh_prompt()
    expected, also_expected = reference_pair(reference, prompt).cold, reference_pair(reference, other).cold
    for text in (prompt, other):
        twin.complete(text)
    settle(fleet.nodes[0])
    loads_of_a, loads_of_b = Loads(a), Loads(b)
    assert a.complete(prompt) == expected  # beside the twin, over the same arena
    assert b.complete(other) == also_expected  # on the other node, over the same Valkey
    assert loads_of_a.by_tier() == loads_of_b.by_tier() == {"ram": 0, "valkey": 0}

    settle(fleet.nodes[0])
    domains = {e["endpoint"]: e["domain"] for e in fleet.nodes[0].stats()["engines"]}
    host, port = fleet.valkey.endpoints[0].split(":")
    with redis.RedisCluster(host=host, port=int(port)) as client:
        for block_hash in block_hashes(a.tokenize(prompt), block_size=BLOCK_SIZE):
            keys = {
                domain: f"kvpool:local/demo:{domain}:0:{{{block_hash.hex()}}}"
                for domain in (domains[a.endpoint], domains[twin.endpoint])
            }
            values = [client.get(key) for key in keys.values()]
            assert None not in values
            assert len(set(values)) == 2, f"one block for two models: {keys}"


def test_weights_that_cannot_be_identified_neither_load_nor_store(fleet: Stack, strangers: tuple[Engine, ...]) -> None:
    dummy, prompt = strangers[1], fresh_prompt()
    wait_for(lambda: "cannot be identified" in dummy.program.log_text(), seconds=30, what="a log line that says why")
    first = dummy.complete(prompt)
    dummy.reset_own_cache()
    assert dummy.complete(prompt) == first
    assert dummy.metric("kvpool_connector_offered_blocks_total") == 0
    assert dummy.metric("kvpool_connector_loaded_tokens_total") == 0
    assert dummy.metric("kvpool_connector_domain_known") == 0
    assert dummy.program.log_text().count("cannot be identified") == 1
    reasons = [e["reason"] for e in fleet.nodes[0].stats()["engines"] if e["endpoint"] == dummy.endpoint]
    assert any("cannot be identified" in reason for reason in reasons)


def test_engine_with_an_unsupported_setting_serves_inert(strangers: tuple[Engine, ...], reference: Engine) -> None:
    wrong, prompt = strangers[2], fresh_prompt()
    assert wrong.complete(prompt) == reference_pair(reference, prompt).cold
    assert wrong.metric("kvpool_connector_inert") >= 1
    assert "sha256_cbor" in wrong.metrics()
    assert wrong.program.log_text().count("kvpool: inert") == 2  # one line of the scheduler, one of the worker


def test_engine_whose_external_cache_was_reset_keeps_its_blocks_to_itself_and_says_so(
    fleet: Stack, strangers: tuple[Engine, ...]
) -> None:
    """The last of the file: nothing makes the engine's domain shared again."""
    twin, before, after = strangers[0], fresh_prompt(), fresh_prompt()
    assert twin.metric("kvpool_connector_domain_private") == 0
    twin.complete(before)
    settle(fleet.nodes[0])
    twin.reset_all_caches()
    loads = Loads(twin)
    first = [twin.complete(prompt) for prompt in (before, after)]
    assert loads.by_tier() == {"ram": 0, "valkey": 0}
    assert twin.metric("kvpool_connector_domain_private") == 1
    settle(fleet.nodes[0])
    twin.reset_own_cache()
    assert [twin.complete(prompt, max_tokens=1).tokens for prompt in (before, after)] == [
        answer.tokens[:1] for answer in first
    ]
    assert loads.by_tier()["ram"] > 0
