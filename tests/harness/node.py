"""One "node": a holder and an agent of its own, as the operator will run them in a pod."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.harness import web
from tests.harness.engine import ROOT
from tests.harness.processes import Program, ProgramError

TOKEN = "a-token-of-the-tests"
READY_SECONDS = 30.0
QUIET_SECONDS = 0.4


def python_environment() -> dict[str, str]:
    """Our programs run from the tree."""
    return {"PYTHONPATH": str(ROOT / "agent"), "PYTHONUNBUFFERED": "1"}


def socket_below(folder: Path) -> Path:
    """Where a node in `folder` will have its agent's socket: an engine may be started before it."""
    return folder / "s" / "agent.sock"


class Node:
    """Holder, agent and their configuration below `folder`."""

    def __init__(
        self,
        name: str,
        *,
        folder: Path,
        admin_port: int,
        capacity: str = "512Mi",
        valkey: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        self.name = name
        self.folder = folder
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.token_file = folder / "token"
        self.socket = socket_below(folder)
        config: dict[str, object] = {
            "pool": {"namespace": "local", "name": "demo"},
            "node": name,
            "socket_folder": str(self.socket.parent),
            "holder_socket": str(folder / "h" / "holder.sock"),
            "admin": {"host": "127.0.0.1", "port": admin_port, "token_file": str(self.token_file)},
            "ram": {"capacity": capacity},
            **settings,
        }
        if valkey is not None:
            config["valkey"] = valkey
        for path in (self.socket.parent, folder / "h"):
            path.mkdir(parents=True, exist_ok=True)
        self.token_file.write_text(TOKEN)
        self.config_file = folder / "agent.yaml"
        self.config_file.write_text(yaml.safe_dump(config))
        environment = python_environment()
        holder = [sys.executable, "-m", "kvpool_agent.holder", "--socket", str(folder / "h" / "holder.sock")]
        agent = [sys.executable, "-m", "kvpool_agent", "--config", str(self.config_file)]
        self.holder = Program(f"{name}-holder", holder, folder=folder, env=environment)
        self.agent = Program(f"{name}-agent", agent, folder=folder, env=environment)

    def start(self) -> Node:
        """Start both without waiting."""
        self.holder.start()
        self.agent.start()
        return self

    def wait_ready(self) -> Node:
        """Wait until the agent's readiness."""
        self.agent.wait_until(lambda: web.is_ok(f"{self.admin_url}/readyz"), seconds=READY_SECONDS, what="readiness")
        return self

    def stop(self) -> None:
        """End both."""
        self.agent.stop()
        self.holder.stop()

    def get(self, path: str) -> Any:
        """A GET of the admin API as JSON."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        reply = web.request("GET", f"{self.admin_url}{path}", headers=headers)
        if reply.status == 503:
            raise ConnectionError(f"{self.name}: the agent has begun to listen, but not to serve: {reply.body[:300]!r}")
        assert reply.status == 200, f"{self.name}{path} answered {reply.status}: {reply.body[:300]!r}"
        return reply.json()

    def stats(self) -> Any:
        """/v1/stats."""
        return self.get("/v1/stats")

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until every store is done."""
        settle(self.name, self.stats, seconds=seconds)

    def metrics(self) -> str:
        """/metrics."""
        return web.request("GET", f"{self.admin_url}/metrics").body.decode()


def settle(name: str, read_stats: Callable[[], Any], *, seconds: float = 30.0) -> None:
    """Wait until every store of an agent is done: nothing in slots, checksums or queues, and quiet for a moment.

    The moment is for what an engine stores last: vLLM hands it over one step after the answer's end.
    """
    end = time.monotonic() + seconds
    quiet_since = time.monotonic()
    known: object = None
    while time.monotonic() - quiet_since < QUIET_SECONDS:
        stats = read_stats()
        arena, tier = stats["arena"], stats["valkey"] or {}
        busy = arena["slots"]["writing"] or arena["checksums_waiting"] or tier.get("write_queue_items", 0)
        if busy or arena["slots"] != known:
            known, quiet_since = arena["slots"], time.monotonic()
        if time.monotonic() > end:
            raise ProgramError(f"{name}: stores are not done within {seconds:g} s: {stats}")
        time.sleep(0.05)
