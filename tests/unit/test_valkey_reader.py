"""Replies of Valkey matched to the blocks they are of, in whatever order they come and whatever is missing."""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from valkey.exceptions import AskError, ResponseError, TryAgainError

from kvpool_agent.valkey_exchange import Reply, Request
from kvpool_agent.valkey_health import ShardHealth
from kvpool_agent.valkey_keys import BlockKey, part_name
from kvpool_agent.valkey_link import ValkeyLink
from kvpool_agent.valkey_metrics import ValkeyMetrics
from kvpool_agent.valkey_payload_sizes import PayloadSizes
from kvpool_agent.valkey_reader import FetchJob, FetchOutcome, LookupJob, ValkeyReader
from kvpool_agent.valkey_settings import ValkeySettings
from kvpool_agent.valkey_value import build_headers, part_sizes

PREFIX = "kvpool:test/pool:"
SIZES = {0: 1000, 1: 64 * 1024}
"""By group: one part, two parts."""
MOVING = (TryAgainError("Multiple keys request during rehashing of slot"), AskError("5 127.0.0.1:7000"))


@dataclass
class Server:
    """What it holds; `moving`: names for which it gives an error."""

    values: dict[bytes, bytes]
    moving: dict[bytes, ResponseError] = field(default_factory=dict)
    deleted: set[bytes] = field(default_factory=set)

    def answer(self, request: Request) -> Reply:
        command, name = request[0], request[1]
        assert isinstance(name, bytes)
        assert len(request) == 2, "one key a command"
        if name in self.moving:
            return self.moving[name]
        if command == b"GET":
            return self.values.get(name)
        if command == b"EXISTS":
            return int(name in self.values)
        assert command == b"UNLINK"
        self.deleted.add(name)
        return int(self.values.pop(name, None) is not None)


class ShuffledLink(ValkeyLink):
    """Answers from a `Server`, in the order that the test drew, and perhaps not to the end."""

    def __init__(self, server: Server, draw: st.DataObject) -> None:
        metrics = ValkeyMetrics(CollectorRegistry())
        health = ShardHealth(breaker_failures=3, breaker_open_seconds=1.0, metrics=metrics)
        super().__init__(ValkeySettings(endpoints=["a:1"]), health, metrics)
        self._server = server
        self._draw = draw

    def ask(
        self,
        shard: str,  # noqa: ARG002 (there is one)
        requests: Sequence[Request],
        *,
        op: str,
        moved_bytes: int = 0,  # noqa: ARG002 (nothing takes time here)
        key: BlockKey | None = None,  # noqa: ARG002 (nothing is probed)
    ) -> Iterator[tuple[int, Reply]]:
        order = self._draw.draw(st.permutations(range(len(requests))))
        answered = len(order) if op == "unlink" else self._draw.draw(st.integers(0, len(order)) | st.just(len(order)))
        for index in order[:answered]:
            yield index, self._server.answer(requests[index])


def key_of(number: int) -> BlockKey:
    return BlockKey(bytes(16), number % 2, number.to_bytes(32, "big"))


def payload_of(key: BlockKey) -> bytes:
    return (key.block_hash * (SIZES[key.group] // 32 + 1))[: SIZES[key.group]]


def values_of(key: BlockKey) -> dict[bytes, bytes]:
    payload = payload_of(key)
    headers, offset, values = build_headers(key, memoryview(payload)), 0, {}
    for part, (header, size) in enumerate(zip(headers, part_sizes(len(payload)), strict=True)):
        values[part_name(PREFIX, key, part)] = header + payload[offset : offset + size]
        offset += size
    return values


KEYS = [key_of(number) for number in range(6)]
NAMES = [name for key in KEYS for name in values_of(key)]


@given(st.data(), st.sets(st.sampled_from(NAMES)), st.dictionaries(st.sampled_from(NAMES), st.sampled_from(MOVING)))
def test_each_reply_counts_for_its_own_part_and_what_moves_is_neither_absent_nor_damaged(
    data: st.DataObject, absent: set[bytes], moving: dict[bytes, ResponseError]
) -> None:
    values = {name: value for key in KEYS for name, value in values_of(key).items() if name not in absent}
    server = Server(dict(values), moving)
    hints: list[tuple[str, list[BlockKey]]] = []
    sizes = PayloadSizes()
    for key in KEYS:
        sizes.learn(key, SIZES[key.group])
    reader = ValkeyReader(
        ShuffledLink(server, data),
        key_prefix=PREFIX,
        may_delete=True,
        sizes=sizes,
        on_hints=lambda kind, keys: hints.append((kind, list(keys))),
    )
    outcomes: dict[BlockKey, FetchOutcome] = {}
    jobs = []
    for key in KEYS:
        target = bytearray(SIZES[key.group])

        def report(outcome: FetchOutcome, _checksum: int, key: BlockKey = key, target: bytearray = target) -> None:
            assert key not in outcomes
            outcomes[key] = outcome
            assert target == (payload_of(key) if outcome is FetchOutcome.OK else bytes(len(target)))

        jobs.append(FetchJob(key, memoryview(target), report, lambda: False))
    reader.fetch_batch("a:1", jobs)
    found: list[bool] = []
    reader.lookup_batch("a:1", [LookupJob(KEYS, found.extend)])
    gone = {key for kind, keys in hints if kind == "removed" for key in keys}
    for number, key in enumerate(KEYS):
        names = set(values_of(key))
        if outcomes[key] is FetchOutcome.OK or found[number]:
            assert not names & (absent | set(moving))
        if key in gone:
            assert names & absent - set(moving), "only a part that a node said it lacks makes a block absent"
        if names & server.deleted:
            assert names & absent - set(moving)
            assert outcomes[key] is FetchOutcome.MISS
