"""The proxy: bytes through, retries, cancellation, tenancy, refusals."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.unit.router_stubs import (
    MODEL,
    Fleet,
    gpu,
    hashes_of,
    prompt,
    running_fleet,
    until,
)

LONG = prompt("long", 40)
SLOW_PROBES = {"timeouts": {"probe_interval_seconds": 60.0}}


async def _first_received(fleet: Fleet) -> int:
    await until(lambda: any(engine.received for engine in fleet.engines))
    return 0 if fleet.engines[0].received else 1


def test_streamed_answer_passes_piece_by_piece(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            engine = fleet.engines[0]
            engine.pieces_gate.clear()
            body = {"model": MODEL, "prompt": LONG, "stream": True}
            async with fleet.client.post(f"{fleet.url}/v1/completions", json=body) as answer:
                assert await answer.content.readany() == b"data: 0\n\n"
                assert answer.headers["content-type"] == "text/event-stream"
                assert "reason=single" in answer.headers["x-kvpool-route"]
                engine.pieces_gate.set()
                assert await answer.content.read() == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"

    asyncio.run(run())


def test_whole_answer_passes_with_its_headers(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            answer = await fleet.ask(prompt=LONG)
            engine = fleet.engines[fleet.chosen(answer)]
            assert json.loads(answer.body) == {"engine": engine.port}
            assert answer.headers["x-engine"] == str(engine.port)
            assert answer.headers["content-length"] == str(len(answer.body))
            assert "keep-alive" not in answer.headers

    asyncio.run(run())


def test_body_is_forwarded_byte_for_byte(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            raw = (
                b'{ "prompt" : "x\\u00e4",  "temperature":1.50, "seed":12345678901234567890123, "a":{"cache_salt":1} }'
            )
            headers = {"content-type": "application/json", "authorization": "Bearer k", "x-request-id": "7", "te": "x"}
            async with fleet.client.post(f"{fleet.url}/v1/completions?a=%20b", data=raw, headers=headers) as answer:
                assert answer.status == 200
            (received,) = fleet.engines[0].received
            assert received.raw == raw
            lowered = {name.lower(): value for name, value in received.headers.items()}
            assert (lowered["authorization"], lowered["x-request-id"]) == ("Bearer k", "7")
            assert lowered["host"] == fleet.engines[0].address
            assert "te" not in lowered

    asyncio.run(run())


def test_refused_connection_goes_to_the_other_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=SLOW_PROBES) as fleet:
            fleet.agents[0].publish(stored=[gpu("engine-0", hashes_of(LONG))])
            await until(lambda: len(fleet.router.fleet.index) == 40)
            await fleet.engines[0].stop()
            answer = await fleet.ask(prompt=LONG)
            assert (answer.status, fleet.chosen(answer)) == (200, 1)
            assert answer.route["reason"] == "retry"
            again = await fleet.ask(prompt=LONG)
            assert (fleet.chosen(again), again.route["reason"]) == (1, "single")
            assert fleet.metric("kvpool_router_retries_total", cause="refused") == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_connection_broken_before_the_first_byte_goes_to_the_other_engine(tmp_path: Path, stream: bool) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[0].publish(stored=[gpu("engine-0", hashes_of(LONG))])
            await until(lambda: len(fleet.router.fleet.index) == 40)
            fleet.engines[0].break_before_first_byte = True
            answer = await fleet.ask(prompt=LONG, stream=stream)
            assert (answer.status, fleet.chosen(answer), answer.route["reason"]) == (200, 1, "retry")
            assert len(fleet.engines[0].received) == 1

    asyncio.run(run())


def test_engine_killed_during_prefill_loses_no_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            for engine in fleet.engines:
                engine.gate.clear()
            asked = asyncio.create_task(fleet.ask(prompt=LONG, stream=True))
            killed = await _first_received(fleet)
            fleet.engines[1 - killed].gate.set()
            await fleet.engines[killed].stop()
            answer = await asked
            assert (answer.status, fleet.chosen(answer)) == (200, 1 - killed)
            assert answer.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_lone_well_engine_is_tried_once_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            fleet.engines[0].break_before_first_byte = True
            answer = await fleet.ask(prompt=LONG)
            assert (answer.status, answer.headers["x-kvpool-route"]) == (502, "reason=upstream-failed")
            assert len(fleet.engines[0].received) == 2

    asyncio.run(run())


def test_answer_broken_off_is_not_ended_as_if_whole(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            for engine in fleet.engines:
                engine.break_after_first_piece = True
            with pytest.raises(aiohttp.ClientPayloadError):
                await fleet.ask(prompt=LONG, stream=True)
            assert sum(len(engine.received) for engine in fleet.engines) == 1
            assert fleet.metric("kvpool_router_broken_answers_total") == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_during_prefill_cancels_the_engines_work(tmp_path: Path, stream: bool) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            for engine in fleet.engines:
                engine.gate.clear()
            asked = asyncio.create_task(fleet.ask(prompt=LONG, stream=stream))
            engine = fleet.engines[await _first_received(fleet)]
            asked.cancel()
            await asyncio.wait_for(engine.received[0].cancelled.wait(), 5)
            await until(lambda: all(fleet.router.book.running(e.address) == 0 for e in fleet.engines))
            assert all(fleet.router.book.queued_tokens(e.address, now=0.0) == 0 for e in fleet.engines)
            assert sum(len(e.received) for e in fleet.engines) == 1

    asyncio.run(run())


def test_client_that_leaves_during_the_answer_cancels_the_engines_work(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            engine = fleet.engines[0]
            engine.pieces_gate.clear()
            body = {"model": MODEL, "prompt": LONG, "stream": True}
            answer = await fleet.client.post(f"{fleet.url}/v1/completions", json=body)
            assert await answer.content.readany() == b"data: 0\n\n"
            answer.close()
            await asyncio.wait_for(engine.received[0].cancelled.wait(), 5)
            await until(lambda: fleet.router.book.running(engine.address) == 0)
            assert fleet.metric("kvpool_router_requests_total", reason="single", code="0") == 1

    asyncio.run(run())


@pytest.mark.parametrize(("stream", "status"), [(True, 504), (False, 200)])
def test_answer_that_is_not_streamed_may_take_longer_to_begin(tmp_path: Path, stream: bool, status: int) -> None:
    async def run() -> None:
        timeouts = {"idle_seconds": 0.3, "whole_answer_seconds": 30}
        async with running_fleet(tmp_path, engines=1, settings={"timeouts": timeouts}) as fleet:
            fleet.engines[0].gate.clear()
            asked = asyncio.create_task(fleet.ask(prompt=LONG, stream=stream))
            await asyncio.sleep(0.6)  # twice as long as a stream may be silent
            fleet.engines[0].gate.set()
            assert (await asked).status == status

    asyncio.run(run())


def test_nothing_ready_is_503_with_retry_after(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings=SLOW_PROBES) as fleet:
            for engine in fleet.engines:
                await engine.stop()
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                answer = await fleet.ask(path, prompt="x")
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert answer.headers["x-kvpool-route"] == "reason=no-endpoint"
                assert json.loads(answer.body)["error"]["code"] == "no-endpoint"
            async with fleet.client.get(f"{fleet.url}/v1/models") as models:
                assert models.status == 503
            async with fleet.client.get(f"{fleet.url}/health") as health:
                assert health.status == 503

    asyncio.run(run())


def test_endpoint_that_comes_back_serves_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            await fleet.engines[0].stop()
            await until(lambda: not fleet.router.table.any_usable())
            assert (await fleet.ask(prompt="x")).status == 503
            await fleet.engines[0].start()
            await until(fleet.router.table.any_usable)
            assert (await fleet.ask(prompt="x")).status == 200

    asyncio.run(run())


def test_unwell_endpoint_gets_no_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.engines[0].healthy = False
            await until(lambda: not fleet.router.table.all()[0].up)
            for number in range(4):
                assert fleet.chosen(await fleet.ask(prompt=f"{number}{LONG}")) == 1

    asyncio.run(run())


def test_silent_endpoint_is_used_only_while_none_is_up(tmp_path: Path) -> None:
    async def run() -> None:
        probes = {"timeouts": {"probe_interval_seconds": 0.02, "probe_seconds": 0.05, "probe_failures": 2}}
        async with running_fleet(tmp_path, settings=probes) as fleet:
            first, second = fleet.engines
            first.health_gate.clear()
            await until(lambda: fleet.router.table.all()[0].silent)
            for number in range(4):
                assert fleet.chosen(await fleet.ask(prompt=f"{number}{LONG}")) == 1
            await second.stop()
            answer = await fleet.ask(prompt=LONG)
            assert (answer.status, fleet.chosen(answer)) == (200, 0)
            first.health_gate.set()
            await until(lambda: fleet.router.table.all()[0].up)

    asyncio.run(run())


def test_model_of_a_down_endpoint_only_is_503_not_unknown(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.engines[0].models.append({"id": "special", "object": "model"})
            await until(lambda: "special" in (fleet.router.table.all()[0].models or {}))
            await fleet.engines[0].stop()
            await until(lambda: not fleet.router.table.all()[0].up)
            assert (await fleet.ask(model="special", prompt="x")).status == 503

    asyncio.run(run())


def test_models_of_all_endpoints_are_merged(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.engines[1].models.append({"id": "adapter", "root": "/a", "parent": MODEL, "permission": [1]})
            async with fleet.client.get(f"{fleet.url}/v1/models") as answer:
                content = await answer.json()
            assert [card["id"] for card in content["data"]] == [MODEL, "adapter"]
            assert content["data"][1]["permission"] == [1]

    asyncio.run(run())


def test_models_are_only_told_to_those_whom_an_engine_would_tell(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            fleet.engines[0].api_key = "key"
            for header, status in (("", 401), ("Bearer wrong", 401), ("Bearer key", 200)):
                async with fleet.client.get(f"{fleet.url}/v1/models", headers={"Authorization": header}) as answer:
                    assert answer.status == status

    asyncio.run(run())


def test_connections_to_engines_are_used_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1, settings=SLOW_PROBES) as fleet:
            for number in range(10):
                await fleet.ask(prompt=[number], stream=number % 2 == 0)
            assert len({id(received.client) for received in fleet.engines[0].received}) <= 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "salt_in_body", "trusted", "forwarded"),
    [
        ({"x-kvpool-tenant": "red"}, None, False, "red"),
        ({"x-kvpool-tenant": "red"}, "mine", False, "red"),
        ({"x-kvpool-tenant": "red"}, "mine", True, "red"),
        ({}, "mine", False, None),
        ({}, "mine", True, "mine"),
        ({}, None, False, None),
    ],
)
def test_salt_comes_from_the_gateway_and_not_from_the_client(
    tmp_path: Path, headers: dict[str, str], salt_in_body: str | None, trusted: bool, forwarded: str | None
) -> None:
    async def run() -> None:
        tenancy = {"tenancy": {"trust_client_salt": trusted}}
        async with running_fleet(tmp_path, settings=tenancy) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG, salt=forwarded))])
            await until(lambda: len(fleet.router.fleet.index) == 40)
            body = {"prompt": LONG} | ({"cache_salt": salt_in_body} if salt_in_body else {})
            answer = await fleet.ask(headers=headers, **body)
            received = fleet.engines[1].received[0]
            assert (fleet.chosen(answer), answer.route["gpu"]) == (1, "40")
            assert received.body.get("cache_salt") == forwarded
            assert "x-kvpool-tenant" not in {name.lower() for name in received.headers}

    asyncio.run(run())


def test_tenants_do_not_share_a_prefix(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG, salt="red"))])
            await until(lambda: len(fleet.router.fleet.index) == 40)
            assert (await fleet.ask(prompt=LONG, headers={"x-kvpool-tenant": "blue"})).route["gpu"] == "0"

    asyncio.run(run())


def test_missing_tenant_is_refused_where_one_is_required(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings={"tenancy": {"missing": "Reject"}}) as fleet:
            answer = await fleet.ask(prompt=LONG)
            assert (answer.status, answer.headers["x-kvpool-route"]) == (400, "reason=bad-request")
            assert (await fleet.ask(prompt=LONG, headers={"x-kvpool-tenant": "red"})).status == 200

    asyncio.run(run())


def test_two_tenant_headers_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            headers = [("x-kvpool-tenant", "red"), ("x-kvpool-tenant", "blue"), ("content-type", "application/json")]
            async with fleet.client.post(f"{fleet.url}/v1/completions", data=b"{}", headers=headers) as answer:
                assert answer.status == 400

    asyncio.run(run())


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"prompt": NaN}', '{"prompt": "x"}'.encode("utf-16"), b'{"prompt": "x"'])
def test_body_that_is_no_json_object_never_reaches_an_engine(tmp_path: Path, raw: bytes) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            async with fleet.client.post(f"{fleet.url}/v1/completions", data=raw) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["type"] == "invalid_request_error"
            assert not any(engine.received for engine in fleet.engines)

    asyncio.run(run())


def test_body_over_the_limit_is_413(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings={"max_body_bytes": 1_000}) as fleet:
            async with fleet.client.post(f"{fleet.url}/v1/completions", data=b" " * 1_001) as answer:
                assert answer.status == 413
            assert (await fleet.ask(prompt="x")).status == 200

    asyncio.run(run())


def test_body_that_comes_in_drops_is_408_and_gives_its_room_back(tmp_path: Path) -> None:
    async def drops() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    async def run() -> None:
        async with running_fleet(tmp_path, settings={"timeouts": {"body_seconds": 0.5}}) as fleet:
            async with fleet.client.post(f"{fleet.url}/v1/completions", data=drops()) as answer:
                assert answer.status == 408
                assert "0.5 s" in (await answer.json())["error"]["message"]
            assert fleet.router.bodies.held == 0
            assert (await fleet.ask(prompt="x")).status == 200

    asyncio.run(run())


def test_bodies_over_the_room_for_all_are_503_until_answers_begin(tmp_path: Path) -> None:
    async def run() -> None:
        settings = {"max_body_bytes": 1_000, "max_bodies_bytes": 1_500}
        async with running_fleet(tmp_path, engines=1, settings=settings) as fleet:
            engine = fleet.engines[0]
            engine.gate.clear()
            engine.pieces_gate.clear()
            held = asyncio.create_task(fleet.ask(prompt="x" * 800, stream=True))
            await until(lambda: engine.received)
            refused = await fleet.ask(prompt="y" * 800)
            assert (refused.status, refused.route["reason"]) == (503, "router-full")
            assert refused.headers["retry-after"] == "1"
            assert "max_bodies_bytes" in json.loads(refused.body)["error"]["message"]
            engine.gate.set()
            await until(lambda: fleet.router.bodies.held == 0)
            assert (await fleet.ask(prompt="y" * 800)).status == 200
            engine.pieces_gate.set()
            assert (await held).status == 200
            for raw in (b"no json", b" " * 1_001):
                async with fleet.client.post(f"{fleet.url}/v1/completions", data=raw):
                    pass
            assert fleet.router.bodies.held == 0

    asyncio.run(run())


def test_prompt_of_megabytes_passes_whole(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1) as fleet:
            raw = json.dumps({"model": MODEL, "prompt": "x" * 1_200_000}).encode()
            async with fleet.client.post(f"{fleet.url}/v1/completions", data=io.BytesIO(raw)) as answer:
                assert answer.status == 200
            assert fleet.engines[0].received[0].raw == raw
            assert len(fleet.engines[0].tokenize_requests) == 1

    asyncio.run(run())


def test_embeddings_and_tokenization_go_by_load(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            tenant = {"x-kvpool-tenant": "red"}
            answer = await fleet.ask("/v1/embeddings", headers=tenant, input="x")
            assert (answer.status, answer.route["reason"]) == (200, "load")
            assert fleet.engines[fleet.chosen(answer)].received[0].body["cache_salt"] == "red"
            tokens = await fleet.ask("/tokenize", headers=tenant, prompt="abc")
            assert json.loads(tokens.body)["tokens"] == [97, 98, 99]
            (asked,) = [body for engine in fleet.engines for body in engine.tokenize_requests]
            assert asked == {"prompt": "abc", "model": MODEL}
            assert (await fleet.ask("/detokenize", tokens=[1])).status == 200

    asyncio.run(run())


def test_two_hundred_requests_survive_an_engine_going_and_coming_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            gate = asyncio.Semaphore(16)

            async def one(number: int) -> int:
                async with gate:
                    if number == 50:
                        await fleet.engines[0].stop()
                    if number == 120:
                        await fleet.engines[0].start()
                    return (await fleet.ask(prompt=prompt(f"{number}", 4), stream=number % 2 == 0)).status

            assert set(await asyncio.gather(*(one(number) for number in range(200)))) == {200}
            await until(lambda: all(endpoint.up for endpoint in fleet.router.table.all()))

    asyncio.run(run())
