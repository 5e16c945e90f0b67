"""Talking to what may be no Valkey at all."""

from __future__ import annotations

import time

import pytest

from kvpool_operator.fence import OpenFence
from kvpool_operator.valkey import heal, wire
from kvpool_operator.valkey.commands import Pod
from kvpool_operator.valkey.wire import Access, ValkeyUnreachableError, Wire
from tests.unit.dripping import dripping

ACCESS = Access("operator", "x" * 20, 0.3)


@pytest.mark.parametrize("replies_first", [0, 1, 2])
def test_node_that_drips_is_left_at_the_deadline(replies_first: int) -> None:
    """In the login, the greeting, and in the answer."""
    with dripping(b"$1000000\r\n", replies_first=replies_first) as port:
        began = time.monotonic()
        with pytest.raises(ValkeyUnreachableError), Wire("127.0.0.1", port, ACCESS) as connected:
            connected.ask("PING")

    assert time.monotonic() - began < 2.0


def test_reply_of_any_size_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "REPLY_MAX_BYTES", 1000)
    with (
        dripping(b"$1000000\r\n", replies_first=2, drip=b"a" * 2000) as port,
        Wire("127.0.0.1", port, Access("operator", "x" * 20, 30.0)) as connected,
        pytest.raises(ValkeyUnreachableError, match="too long"),
    ):
        connected.ask("PING")


@pytest.mark.parametrize("reply", [b":x\r\n", b"$x\r\n", b"*1\r\n" * 5000, b"$" + b"9" * 30 + b"\r\n", b"?\r\n"])
def test_what_is_no_reply_is_an_error_of_ours(reply: bytes) -> None:
    with (
        dripping(reply, replies_first=2) as port,
        Wire("127.0.0.1", port, ACCESS) as connected,
        pytest.raises(ValkeyUnreachableError),
    ):
        connected.ask("PING")


def test_step_of_healing_ends_though_a_node_drips() -> None:
    with dripping(b"$1000000\r\n", replies_first=2) as port:
        pod = Pod(name="v-0", ordinal=0, uid="u", host="127.0.0.1", port=port)
        began = time.monotonic()
        result = heal.step([pod], shards=1, password="x" * 20, fence=OpenFence(), timeout_seconds=0.3)

    assert time.monotonic() - began < 2.0
    assert (result.ready, result.waiting[0].reason) == (0, "ShardUnreachable")
