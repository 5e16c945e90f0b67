"""Writing blocks to Valkey, in batches of one shard, on the tier's threads.

Invariant: after a `read()` that gave a view, `done` is called exactly once; part 0 is written after part 1, so a block
whose part 0 is there was whole; a payload that does not have its block's checksum is never given a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from valkey.exceptions import ResponseError

from kvpool_agent.valkey_connection import Failure, failure_of
from kvpool_agent.valkey_exchange import Reply, Request
from kvpool_agent.valkey_keys import BlockKey, part_name
from kvpool_agent.valkey_link import ValkeyLink
from kvpool_agent.valkey_payload_sizes import PayloadSizes
from kvpool_agent.valkey_value import HEADER_BYTES, build_headers, part_sizes
from kvpool_core.errors import ValueFormatError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WriteItem:
    """A block to write.

    read: called on the tier's thread, pins the payload and gives it; None = it is gone, nothing is written.
    done: called with whether the block is in Valkey now, after every `read` that gave a view.
    payload_bytes: for the queue's limit; 0 = as the last block of its group.
    checksum: xxh3-64 of the payload when the block was made; None = not known.
    damaged: called on the tier's thread, before `done`, when the payload does not have that checksum any more.
    """

    key: BlockKey
    read: Callable[[], memoryview | None]
    done: Callable[[bool], None]
    payload_bytes: int = 0
    checksum: int | None = None
    damaged: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Pinned:
    item: WriteItem
    payload: memoryview
    headers: list[bytes] = field(default_factory=list)
    is_stored: bool = False


class ValkeyWriter:
    """Runs batches of items. `on_hints(kind, keys)` may be called from any thread."""

    def __init__(
        self,
        link: ValkeyLink,
        *,
        key_prefix: str,
        ttl_seconds: int | None,
        sizes: PayloadSizes,
        on_hints: Callable[[str, Sequence[BlockKey]], None],
    ) -> None:
        self._link = link
        self._metrics = link.metrics
        self._prefix = key_prefix
        self._ttl = None if ttl_seconds is None else str(ttl_seconds).encode()
        self._sizes = sizes
        self._on_hints = on_hints

    def write_batch(self, shard: str, items: Sequence[WriteItem]) -> None:
        """Write what is still there and not in Valkey yet."""
        if not self._link.health.is_usable(shard):
            self._metrics.dropped("breaker_open", len(items))
            return
        pinned: list[_Pinned] = []
        try:
            for item in items:
                if (payload := item.read()) is not None:
                    pinned.append(_Pinned(item, payload))  # noqa: PERF401 (a later read may raise)
            if pinned:
                self._store(shard, pinned)
        finally:
            self._release(pinned)

    def _release(self, pinned: Sequence[_Pinned]) -> None:
        stored = [block.item.key for block in pinned if block.is_stored]
        if stored:
            self._on_hints("stored", stored)
        for block in pinned:
            try:
                block.item.done(block.is_stored)
            except Exception:  # one owner's fault keeps no other block pinned
                logger.exception("the owner of a written block failed in its `done`")

    def _store(self, shard: str, blocks: Sequence[_Pinned]) -> None:
        for block in blocks:
            self._sizes.learn(block.item.key, len(block.payload))
        if not self._mark_present(shard, blocks):
            self._metrics.operation("set", "failed", len(blocks))
            return
        absent = [block for block in blocks if not block.is_stored]
        self._metrics.operation("set", "present", len(blocks) - len(absent))
        if not absent:
            return
        if not self._link.health.may_write(shard):
            self._metrics.dropped("refused", len(absent))
            return
        intact = [block for block in absent if self._add_headers(block)]
        if intact:
            self._set(shard, intact)

    def _add_headers(self, block: _Pinned) -> bool:
        """Whether the payload is what it was."""
        item = block.item
        try:
            block.headers = build_headers(item.key, block.payload, checksum=item.checksum)
        except ValueFormatError:
            self._metrics.operation("set", "bad")
            item.damaged()
            return False
        return True

    def _names(self, block: _Pinned) -> list[bytes]:
        parts = len(part_sizes(len(block.payload)))
        return [part_name(self._prefix, block.item.key, part) for part in range(parts)]

    def _mark_present(self, shard: str, blocks: Sequence[_Pinned]) -> bool:
        """Find what another node wrote already, giving it new life; False when the shard did not answer for all."""
        requests: list[Request] = []
        owners: list[_Pinned] = []
        for block in blocks:
            for name in self._names(block):
                requests.append((b"EXISTS", name) if self._ttl is None else (b"EXPIRE", name, self._ttl))
                owners.append(block)
        op = "exists" if self._ttl is None else "expire"
        there = {id(block): 0 for block in blocks}
        answers = 0
        error: ResponseError | None = None
        for index, reply in self._link.ask(shard, requests, op=op, key=blocks[0].item.key):
            answers += isinstance(reply, int)
            there[id(owners[index])] += reply == 1
            error = reply if isinstance(reply, ResponseError) else error
        for block in blocks:
            block.is_stored = there[id(block)] == len(self._names(block))
        if error is not None:
            self._note_refusal(shard, error)
        return answers == len(requests)

    def _set(self, shard: str, blocks: Sequence[_Pinned]) -> None:
        requests: list[Request] = []
        owners: list[_Pinned] = []
        for block in blocks:
            parts = self._set_requests(block)
            requests += parts
            owners += [block] * len(parts)
        moved = sum(len(block.payload) for block in blocks) + HEADER_BYTES * len(requests)
        accepted = {id(block): 0 for block in blocks}
        error: ResponseError | None = None
        for index, reply in self._link.ask(shard, requests, op="set", moved_bytes=moved, key=blocks[0].item.key):
            accepted[id(owners[index])] += _is_ok(reply)
            error = reply if isinstance(reply, ResponseError) else error
        for block in blocks:
            block.is_stored = accepted[id(block)] == len(self._names(block))
        self._note_set(shard, blocks, error)
        torn = [block for block in blocks if 0 < accepted[id(block)] < len(self._names(block))]
        if torn:
            unlink: list[Request] = [(b"UNLINK", name) for block in torn for name in self._names(block)]
            for _ in self._link.ask(shard, unlink, op="unlink"):
                pass

    def _set_requests(self, block: _Pinned) -> list[Request]:
        """SET of each part, part 0 last."""
        names, headers = self._names(block), block.headers
        requests: list[Request] = []
        offset = 0
        for name, header, size in zip(names, headers, part_sizes(len(block.payload)), strict=True):
            value = (header, block.payload[offset : offset + size])
            requests.append((b"SET", name, value) if self._ttl is None else (b"SET", name, value, b"EX", self._ttl))
            offset += size
        return requests[::-1]

    def _note_set(self, shard: str, blocks: Sequence[_Pinned], error: ResponseError | None) -> None:
        stored = [block for block in blocks if block.is_stored]
        self._metrics.operation("set", "ok", len(stored))
        self._metrics.operation("set", "failed", len(blocks) - len(stored))
        self._metrics.moved("written", sum(len(b.payload) + HEADER_BYTES * len(self._names(b)) for b in stored))
        if error is not None:
            self._note_refusal(shard, error)
        elif stored:
            self._link.health.write_succeeded(shard)

    def _note_refusal(self, shard: str, error: ResponseError) -> None:
        if failure_of(error) is Failure.RESHARDING:  # the next block of another slot is welcome
            return
        self._link.health.write_refused(shard, failure_of(error), error)
        self._link.attention.set()


def _is_ok(reply: Reply) -> bool:
    return reply == b"OK"
