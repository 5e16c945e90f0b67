"""A leader that was stopped past its lease commands no shard and no agent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from kvpool_operator import agent_stats
from kvpool_operator.fence import Fence, OpenFence
from kvpool_operator.kube_errors import NotLeaderError
from kvpool_operator.valkey import heal
from kvpool_operator.valkey.commands import Pod

ID = "a" * 40
INFO = "uptime_in_seconds:60\r\nused_memory_dataset:1\r\nused_memory:2\r\nmaxmemory:100\r\n"


class Shut:
    """A fence of a leader that is stopped after so many questions."""

    def __init__(self, *, after: int) -> None:
        self._left = after

    def remaining_seconds(self) -> float:
        self._left -= 1
        return 10.0 if self._left >= 0 else -1.0


@contextlib.contextmanager
def fresh_node() -> Iterator[tuple[Pod, list[bytes]]]:
    """A node that is part of no cluster yet; the commands that it is given, logins and looks apart."""
    told: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    texts = {
        b"CLUSTER NODES": f"{ID} 127.0.0.1:{port}@1 myself,master - 0 0 0 connected\n",
        b"CLUSTER INFO": "cluster_state:fail\r\n",
        b"INFO server memory": INFO,
    }
    answers = {command: f"${len(text)}\r\n{text}\r\n".encode() for command, text in texts.items()}
    answers |= {b"CLUSTER GETSLOTMIGRATIONS": b"*0\r\n", b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n"}

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            while header := lines.readline():
                words = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in range(int(header[1:]))]
                command = b" ".join(words)
                if command not in answers and words[0] not in (b"AUTH", b"CLIENT", b"SELECT"):
                    told.append(command)
                connection.sendall(answers.get(command, b"+OK\r\n"))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield Pod(name="v-0", ordinal=0, uid="u", host="127.0.0.1", port=port), told
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


def step(pod: Pod, fence: Fence) -> heal.HealResult:
    return heal.step([pod], shards=1, password="x" * 20, fence=fence)


def test_leader_gives_a_new_node_its_slots() -> None:
    with fresh_node() as (pod, told):
        result = step(pod, OpenFence())

    assert result.actions == ("v-0 took 16384 slots (0-16383)",)
    assert told == [b"CLUSTER SET-CONFIG-EPOCH 1", b"CLUSTER ADDSLOTSRANGE 0 16383"]


@pytest.mark.parametrize("after", [0, 1], ids=["before the command", "between begin and sending"])
def test_stopped_leader_sends_a_shard_nothing(after: int) -> None:
    with fresh_node() as (pod, told), pytest.raises(NotLeaderError):
        step(pod, Shut(after=after))

    assert told == []


def test_stopped_leader_drains_no_agent() -> None:
    with fresh_node() as (pod, told), pytest.raises(NotLeaderError):
        agent_stats.drain("127.0.0.1", "t", 5, fence=Shut(after=0), port=pod.port)

    assert told == []
