"""The router as a program, configured for given engines and nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.harness import web
from tests.harness.engine import Engine
from tests.harness.node import TOKEN, Node, python_environment
from tests.harness.processes import Program


class Router:
    """`placement`: engines with the node that each stands beside."""

    def __init__(
        self, placement: Sequence[tuple[Engine, Node]], *, folder: Path, port: int, admin_port: int, **settings: object
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        folder.mkdir(parents=True, exist_ok=True)
        token_file = folder / "token"
        token_file.write_text(TOKEN)
        nodes = {node.name: node for _, node in placement}
        config = {
            "listen": {"host": "127.0.0.1", "port": port},
            "admin": {"host": "127.0.0.1", "port": admin_port, "token_file": str(token_file)},
            "endpoints": [{"url": engine.url, "agent": node.name} for engine, node in placement],
            "agents": [
                {"name": node.name, "url": node.admin_url, "token_file": str(node.token_file)}
                for node in nodes.values()
            ],
            **settings,
        }
        config_file = folder / "router.yaml"
        config_file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "kvpool_router", "--config", str(config_file)]
        self.program = Program("router", command, folder=folder, env=python_environment())

    def start(self) -> Router:
        """Start without waiting."""
        self.program.start()
        return self

    def wait_ready(self) -> Router:
        """Wait until its readiness."""
        self.program.wait_until(lambda: web.is_ok(f"{self.admin_url}/readyz"), seconds=30.0, what="readiness")
        return self

    def get(self, path: str) -> Any:
        """A GET of the admin API as JSON."""
        reply = web.request("GET", f"{self.admin_url}{path}", headers={"authorization": f"Bearer {TOKEN}"})
        assert reply.status == 200, f"router{path} answered {reply.status}"
        return reply.json()

    def explain(self, body: object) -> Any:
        """Where a completion would go, and why."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        reply = web.request("POST", f"{self.admin_url}/v1/explain", body, headers=headers)
        assert reply.status == 200, f"router/v1/explain answered {reply.status}: {reply.body[:300]!r}"
        return reply.json()
