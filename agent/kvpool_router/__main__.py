"""`python -m kvpool_router --config FILE`: the proxy and its admin API in one process.

Invariant: exit code 0 after SIGTERM once requests in flight had their grace, 2 when the configuration is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from starlette.types import ASGIApp

from kvpool_core.errors import ConfigError
from kvpool_core.listening import bind
from kvpool_router.admin import build_admin
from kvpool_router.config import RouterConfig, load_config, read_token
from kvpool_router.discovery import ConfiguredMembers, MemberSource
from kvpool_router.logs import fields, set_up_logging
from kvpool_router.proxy import build_app
from kvpool_router.router import Router

log = logging.getLogger("kvpool_router")

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server whose signals belong to the process, not to it: there are two in one loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    parser = argparse.ArgumentParser(prog="kvpool_router", description="Prefix-aware router in front of LLM engines")
    parser.add_argument("--config", required=True, type=Path, help="YAML configuration file")
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
        check_token_files(config)
        if options.check:
            return 0
        sockets = bind(config.listen.host, config.listen.port), bind(config.admin.host, config.admin.port)
        source = build_source(config)
    except ConfigError as error:
        print(f"kvpool_router: {error}", file=sys.stderr)  # noqa: T201
        return 2
    set_up_logging(config.log_level, {"pool": config.pool.name, "namespace": config.pool.namespace})
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(config, source, *sockets))
    return 0


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed: it halves the time that the proxy adds."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.Loop


def check_token_files(config: RouterConfig) -> None:
    """ConfigError unless every token file can be read now; they are read anew when they are needed."""
    read_token(config.admin.token_file, "admin.token_file")
    for agent in config.agents:
        read_token(agent.token_file, "agents[].token_file")
    if config.discovery is not None:
        read_token(config.discovery.kubernetes.token_file, "discovery.kubernetes.token_file")


def build_source(config: RouterConfig) -> MemberSource:
    """Where members come from; ConfigError when a file that the configuration names cannot be read."""
    if config.discovery is None:
        return ConfiguredMembers(config)
    from kvpool_router.pod_watch import PodMembers

    return PodMembers(config.pool, config.discovery.kubernetes)


async def serve(config: RouterConfig, source: MemberSource, public: socket.socket, admin: socket.socket) -> None:
    """Serve both addresses until a signal, then finish what is in flight."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    router = Router(config, source, registry=registry)
    await router.start()
    grace = config.timeouts.grace_seconds
    servers = [
        _Server(_settings(build_app(router.proxy_parts()), grace)),
        _Server(_settings(build_admin(router), grace)),
    ]
    _stop_on_signal(router, servers)
    try:
        await _serve_all(servers, [public, admin])
    finally:
        await router.stop()
    log.info("stopped")


async def _serve_all(servers: list[_Server], sockets: list[socket.socket]) -> None:
    """The admin API ends once the proxy has ended, so that a drain can be watched."""
    proxy, admin = servers
    admin_task = asyncio.create_task(admin.serve(sockets=[sockets[1]]), name="admin-server")
    proxy_task = asyncio.create_task(proxy.serve(sockets=[sockets[0]]), name="proxy-server")
    await asyncio.gather(proxy.listens.wait(), admin.listens.wait())
    log.info("listening", extra=fields(public=_name(sockets[0]), admin=_name(sockets[1])))
    await proxy_task
    admin.should_exit = True
    await admin_task


def _stop_on_signal(router: Router, servers: list[_Server]) -> None:
    def stop() -> None:
        router.draining = True
        servers[0].should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _settings(app: ASGIApp, grace_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(grace_seconds)),
    )


def _name(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
