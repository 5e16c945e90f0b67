"""Entry point: `python -m kvpool_agent --config FILE`.

Invariant: exit status 0 after SIGTERM or SIGINT, 2 for a wrong configuration, 1 for anything else; the arena stays with
its holder whatever happens here.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from kvpool_agent.admin import AdminServer, AdminState, Token, build_app, build_server, wait_until_started
from kvpool_agent.config import Config, load_config
from kvpool_agent.logs import set_up_logging
from kvpool_agent.metrics import AgentMetrics
from kvpool_agent.serving import serve
from kvpool_core.errors import ConfigError, KVPoolError
from kvpool_core.listening import bind

GC_THRESHOLD = 50_000
"""Net new objects between two collections: some 5 ms of work each."""

log = logging.getLogger("kvpool.agent")


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the agent; returns the exit status. `command_line` None: the process's own."""
    parser = argparse.ArgumentParser(prog="kvpool-agent", description="Serves a node's arena to its engines.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file, checked whole at start")
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    arguments = parser.parse_args(command_line)
    try:
        config = load_config(arguments.config, os.environ)
    except ConfigError as error:
        print(f"kvpool-agent: {error}", file=sys.stderr)  # noqa: T201  # before logging is set up
        return 2
    if arguments.check:
        return 0
    set_up_logging(config.log_level, _log_fields(config))
    _tune_garbage_collection()
    _raise_descriptor_limit()
    status = 0
    try:
        asyncio.run(_run(config))
    except* (KVPoolError, OSError) as errors:
        log.critical("cannot go on", extra={"data": {"reason": _reasons(errors)}})
        status = 1
    except* Exception:
        log.critical("a fault of our own", exc_info=True)
        status = 1
    return status


def _reasons(errors: BaseExceptionGroup[BaseException]) -> str:
    """What the leaves say: tasks that end together arrive as groups in groups."""
    return "; ".join(
        _reasons(error) if isinstance(error, BaseExceptionGroup) else str(error) for error in errors.exceptions
    )


def _tune_garbage_collection() -> None:
    """Slots are many, live long and form no cycles: looking through all of them often would stall the loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 50, 100)


def _raise_descriptor_limit() -> None:
    """The soft limit is 1,024 for the sake of select(), which nothing here uses; each connection takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # refused, for instance, where the hard limit is above fs.nr_open
        log.warning("the limit of open files stays", extra={"data": {"limit": soft, "reason": str(error)}})


def _log_fields(config: Config) -> dict[str, str]:
    pool = config.pool
    return {"component": "agent", "namespace": pool.namespace, "pool": pool.name, "node": config.node}


async def _run(config: Config) -> None:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    metrics = AgentMetrics(registry)
    state = AdminState(config, metrics, boot_id=secrets.token_bytes(16))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    admin = build_server(build_app(state, Token(Path(config.admin.token_file))))
    address = bind(config.admin.host, config.admin.port)
    admin_task = loop.create_task(admin.serve(sockets=[address]), name="admin")
    await wait_until_started(admin, admin_task)
    log.info("admin API", extra={"data": {"host": config.admin.host, "port": address.getsockname()[1]}})
    try:
        await serve(config, state, metrics, stop)
    finally:
        state.stopping = True
        log.info("stopping")
        await _stop_admin(admin, admin_task)


async def _stop_admin(admin: AdminServer, task: asyncio.Task[None]) -> None:
    admin.should_exit = True
    await asyncio.wait([task], timeout=5)


if __name__ == "__main__":
    raise SystemExit(main())
