"""Any sequence of well-formed or nonsensical messages ends at worst the connection that sent it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool_core import wire
from tests.unit.agent_peer import LAYOUT, Engine, Node, Peer, chain, hello, running_node, wait_for

_any_int = st.one_of(st.integers(-2, 5), st.sampled_from([-(2**63), 2**31, 2**32, 2**63, 2**64 - 1]))
_hash = st.one_of(st.sampled_from(chain(1, 4)), st.binary(max_size=33), st.just(b""))
_domain = st.one_of(st.just(b"d" * 16), st.binary(max_size=17))
_rid = st.integers(0, 3)
_names = st.one_of(st.sampled_from(["", "a", "b"]), st.text(max_size=5))
_layouts = st.lists(st.builds(wire.GroupLayout, _any_int, _any_int, _any_int, _any_int), max_size=3)
_messages = st.one_of(
    st.builds(wire.RegisterScheduler, _rid, st.binary(max_size=17), _names),
    st.builds(wire.RegisterWorker, _rid, st.binary(max_size=17), st.binary(max_size=17), _layouts),
    st.builds(wire.RegisterWorker, _rid, st.just(b"w" * 16), st.just(b""), st.just([LAYOUT])),
    st.builds(
        wire.Prefetch,
        _rid,
        _names,
        _domain,
        st.booleans(),
        st.lists(st.builds(wire.GroupKeys, _any_int, st.lists(_hash, max_size=4), _any_int), max_size=2),
        st.floats(),
    ),
    st.builds(wire.Release, _rid, st.lists(_names, max_size=3)),
    st.builds(
        wire.Reserve,
        _rid,
        _any_int,
        _domain,
        st.booleans(),
        st.lists(st.builds(wire.StoreKey, _any_int, _hash, _hash, _any_int), max_size=3),
    ),
    st.builds(wire.Ack, _rid, _any_int),
    st.builds(wire.Abort, _rid, _any_int),
    st.builds(
        wire.Announce,
        _rid,
        st.lists(_names, max_size=2),
        st.lists(_any_int, max_size=2),
        st.lists(_any_int, max_size=2),
    ),
    st.builds(
        wire.GpuEvents,
        _rid,
        st.text("srcx", max_size=3),
        st.lists(_any_int, max_size=3),
        st.lists(_any_int, max_size=3),
    ),
    st.builds(
        wire.GpuSnapshot,
        _rid,
        st.lists(_any_int, max_size=2),
        st.lists(_any_int, max_size=2),
        st.lists(_any_int, max_size=2),
    ),
    st.builds(
        wire.FileDigests,
        _rid,
        st.lists(st.builds(wire.FileKey, _any_int, _any_int, _any_int, _any_int, st.binary(max_size=3)), max_size=2),
        st.lists(st.binary(max_size=16), max_size=2),
    ),
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n"), extra="lease_seconds: 1\nwrite_lease_seconds: 1\n") as running:
        yield running


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(messages=st.lists(_messages, max_size=8), role=st.sampled_from(["scheduler", "worker"]), known=st.booleans())
def test_no_message_harms_the_agent(node: Node, messages: list[wire.Message], role: str, known: bool) -> None:
    peer = Peer(node.socket_path)
    other = Peer(node.socket_path)
    try:
        peer.send(hello("fuzz", role))
        if known:
            other.send(hello("fuzz", "worker" if role == "scheduler" else "scheduler"))
            scheduler, worker = (peer, other) if role == "scheduler" else (other, peer)
            scheduler.send(wire.RegisterScheduler(0, b"s" * 16, ""))
            worker.send(wire.RegisterWorker(0, b"w" * 16, b"", [LAYOUT]))
            while peer.receive(wire.Domain).state != "known":
                pass
        for message in messages:
            peer.send(message)
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        peer.close()
        other.close()


def test_agent_is_as_good_as_new_afterwards(node: Node) -> None:
    internal = {name: count for name, count in _counters(node).items() if "internal_errors" in name}
    assert not any(internal.values()), internal
    engine = Engine(node, "after the storm")
    engine.store(1, chain(7, 3))
    wait_for(lambda: engine.hits("r", chain(7, 3)) == 3, "the blocks")
    engine.close()
    wait_for(lambda: node.slots()["writing"] == node.slots()["quarantined"] == 0, "no slot in between")
    wait_for(lambda: node.arena()["leases"] == 0, "no lease left")


def _counters(node: Node) -> dict[str, float]:
    counters = node.stats()["counters"]
    assert isinstance(counters, dict)
    return counters
