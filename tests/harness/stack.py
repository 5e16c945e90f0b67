"""Everything on one machine: N engines, each beside its own node, a Valkey cluster, a router."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.harness.engine import KV_CACHE_BYTES, Engine
from tests.harness.engine_forks import EngineForks
from tests.harness.node import Node
from tests.harness.processes import clean_killed_run
from tests.harness.provision import Paths
from tests.harness.router import Router
from tests.harness.socket_tap import SocketTap
from tests.harness.valkey_cluster import ValkeyServers, free_ports
from tests.harness.valkey_cluster import clean_killed_run as clean_killed_valkey

VALKEY_SHARDS = 3


def clean(folder: Path) -> list[str]:
    """End what a killed run in `folder` left and remove its files; returns the programs that were still running."""
    ended = clean_killed_run(folder)
    clean_killed_valkey(folder / "valkey")
    shutil.rmtree(folder, ignore_errors=True)
    return ended


class Stack:
    """The parts, made but not started. Node i stands beside engine i, whose cores are `cores[i]`.

    tapped: engines reach their agents through `taps`, with which tests act at exact messages. workers_in_core, forks: as
    `Engine` takes them, the former of each engine.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        paths: Paths,
        cores: tuple[str, ...] = ("0", "1"),
        tapped: bool = False,
        lease_seconds: float = 10.0,
        extra_config: dict[str, object] | None = None,
        kv_cache_bytes: int = KV_CACHE_BYTES,
        workers_in_core: tuple[bool, ...] = (False, False),
        forks: EngineForks | None = None,
    ) -> None:
        self.folder = folder
        ports = free_ports(2 * len(cores) + 2)
        self.valkey = ValkeyServers(
            folder=folder / "valkey", shards=VALKEY_SHARDS, cluster=True, binary=paths.valkey_server
        )
        self.nodes: list[Node] = []
        self.engines: list[Engine] = []
        self.taps: list[SocketTap] = []
        tier: dict[str, object] = {"endpoints": self.valkey.endpoints}
        for i, core in enumerate(cores):
            name = chr(ord("a") + i)
            node = Node(
                f"node-{name}",
                folder=folder / f"n{name}",
                admin_port=ports.pop(),
                valkey=tier,
                lease_seconds=lease_seconds,
            )
            socket = node.socket
            if tapped:
                socket = folder / f"t{name}" / "agent.sock"
                self.taps.append(SocketTap(socket, node.socket))
            engine = Engine(
                f"engine-{name}",
                model,
                paths=paths,
                folder=folder,
                port=ports.pop(),
                cores=core,
                socket=socket,
                extra_config=extra_config,
                kv_cache_bytes=kv_cache_bytes,
                worker_in_core=workers_in_core[i],
                forks=forks,
            )
            self.nodes.append(node)
            self.engines.append(engine)
        placement = list(zip(self.engines, self.nodes, strict=True))
        self.router = Router(placement, folder=folder / "r", port=ports.pop(), admin_port=ports.pop())

    def start(self) -> None:
        """Start all of it; ends when everything serves."""
        self.start_engines()
        self.start_rest()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait for the engines, then for the router: it is ready once it has somebody to route to."""
        for engine in self.engines:
            engine.wait_ready().wait_identified()
        self.router.wait_ready()

    def start_engines(self) -> None:
        """Engines take longest: begin with them."""
        for engine in self.engines:
            engine.start()

    def start_rest(self) -> None:
        """Valkey, nodes, router; ends when Valkey and the nodes serve."""
        self.valkey.start()
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.wait_ready()
        self.router.start()

    def restart_agents(self) -> None:
        """Kill the agents, keep their holders; ends when the new ones serve."""
        for node in self.nodes:
            node.agent.kill()
        for node in self.nodes:
            node.agent.start()
        for node in self.nodes:
            node.wait_ready()

    def stop(self) -> None:
        """End all of it, the router first."""
        self.router.program.stop()
        for engine in self.engines:
            engine.program.kill()
        for node in self.nodes:
            node.stop()
        for tap in self.taps:
            tap.close()
        self.valkey.stop()
