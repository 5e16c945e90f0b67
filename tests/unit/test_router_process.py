"""The router as a program: its exit codes and what SIGTERM does to requests in flight."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvpool_router.__main__ import main
from tests.unit.router_stubs import TOKEN, StubAgent, StubEngine, until

ROOT = Path(__file__).resolve().parents[2]


async def _start(config: Path) -> Process:
    command = [sys.executable, "-m", "kvpool_router", "--config", str(config)]
    return await asyncio.create_subprocess_exec(*command, stderr=PIPE, env={"PYTHONPATH": str(ROOT / "agent")})


async def _listening(process: Process) -> dict[str, str]:
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while line := await process.stderr.readline():
            logged: dict[str, str] = json.loads(line)
            if logged["message"] == "listening":
                return logged
    raise AssertionError("the router ended without listening")


def _config(folder: Path, engine: StubEngine, agent: StubAgent) -> Path:
    (folder / "token").write_text(TOKEN)
    file = folder / "router.yaml"
    token = str(folder / "token")
    document = {
        "pool": {"namespace": "inference", "name": "chat"},
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"host": "127.0.0.1", "port": 0, "token_file": token},
        "endpoints": [{"url": f"http://{engine.address}", "agent": "a"}],
        "agents": [{"name": "a", "url": f"http://127.0.0.1:{agent.port}", "token_file": token}],
    }
    file.write_text(json.dumps(document))
    return file


def test_sigterm_lets_requests_in_flight_finish_and_exits_0(tmp_path: Path) -> None:
    async def run() -> None:
        async with _program(tmp_path) as (process, engine):
            await _drain(process, engine)

    asyncio.run(run())


@asynccontextmanager
async def _program(folder: Path) -> AsyncIterator[tuple[Process, StubEngine]]:
    async with AsyncExitStack() as stack:
        engine, agent = StubEngine(), StubAgent()
        for stub in (engine, agent):
            await stub.start()
            stack.push_async_callback(stub.stop)
        process = await _start(_config(folder, engine, agent))
        stack.callback(_end, process)
        yield process, engine


def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()


async def _drain(process: Process, engine: StubEngine) -> None:
    engine.pieces_gate.clear()
    where = await _listening(process)
    assert (where["pool"], where["namespace"]) == ("chat", "inference")
    async with aiohttp.ClientSession() as client:
        body = {"prompt": "x", "stream": True}
        async with client.post(f"http://{where['public']}/v1/completions", json=body) as answer:
            assert await answer.content.readany() == b"data: 0\n\n"
            process.send_signal(signal.SIGTERM)
            await _refuses(where["public"])
            async with client.get(f"http://{where['admin']}/readyz") as readiness:
                assert readiness.status == 503
            engine.pieces_gate.set()
            assert (await answer.content.read()).endswith(b"[DONE]\n\n")
    _, rest = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0
    assert [json.loads(line)["message"] for line in rest.splitlines()][-1] == "stopped"


async def _refuses(address: str) -> None:
    host, port = address.split(":")
    refused = False

    async def try_once() -> None:
        nonlocal refused
        while not refused:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                await asyncio.sleep(0.01)
            except ConnectionRefusedError:
                refused = True

    trying = asyncio.create_task(try_once())
    await until(lambda: refused)
    await trying


def test_wrong_configuration_exits_2_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("admin: {token_file: /t}\nendpoints: []\nshards: 3\n")
    assert main(["--config", str(file)]) == 2
    assert "unknown key `shards`" in capsys.readouterr().err


def test_check_only_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, token = tmp_path / "router.yaml", tmp_path / "token"
    file.write_text(f"admin: {{token_file: {token}}}\nendpoints: []\n")
    assert main(["--config", str(file), "--check"]) == 2
    assert "admin.token_file" in capsys.readouterr().err
    token.write_text("t")
    assert main(["--config", str(file), "--check"]) == 0


def test_taken_port_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, token = tmp_path / "router.yaml", tmp_path / "token"
    token.write_text("t")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(f"listen: {{port: {port}}}\nadmin: {{token_file: {token}}}\nendpoints: []\n")
        assert main(["--config", str(file)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
