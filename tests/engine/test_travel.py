"""Blocks travel: arena, Valkey, restarts; answers stay the engine's own, bit for bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from kvpool_core import wire
from tests.engine.answers import Loads, reference_pair, whole_blocks
from tests.engine.conftest import fresh_prompt, settle, wait_for
from tests.harness import web
from tests.harness.engine import Engine
from tests.harness.engine_client import BLOCK_SIZE, Answer
from tests.harness.stack import Stack

HOLD_SECONDS = 1.5
"""Less than the engines' verdict deadline in these tests."""


def test_cold_answer_is_the_engines_own(fleet: Stack, reference: Engine) -> None:
    prompt = fresh_prompt()
    assert fleet.engines[0].complete(prompt) == reference_pair(reference, prompt).cold


def test_prompt_comes_back_from_ram_with_equal_answer(fleet: Stack, reference: Engine) -> None:
    a, prompt = fleet.engines[0], fresh_prompt()
    expected = reference_pair(reference, prompt)
    a.complete(prompt)
    settle(fleet.nodes[0])
    a.reset_own_cache()
    loads = Loads(a)
    assert a.complete(prompt) == expected.cached
    assert loads.by_tier() == {"ram": whole_blocks(prompt), "valkey": 0}


def test_prompt_comes_from_valkey_on_the_other_node(fleet: Stack, reference: Engine) -> None:
    (a, b), prompt = fleet.engines, fresh_prompt()
    expected = reference_pair(reference, prompt)
    a.complete(prompt)
    settle(fleet.nodes[0])
    loads = Loads(b)
    assert b.complete(prompt) == expected.cached
    assert loads.by_tier() == {"ram": 0, "valkey": whole_blocks(prompt)}


def test_answer_of_an_assistant_is_stored_for_the_next_turn(fleet: Stack) -> None:
    (a, b), prompt = fleet.engines, fresh_prompt()
    answer = a.complete(prompt, max_tokens=96, return_tokens_as_token_ids=True)
    settle(fleet.nodes[0])
    said = [int(token.removeprefix("token_id:")) for token in answer.tokens]
    next_turn = a.tokenize(prompt) + said + a.tokenize(fresh_prompt(20))
    loads = Loads(b)
    b.complete(next_turn, max_tokens=1)
    assert loads.by_tier()["valkey"] >= whole_blocks(prompt) + 64


def test_restarted_agent_takes_the_arena_over(fleet: Stack, reference: Engine) -> None:
    a, node, prompt = fleet.engines[0], fleet.nodes[0], fresh_prompt()
    expected = reference_pair(reference, prompt)
    a.complete(prompt)
    settle(node)
    boot_id = node.stats()["boot_id"]
    node.agent.kill()
    node.agent.start()
    node.wait_ready()
    a.wait_identified()
    assert node.stats()["boot_id"] != boot_id
    a.reset_own_cache()
    loads = Loads(a)
    assert a.complete(prompt) == expected.cached
    assert loads.by_tier() == {"ram": whole_blocks(prompt), "valkey": 0}


def test_engine_without_an_agent_serves_and_finds_it_again(fleet: Stack, reference: Engine) -> None:
    a, node, prompt = fleet.engines[0], fleet.nodes[0], fresh_prompt()
    expected = reference_pair(reference, prompt)
    node.agent.kill()
    try:
        assert a.complete(prompt) == expected.cold
    finally:
        node.agent.start()
        node.wait_ready()
    a.wait_identified()


def test_router_sends_the_next_turn_to_the_holder_and_an_unrelated_prompt_elsewhere(fleet: Stack) -> None:
    (a, b), prompt = fleet.engines, fresh_prompt()
    answer = b.complete(prompt)
    settle(fleet.nodes[1])
    next_turn = prompt + "".join(answer.tokens) + fresh_prompt(20)
    wait_for(
        lambda: "endpoint=" + b.endpoint in a.complete_timed(next_turn, max_tokens=1, url=fleet.router.url).route,
        seconds=10,
        what="next turn routed to the holder of its prefix",
    )
    reply = web.request("POST", f"{fleet.router.url}/v1/completions", a.body(next_turn, max_tokens=1))
    fields = dict(part.strip().split("=", 1) for part in reply.headers["x-kvpool-route"].split(";"))
    assert fields["endpoint"] == b.endpoint
    assert int(fields["gpu"]) >= whole_blocks(prompt) // 32


def test_conversation_comes_back_from_ram_and_its_next_turn_goes_to_the_holder(fleet: Stack, reference: Engine) -> None:
    a, node = fleet.engines[0], fleet.nodes[0]
    turn: list[dict[str, str]] = [{"role": "user", "content": fresh_prompt()}]
    cold, cached = chat(reference, turn), chat(reference, turn)
    assert chat(a, turn) == cold
    settle(node)
    a.reset_own_cache()
    loads = Loads(a)
    assert chat(a, turn) == cached
    prompt_tokens = len(a.tokenize_chat(turn))
    assert loads.by_tier() == {"ram": prompt_tokens // BLOCK_SIZE * BLOCK_SIZE, "valkey": 0}

    said = {"role": "assistant", "content": "".join(cold.tokens)}
    body = chat_body(a, [*turn, said, {"role": "user", "content": fresh_prompt(20)}], max_tokens=1)
    replies: list[web.Reply] = []

    def goes_to_the_holder() -> bool:
        replies.append(web.request("POST", f"{fleet.router.url}/v1/chat/completions", body))
        return f"endpoint={a.endpoint}" in replies[-1].headers["x-kvpool-route"]

    wait_for(goes_to_the_holder, seconds=10, what="next turn routed to the holder of its prefix")
    assert replies[0].status == replies[-1].status == 200
    fields = dict(part.strip().split("=", 1) for part in replies[-1].headers["x-kvpool-route"].split(";"))
    assert fields["reason"] == "prefix"
    assert int(fields["gpu"]) >= prompt_tokens // BLOCK_SIZE


def chat_body(engine: Engine, messages: list[dict[str, str]], *, max_tokens: int = 64) -> dict[str, object]:
    return {
        "model": engine.served_name,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
    }


def chat(engine: Engine, messages: list[dict[str, str]]) -> Answer:
    """The engine's own answer in a conversation."""
    reply = web.request("POST", f"{engine.url}/v1/chat/completions", chat_body(engine, messages))
    assert reply.status == 200, reply.body
    said = reply.json()["choices"][0]["logprobs"]["content"]
    return Answer(tuple(one["token"] for one in said), tuple(one["logprob"] for one in said))


def test_running_request_goes_on_while_another_ones_blocks_are_looked_up(fleet: Stack) -> None:
    a, tap = fleet.engines[0], fleet.taps[0]
    running = web.events(f"{a.url}/v1/completions", a.body(fresh_prompt(), max_tokens=1500, stream=True))
    next(running)
    is_asked, is_enough, held = threading.Event(), threading.Event(), list[bool]()

    def hold(message: wire.Message) -> None:
        """The verdict comes only when the running request has gone on; the engine would not wait for longer than this."""
        if isinstance(message, wire.Prefetch):
            is_asked.set()
        elif isinstance(message, wire.Verdict) and not held:
            held.append(is_enough.wait(HOLD_SECONDS))

    tap.on_message = hold
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(a.complete, fresh_prompt(), max_tokens=1)
        try:
            while not is_asked.is_set():
                next(running)
            for _ in range(10):
                next(running)
            is_enough.set()
            asked.result()
        finally:
            tap.on_message = None
            running.close()
    assert held == [True], "the running request waited for the other one's verdict"


def test_two_requests_at_once_share_one_load(fleet: Stack, reference: Engine) -> None:
    a, prompt = fleet.engines[0], fresh_prompt()
    a.complete(prompt, max_tokens=1)
    settle(fleet.nodes[0])
    a.reset_own_cache()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: a.complete(prompt, max_tokens=8).tokens, range(4)))
    assert len(set(answers)) == 1
    wait_for(lambda: fleet.nodes[0].stats()["arena"]["leases"] == 0, seconds=5, what="leases released")
