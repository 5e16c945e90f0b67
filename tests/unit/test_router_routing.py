"""Where the running router sends requests, by what agents and engines say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool_core.wire import EventsDelta, encode
from tests.unit.router_stubs import (
    MODEL,
    Fleet,
    engine_info,
    gpu,
    hashes_of,
    prompt,
    running_fleet,
    tier,
    tokens_of,
    until,
)

LONG = prompt("long", 90)


async def _expected(fleet: Fleet, text: str, **wanted: int) -> None:
    """Wait until the router expects so many blocks by tier at the endpoint that it would choose."""

    async def is_so() -> bool:
        route = (await fleet.admin("POST", "/v1/explain", model=MODEL, prompt=text)).body
        return all(f'"{name}":{count}'.encode() in route for name, count in wanted.items())

    async with asyncio.timeout(10):
        while not await is_so():  # noqa: ASYNC110 (the condition is asked over HTTP)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("holder", [0, 1])
def test_follow_up_goes_to_the_engine_with_its_prefix_on_the_gpu(tmp_path: Path, holder: int) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[holder].publish(stored=[gpu(f"engine-{holder}", hashes_of(LONG))])
            await _expected(fleet, LONG, gpu=90)
            answer = await fleet.ask(prompt=LONG + " and then?")
            assert fleet.chosen(answer) == holder
            assert answer.headers["x-kvpool-route"] == (
                f"endpoint={fleet.engines[holder].address}; agent=node-{holder}; gpu=90; ram=0; valkey=0; reason=prefix"
            )

    asyncio.run(run())


def test_prefix_spread_over_tiers_is_counted_by_tier(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            hashes = hashes_of(LONG)
            fleet.agents[1].publish(
                stored=[gpu("engine-1", hashes[:10]), tier("ram", hashes[:60]), tier("valkey", hashes[:80])]
            )
            await _expected(fleet, LONG, gpu=10, ram=50, valkey=20)
            route = (await fleet.ask(prompt=LONG)).route
            assert (route["agent"], route["gpu"], route["ram"], route["valkey"]) == ("node-1", "10", "50", "20")

    asyncio.run(run())


def test_what_one_agent_wrote_to_valkey_counts_for_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[0].publish(stored=[tier("valkey", hashes_of(LONG))])
            await _expected(fleet, LONG, valkey=90)
            fleet.agents[1].publish(removed=[tier("valkey", hashes_of(LONG)[40:])])
            await _expected(fleet, LONG, valkey=40)

    asyncio.run(run())


def test_other_domain_counts_for_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[0].publish(stored=[tier("ram", hashes_of(LONG), domain=bytes(16)), gpu("engine-0", [1])])
            await until(lambda: len(fleet.router.fleet.index) == 91)
            assert (await fleet.ask(prompt=LONG)).route["ram"] == "0"

    asyncio.run(run())


def test_sliding_window_groups_are_not_indexed(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[0].publish(stored=[tier("ram", hashes_of(LONG), group=1), gpu("engine-0", [1])])
            await until(lambda: len(fleet.router.fleet.index))
            assert len(fleet.router.fleet.index) == 1

    asyncio.run(run())


def test_unrelated_prompt_goes_to_the_other_engine_while_a_cold_prompt_runs(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            for engine in fleet.engines:
                engine.gate.clear()
            cold = asyncio.create_task(fleet.ask(prompt=LONG, stream=True))
            await until(lambda: any(engine.received for engine in fleet.engines))
            busy = 0 if fleet.engines[0].received else 1
            fleet.engines[1 - busy].gate.set()
            for name in "abcdef":
                assert fleet.chosen(await fleet.ask(prompt=prompt(name, 80))) == 1 - busy
            fleet.engines[busy].gate.set()
            assert fleet.chosen(await cold) == busy

    asyncio.run(run())


@pytest.mark.parametrize("busy", [0, 1])
def test_prompt_avoids_an_engine_that_another_router_keeps_busy(tmp_path: Path, busy: int) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            info = engine_info(fleet.engines[busy], f"engine-{busy}")
            told = msgspec.structs.replace(info, requests=1, prompt_tokens=100_000)
            fleet.agents[busy].publish(engines=[told])
            fleet.agents[1 - busy].publish(stored=[gpu(f"engine-{1 - busy}", hashes_of(LONG)[:1])])
            await _expected(fleet, LONG, gpu=1)
            for name in "abcdef":
                assert fleet.chosen(await fleet.ask(prompt=prompt(name, 80))) == 1 - busy
            fleet.agents[busy].publish(engines=[info], stored=[gpu(f"engine-{busy}", hashes_of(LONG))])
            await _expected(fleet, LONG, gpu=90)

    asyncio.run(run())


def test_siblings_follow_a_prompt_before_any_event_confirms_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=4) as fleet:
            first = await fleet.ask(prompt=LONG, stream=True)
            for number in range(5):
                answer = await fleet.ask(prompt=f"{LONG}{number}", stream=True)
                assert fleet.chosen(answer) == fleet.chosen(first)
                assert answer.route["gpu"] == "90"

    asyncio.run(run())


def test_prompt_as_token_ids_is_routed_without_asking_an_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG))])
            await until(lambda: len(fleet.router.fleet.index) == 90)
            for form in (tokens_of(LONG), [tokens_of(LONG)]):
                answer = await fleet.ask(prompt=form)
                assert (fleet.chosen(answer), answer.route["gpu"]) == (1, "90")
            assert not any(engine.tokenize_requests for engine in fleet.engines)

    asyncio.run(run())


def test_chat_is_tokenized_with_everything_that_its_template_sees(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            messages = [{"role": "user", "content": "x" * 100}]
            extra: dict[str, Any] = {"tools": [], "chat_template_kwargs": {"thinking": True}, "temperature": 0.5}
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of("<user>" + "x" * 100))])
            await until(lambda: len(fleet.router.fleet.index))
            answer = await fleet.ask("/v1/chat/completions", messages=messages, **extra)
            assert answer.route["gpu"] == "6"
            (asked,) = [body for engine in fleet.engines for body in engine.tokenize_requests]
            assert asked == {
                "model": MODEL,
                "messages": messages,
                "tools": [],
                "chat_template_kwargs": {"thinking": True},
            }

    asyncio.run(run())


UNHASHABLE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["one", "two"]}),
    ("/v1/completions", {"prompt": [[1, 2], [3]]}),
    ("/v1/completions", {"prompt_embeds": "AAAA"}),
    ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("/v1/chat/completions", {"messages": "not messages"}),
]


@pytest.mark.parametrize(("path", "body"), UNHASHABLE)
def test_prompt_whose_hashes_cannot_be_foretold_goes_by_load(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            answer = await fleet.ask(path, **body)
            assert (answer.status, answer.route["reason"]) == (200, "unhashable")
            assert not any(engine.tokenize_requests for engine in fleet.engines)

    asyncio.run(run())


def test_late_tokens_mean_routing_by_load(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings={"tokenization": {"base_seconds": 0.02}}) as fleet:
            for engine in fleet.engines:
                engine.tokenize_gate.clear()
            answer = await fleet.ask(prompt=LONG)
            assert (answer.status, answer.route["reason"]) == (200, "no-tokens")
            assert [await _engine_of(fleet, f"p{i}") for i in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])
            for engine in fleet.engines:
                engine.tokenize_gate.set()

    asyncio.run(run())


async def _engine_of(fleet: Fleet, text: str) -> int:
    return fleet.chosen(await fleet.ask(prompt=text))


def test_other_engine_is_asked_for_tokens_when_the_first_refuses(tmp_path: Path) -> None:
    async def run() -> None:
        slow = {"timeouts": {"probe_interval_seconds": 60.0}}
        async with running_fleet(tmp_path, settings=slow) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG))])
            await until(lambda: len(fleet.router.fleet.index) == 90)
            await fleet.engines[0].stop()
            assert (await fleet.ask(prompt=LONG)).route["gpu"] == "90"

    asyncio.run(run())


def test_agents_out_of_reach_mean_routing_by_load(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            for number, agent in enumerate(fleet.agents):
                agent.publish(stored=[gpu(f"engine-{number}", hashes_of(LONG))])
            await until(lambda: fleet.router.fleet.index.live_holders == 2)
            for agent in fleet.agents:
                await agent.stop()
            await until(lambda: not fleet.router.fleet.in_step())
            answer = await fleet.ask(prompt=LONG)
            assert (answer.status, answer.route["reason"], answer.route["gpu"]) == (200, "stale-index", "0")

    asyncio.run(run())


def test_entries_of_a_lost_agent_count_until_they_are_stale(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings={"index": {"stale_seconds": 60.0}}) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG))])
            await _expected(fleet, LONG, gpu=90)
            await fleet.agents[1].stop()
            await until(lambda: fleet.router.fleet.agent_states()["node-1"].lost_at is not None)
            assert (await fleet.ask(prompt=LONG)).route["gpu"] == "90"

    asyncio.run(run())


def test_gpu_blocks_of_a_disconnected_engine_are_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG)), tier("ram", hashes_of(LONG)[:30])])
            await _expected(fleet, LONG, gpu=90)
            gone, back = (engine_info(fleet.engines[1], "engine-1", connected=yes) for yes in (False, True))
            fleet.agents[1].publish(engines=[gone])
            fleet.agents[1].publish(engines=[back])
            await _expected(fleet, LONG, gpu=0, ram=30)

    asyncio.run(run())


def test_cleared_gpu_cache_is_forgotten_and_filled_anew(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes_of(LONG))])
            await _expected(fleet, LONG, gpu=90)
            fleet.agents[1].publish(cleared=[gpu("engine-1", [])], stored=[gpu("engine-1", hashes_of(LONG)[:7])])
            await _expected(fleet, LONG, gpu=7)

    asyncio.run(run())


def test_engine_is_found_by_its_adapters_and_their_blocks(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            adapter = {"id": "adapter", "object": "model", "root": "/adapters/a", "parent": MODEL}
            fleet.engines[1].models.append(adapter)
            await until(lambda: "adapter" in (fleet.router.table.all()[1].models or {}))
            hashes = hashes_of(LONG, lora=("adapter", "/adapters/a"))
            fleet.agents[1].publish(stored=[gpu("engine-1", hashes), tier("ram", hashes_of(LONG))])
            await until(lambda: len(fleet.router.fleet.index) == 180)
            answer = await fleet.ask(model="adapter", prompt=LONG)
            assert (fleet.chosen(answer), answer.route["gpu"]) == (1, "90")
            assert answer.route["reason"] == "single"

    asyncio.run(run())


def test_unknown_model_is_answered_by_an_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            answer = await fleet.ask(model="what", prompt="x")
            assert (answer.status, answer.route["reason"]) == (200, "unknown-model")

    asyncio.run(run())


def test_data_parallel_ranks_are_targets_of_their_own(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, engines=1, report=False) as fleet:
            infos = [engine_info(fleet.engines[0], f"rank-{rank}", dp_rank=rank) for rank in (0, 1)]
            fleet.agents[0].publish(engines=infos, stored=[gpu("rank-1", hashes_of(LONG))])
            await _expected(fleet, LONG, gpu=90)
            answer = await fleet.ask(prompt=LONG, headers={"X-data-parallel-rank": "7"})
            assert (answer.route["dp_rank"], answer.route["gpu"]) == ("1", "90")
            assert fleet.engines[0].received[-1].headers["X-data-parallel-rank"] == "1"
            fleet.agents[0].publish(cleared=[gpu("rank-1", [])], stored=[gpu("rank-0", hashes_of(prompt("other", 90)))])
            await _expected(fleet, prompt("other", 90), gpu=90)
            await fleet.ask(prompt=prompt("other", 90))
            assert fleet.engines[0].received[-1].headers["X-data-parallel-rank"] == "0"

    asyncio.run(run())


def test_lone_engine_gets_no_rank_whatever_it_reports(tmp_path: Path) -> None:
    """An engine of an older connector reports its global rank, which an API server with external balancing refuses."""

    async def run() -> None:
        async with running_fleet(tmp_path, engines=1, report=False) as fleet:
            info = engine_info(fleet.engines[0], "rank-1", dp_rank=1)
            fleet.agents[0].publish(engines=[info], stored=[gpu("rank-1", hashes_of(LONG))])
            await _expected(fleet, LONG, gpu=90)
            answer = await fleet.ask(prompt=LONG)
            assert (answer.route.get("dp_rank"), answer.route["gpu"]) == (None, "90")
            assert "X-data-parallel-rank" not in fleet.engines[0].received[-1].headers

    asyncio.run(run())


def test_gap_in_the_stream_leads_to_a_new_snapshot(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = fleet.agents[1]
            agent.publish(stored=[gpu("engine-1", hashes_of(prompt("old", 90)))])
            await _expected(fleet, prompt("old", 90), gpu=90)
            agent.blocks = [gpu("engine-1", hashes_of(LONG))]
            agent.seq += 1
            agent.publish()
            await _expected(fleet, LONG, gpu=90)
            await _expected(fleet, prompt("old", 90), gpu=0)
            assert agent.subscriptions == 2
            assert fleet.metric("kvpool_router_resyncs_total", agent="node-1", reason="gap") == 1

    asyncio.run(run())


def test_events_of_another_agent_process_lead_to_a_new_snapshot(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = fleet.agents[1]
            agent.send(encode(EventsDelta(0, b"boot-2", agent.seq + 1, [], [gpu("engine-1", [1])], [], [])))
            await until(lambda: agent.subscriptions == 2)
            await fleet.in_step()
            assert len(fleet.router.fleet.index) == 0
            assert fleet.metric("kvpool_router_resyncs_total", agent="node-1", reason="boot-id") == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "bad", [b"\x04\x00\x00\x00junk", b"\xff\xff\xff\xff", encode(EventsDelta(0, b"", 0, [], [], [], []))]
)
def test_garbage_in_a_stream_leads_to_a_new_snapshot_and_harms_no_other(tmp_path: Path, bad: bytes) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            fleet.agents[0].send(bad)
            await until(lambda: fleet.agents[0].subscriptions == 2)
            await fleet.in_step()
            assert fleet.agents[1].subscriptions == 1
            assert (await fleet.ask(prompt="hello")).status == 200

    asyncio.run(run())


def test_silent_stream_is_subscribed_to_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings={"index": {"silence_seconds": 0.05}}) as fleet:
            await until(lambda: fleet.agents[0].subscriptions >= 3)
            assert fleet.metric("kvpool_router_resyncs_total", agent="node-0", reason="silent") >= 2

    asyncio.run(run())


def test_old_entries_count_until_the_new_snapshot_is_complete(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path, settings={"index": {"stale_seconds": 60.0}}) as fleet:
            agent = fleet.agents[1]
            agent.publish(stored=[gpu("engine-1", hashes_of(LONG))])
            await _expected(fleet, LONG, gpu=90)
            agent.blocks = [gpu("engine-1", hashes_of(LONG)[:5])]
            agent.hold_snapshot = asyncio.Event()
            agent.end_streams()
            await until(lambda: agent.subscriptions == 2)
            await _expected(fleet, LONG, gpu=90)
            agent.hold_snapshot.set()
            await _expected(fleet, LONG, gpu=5)

    asyncio.run(run())


def test_restarted_agent_keeps_valkey_hints_and_loses_the_rest(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_fleet(tmp_path) as fleet:
            agent = fleet.agents[1]
            hashes = hashes_of(LONG)
            agent.publish(stored=[gpu("engine-1", hashes[:10]), tier("ram", hashes[:20]), tier("valkey", hashes[:50])])
            await _expected(fleet, LONG, gpu=10, ram=10, valkey=30)
            agent.boot_id, agent.seq = b"boot-2", 0
            agent.end_streams()
            await until(lambda: agent.subscriptions == 2)
            await _expected(fleet, LONG, gpu=0, ram=0, valkey=50)

    asyncio.run(run())
