"""Pods of a managed Valkey as processes on this machine: each has an address of its own in 127/8, as a pod has.

Owns the processes it started and their folder. Invariant: every process that it starts is recorded with its start time
in `pids.json`, so that a killed run can be cleaned and no foreign process is ever hit.
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import valkey
from valkey.exceptions import ValkeyError

from kvpool_operator.fence import OpenFence
from kvpool_operator.valkey.acl import AGENT, replication_conf, users_acl
from kvpool_operator.valkey.config import valkey_conf
from kvpool_operator.valkey.heal import HealResult, Pod, step
from kvpool_operator.valkey.members import PATIENCE_SECONDS
from tests.harness.valkey_cluster import clean_killed_run, default_binary, free_ports, start_time

MIB = 1024**2
OPERATOR_PASSWORD = "operator-password-0123456789"
AGENT_PASSWORD = "agent-password-0123456789"
REPLICATION_PASSWORD = "replication-password-0123456789"
TEST_PASSWORD = "test-password-0123456789"
KEY_PREFIX = "kvpool:test/pool:"
START_SECONDS = 10.0

_uids = itertools.count()


@dataclass
class _Running:
    pod: Pod
    folder: Path
    process: subprocess.Popen[bytes] | None = field(default=None)


class ManagedValkey:
    """The StatefulSet's part: `pods()` is what Kubernetes would say, `heal()` is one step of the operator."""

    def __init__(self, folder: Path, *, limit_bytes: int = 128 * MIB, node_timeout_ms: int = 2000) -> None:
        self.folder = folder.resolve()
        clean_killed_run(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.port, self.bus_port = free_ports(2)
        self._network = f"127.{random.randint(1, 250)}.{random.randint(0, 250)}"
        self._hosts = itertools.count(1)
        self._node_timeout_ms = node_timeout_ms
        self._running: dict[int, _Running] = {}
        self.passwords = {"operator": OPERATOR_PASSWORD, AGENT: AGENT_PASSWORD, "test": TEST_PASSWORD}
        self.config = self.folder / "config"
        self.config.mkdir(parents=True)
        acl = users_acl(
            operator_password=OPERATOR_PASSWORD,
            agent_password=AGENT_PASSWORD,
            replication_password=REPLICATION_PASSWORD,
            key_prefix=KEY_PREFIX,
        )
        (self.config / "users.acl").write_text(acl + f"user test on >{TEST_PASSWORD} ~* &* +@all\n")
        (self.config / "replication.conf").write_text(replication_conf(REPLICATION_PASSWORD))
        (self.config / "valkey.conf").write_text(
            valkey_conf(limit_bytes=limit_bytes, cpus=2, secret_folder=str(self.config), data_folder=str(self.folder))
        )

    # ------------------------------------------------------------------------------------------------ as Kubernetes

    def pods(self) -> list[Pod]:
        """Every pod that exists."""
        return [running.pod for _, running in sorted(self._running.items())]

    def scale(self, replicas: int) -> None:
        """spec.replicas: pods appear, and go with the highest ordinal first."""
        for ordinal in range(replicas):
            if ordinal not in self._running:
                self.create(ordinal)
        for ordinal in [ordinal for ordinal in self._running if ordinal >= replicas]:
            self.delete(ordinal)

    def create(self, ordinal: int, *, start: bool = True) -> None:
        """A new pod: new uid, address and folder."""
        number = next(_uids)
        pod = Pod(
            name=f"pool-valkey-{ordinal}",
            ordinal=ordinal,
            uid=f"uid-{number}",
            host=self._next_host(),
            port=self.port,
            bus_port=self.bus_port,
        )
        self._running[ordinal] = _Running(pod, self.folder / f"data-{number}")
        if start:
            self.start(ordinal)

    def delete(self, ordinal: int) -> None:
        """The pod and its emptyDir are gone."""
        self.kill(ordinal)
        running = self._running.pop(ordinal)
        shutil.rmtree(running.folder, ignore_errors=True)

    def replace(self, *ordinals: int) -> None:
        """All these pods at once are deleted; the StatefulSet makes new ones."""
        for ordinal in ordinals:
            self.delete(ordinal)
        for ordinal in ordinals:
            self.create(ordinal)

    def kill(self, ordinal: int) -> None:
        """SIGKILL of the container."""
        running = self._running[ordinal]
        if running.process is not None:
            running.process.kill()
            running.process.wait()
            running.process = None
            self._record()

    def start(self, ordinal: int, *, new_address: bool = False) -> None:
        """The container (re)starts in its pod: nodes.conf is there; the sandbox may have a new address."""
        running = self._running[ordinal]
        if new_address:
            running.pod = replace(running.pod, host=self._next_host())
        running.folder.mkdir(exist_ok=True)
        overrides = {
            "bind": running.pod.host,
            "port": str(self.port),
            "cluster-port": str(self.bus_port),
            "cluster-announce-ip": running.pod.host,
            "cluster-node-timeout": str(self._node_timeout_ms),
            "cluster-blacklist-ttl": "1",
            "dir": str(running.folder),
            "logfile": str(running.folder / "log"),
        }
        arguments = [part for name, value in overrides.items() for part in (f"--{name}", value)]
        running.process = subprocess.Popen(
            [str(default_binary()), str(self.config / "valkey.conf"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._record()

    def pause(self, ordinal: int) -> None:
        """SIGSTOP: the kernel still accepts connections, nothing answers."""
        self._process(ordinal).send_signal(signal.SIGSTOP)

    def resume(self, ordinal: int) -> None:
        """SIGCONT."""
        self._process(ordinal).send_signal(signal.SIGCONT)

    def _process(self, ordinal: int) -> subprocess.Popen[bytes]:
        process = self._running[ordinal].process
        assert process is not None
        return process

    # ---------------------------------------------------------------------------------------------------- as clients

    def heal(
        self,
        shards: int,
        *,
        password: str = OPERATOR_PASSWORD,
        timeout_seconds: float = 2.0,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> HealResult:
        """One step of the operator."""
        return step(
            self.pods(),
            shards=shards,
            password=password,
            fence=OpenFence(),
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
        )

    def heal_until_settled(self, shards: int, *, seconds: float = 30.0) -> list[HealResult]:
        """Steps until nothing is left to do or to wait for; the StatefulSet follows."""
        return self.heal_until(lambda result: not result.waiting, shards, seconds=seconds)

    def heal_until(
        self,
        condition: Callable[[HealResult], bool],
        shards: int,
        *,
        seconds: float = 30.0,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> list[HealResult]:
        """Steps until `condition`; the StatefulSet follows."""
        give_up_at = time.monotonic() + seconds
        results: list[HealResult] = []
        while not results or not condition(results[-1]):
            assert time.monotonic() < give_up_at, f"not within {seconds} s; the last steps: {results[-3:]}"
            if results:
                time.sleep(0.1)
            results.append(self.heal(shards, patience_seconds=patience_seconds))
            self.scale(results[-1].replicas)
        return results

    def client(self, ordinal: int, *, user: str = "test") -> valkey.Valkey:
        """A plain client of one pod."""
        pod = self._running[ordinal].pod
        return valkey.Valkey(
            host=pod.host,
            port=pod.port,
            username=user,
            password=self.passwords[user],
            socket_timeout=5,
            protocol=2,
        )

    def wait_for_ping(self, ordinal: int) -> None:
        """Until the server answers."""
        give_up_at = time.monotonic() + START_SECONDS
        with contextlib.closing(self.client(ordinal)) as client:
            while True:
                with contextlib.suppress(ValkeyError):
                    client.ping()
                    return
                assert time.monotonic() < give_up_at, self.log(ordinal)
                time.sleep(0.02)

    def log(self, ordinal: int) -> str:
        """The end of a server's log."""
        path = self._running[ordinal].folder / "log"
        return path.read_text()[-2000:] if path.exists() else "(no log)"

    def nodes(self, ordinal: int) -> str:
        """CLUSTER NODES as text."""
        with contextlib.closing(self.client(ordinal)) as client:
            client.response_callbacks.clear()
            text = client.execute_command("CLUSTER", "NODES")
        assert isinstance(text, bytes)
        return text.decode()

    def __enter__(self) -> ManagedValkey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ordinal in list(self._running):
            self.delete(ordinal)
        (self.folder / "pids.json").unlink(missing_ok=True)

    def _next_host(self) -> str:
        return f"{self._network}.{next(self._hosts)}"

    def _record(self) -> None:
        processes = [running.process for running in self._running.values() if running.process is not None]
        pids = {str(process.pid): start_time(process.pid) for process in processes}
        (self.folder / "pids.json").write_text(json.dumps(pids))
