"""What the router adds to a request: direct to a stub engine against through the router, all on loopback.

`python bench/router_latency.py [--requests N]` prints one row for each body size, kind of prompt and concurrency. Engine,
router and client are processes of their own. `ids` prompts need no tokenization; `text` prompts include the engine's
/tokenize (a stub's: one token for 4 characters, no time spent). Agents are absent from the figures: the index is empty,
the hashing is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from kvpool_core.wire import EngineInfo, EventsAlive, EventsBegin, EventsPart, EventsReady, GroupLayout, encode

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE = 16


async def _health(_: web.Request) -> web.Response:
    return web.Response()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def _tokenize(request: web.Request) -> web.Response:
    prompt = (await request.json())["prompt"]
    return web.json_response({"tokens": list(range(len(prompt) // 4))})


async def _complete(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=b'{"choices":[{"text":"x"}]}', content_type="application/json")


async def _events(request: web.Request) -> web.StreamResponse:
    """An agent's stream that reports the engine and stays alive."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    endpoint = f"127.0.0.1:{request.transport.get_extra_info('sockname')[1]}" if request.transport else ""
    layout = GroupLayout(0, 4096, BLOCK_SIZE, 0)
    info = EngineInfo("e", endpoint, 0, ["m"], BLOCK_SIZE, "vllm-none-hash", bytes(16), [layout], True)
    for message in (EventsBegin(0, b"boot", 0), EventsPart(0, [info], []), EventsReady(0)):
        await answer.write(encode(message))
    while True:
        await asyncio.sleep(1)
        await answer.write(encode(EventsAlive(0, b"boot", 0)))


def serve_stub(port: int) -> None:
    """Run the stub engine (and agent) in this process."""
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/health", _health)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/events", _events)
    app.router.add_post("/tokenize", _tokenize)
    app.router.add_post("/v1/completions", _complete)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, loop=uvloop.new_event_loop())


@contextmanager
def running(folder: Path, ports: tuple[int, int, int, int]) -> Iterator[tuple[str, str, int]]:
    """Two stub engines and the router; the URLs of the first engine and of the router, and the router's process id."""
    first, second, router, admin = ports
    (folder / "token").write_text("t")
    token = str(folder / "token")
    config = {
        "listen": {"host": "127.0.0.1", "port": router},
        "admin": {"host": "127.0.0.1", "port": admin, "token_file": token},
        "endpoints": [{"url": f"http://127.0.0.1:{port}", "agent": f"a{port}"} for port in (first, second)],
        "agents": [
            {"name": f"a{port}", "url": f"http://127.0.0.1:{port}", "token_file": token} for port in (first, second)
        ],
    }
    (folder / "router.yaml").write_text(json.dumps(config))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "agent")}
    commands = [
        [sys.executable, __file__, "--stub", str(first)],
        [sys.executable, __file__, "--stub", str(second)],
        [sys.executable, "-m", "kvpool_router", "--config", str(folder / "router.yaml")],
    ]
    processes = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield f"http://127.0.0.1:{first}", f"http://127.0.0.1:{router}", processes[-1].pid
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def wait_until_up(session: aiohttp.ClientSession, url: str) -> None:
    """Wait for /health."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


def body_of(size: int, kind: str, number: int) -> bytes:
    """A completion's body of about `size` bytes; no two share a prefix."""
    head = f"{number:08d}"
    prompt: object = head + "x" * (size - 60) if kind == "text" else [number, *range(1000, 1000 + size // 5)]
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()


async def measure(session: aiohttp.ClientSession, url: str, bodies: list[bytes], concurrency: int) -> list[float]:
    """Seconds of every request."""
    pending = iter(bodies)
    seconds: list[float] = []

    async def work() -> None:
        for body in pending:
            started = time.perf_counter()
            async with session.post(f"{url}/v1/completions", data=body, headers=JSON) as answer:
                await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"answered {answer.status}")
            seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return seconds


JSON = {"content-type": "application/json"}


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(seconds: list[float], wall_seconds: float) -> str:
    """p10, p50, p99 in microseconds and requests per second. p10 is what a shared machine's neighbours disturb least."""
    cuts = [cut * 1e6 for cut in statistics.quantiles(seconds, n=100)]
    rate = len(seconds) / wall_seconds
    return f"p10 {cuts[9]:6.0f}   p50 {cuts[49]:7.0f}   p99 {cuts[98]:7.0f} us   {rate:6.0f} req/s"


async def compare(direct: str, routed: str, router_pid: int, requests: int) -> None:
    """Print the table."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for url in (direct, routed):
            await wait_until_up(session, url)
        await measure(session, routed, [body_of(2048, "text", n) for n in range(300)], 4)
        number = 1_000
        for size in (2_048, 32_768):
            for kind in ("ids", "text"):
                for concurrency in (1, 16):
                    for name, url in (("direct", direct), ("router", routed)):
                        bodies = [body_of(size, kind, number + n) for n in range(requests)]
                        number += requests
                        started, used = time.perf_counter(), cpu_seconds(router_pid)
                        seconds = await measure(session, url, bodies, concurrency)
                        figures = row(seconds, time.perf_counter() - started)
                        cpu = (cpu_seconds(router_pid) - used) / requests * 1e6
                        label = f"{size // 1024:3d} KB {kind:4s} c={concurrency:<2d} {name}"
                        print(f"{label}  {figures}   router's CPU {cpu:5.0f} us/req", flush=True)


def main() -> None:
    """Run the comparison, or a stub."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--stub", type=int)
    arguments = parser.parse_args()
    if arguments.stub:
        serve_stub(arguments.stub)
        return
    ports = [int(os.environ.get("KVPOOL_BENCH_PORT", "18700")) + i for i in range(4)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), (ports[0], ports[1], ports[2], ports[3])) as parts,
        asyncio.Runner(loop_factory=uvloop.Loop) as runner,
    ):
        runner.run(compare(*parts, arguments.requests))


if __name__ == "__main__":
    main()
