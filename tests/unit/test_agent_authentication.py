"""Engines that have to say who they are: tokens, reviews, namespaces, an API server that goes away. Real agent processes."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool_agent.authentication import EXPIRY_MARGIN_SECONDS, FRESH_SECONDS, UNDATED_SECONDS, Verdict
from kvpool_agent.pod_identity import PodIdentity, Refusal, read_review, token_expiry
from kvpool_core import wire
from tests.unit.agent_peer import Node, Peer, hello, running_node, wait_for
from tests.unit.fake_kubernetes import FakeKubernetes, Manifest, running_kubernetes

AUDIENCE = "kvpool.io/test/unit"


def make_token(namespace: str, pod: str, *, seconds: float = 3600) -> str:
    """Shaped like a service account's; the fake server takes its word for it."""
    claims = {"exp": int(time.time() + seconds), "namespace": namespace, "pod": pod}
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{payload}.signature"


def review(spec: Manifest) -> Manifest:
    """What a real server answers for such a token."""
    if not spec["token"].startswith("header."):
        return {"authenticated": False, "error": "invalid bearer token"}
    payload = spec["token"].split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    extra = {
        "authentication.kubernetes.io/pod-name": [claims["pod"]],
        "authentication.kubernetes.io/pod-uid": ["uid-of-" + claims["pod"]],
    }
    user = {"username": f"system:serviceaccount:{claims['namespace']}:default", "extra": extra}
    return {"authenticated": True, "audiences": spec["audiences"], "user": user}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeKubernetes]:
    with running_kubernetes() as running:
        running.review_status = review
        yield running


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, server: FakeKubernetes) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("n")
    (folder / "allowed").write_text("chat\nother\n")
    extra = f"authentication: kubernetes\nallowed_namespaces_file: {folder}/allowed\n"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KUBECONFIG", str(server.write_kubeconfig(folder / "kubeconfig")))
        with running_node(folder, extra=extra) as running:
            yield running


@pytest.fixture
def kubernetes(server: FakeKubernetes) -> Iterator[FakeKubernetes]:
    server.reviews.clear()
    yield server
    server.down, server.refuse_with = False, 0


def greet(node: Node, token: str, *, engine_id: str = "engine-a", role: str = "scheduler") -> Peer:
    """A connection that has said Hello with the token."""
    peer = Peer(node.socket_path)
    peer.send(msgspec.structs.replace(hello(engine_id, role), token=token))
    return peer


def refusal_of(node: Node, token: str) -> wire.Refused:
    """How the agent answers a Hello with that token."""
    peer = greet(node, token)
    try:
        refused = peer.receive(wire.Refused)
        assert peer.is_closed()
        return refused
    finally:
        peer.close()


def test_engine_of_an_allowed_namespace_is_welcomed_and_its_pod_is_named(
    node: Node, kubernetes: FakeKubernetes
) -> None:
    peers = [greet(node, make_token("chat", "llama-0"), role=role) for role in ("scheduler", "worker")]
    for peer in peers:
        assert peer.receive(wire.Welcome).capacity_bytes == 64 << 20
    engines = wait_for(lambda: node.stats()["engines"], "the engine")
    assert isinstance(engines, list)
    assert engines[0]["pod"] == {"namespace": "chat", "name": "llama-0", "uid": "uid-of-llama-0"}
    assert [spec["audiences"] for spec in kubernetes.reviews] == [[AUDIENCE]], "one review for both processes"
    for peer in peers:
        peer.close()


@pytest.mark.parametrize(
    ("token_of", "code"),
    [
        (lambda: "", "TokenMissing"),
        (lambda: "forged", "TokenRejected"),
        (lambda: make_token("stranger", "x"), "NamespaceNotAllowed"),
    ],
    ids=["none", "forged", "stranger"],
)
def test_others_are_refused_with_a_code(node: Node, token_of: Callable[[], str], code: str) -> None:
    token = token_of()
    refused = refusal_of(node, token)
    assert refused.code == code
    assert token == "" or token not in refused.message
    assert node.counter(f"kvpool_agent_authentications_total{{outcome={code}}}") >= 1


def test_engine_speaks_only_when_it_is_welcomed(node: Node) -> None:
    peer = Peer(node.socket_path)
    try:
        greeting = msgspec.structs.replace(hello("engine-a", "scheduler"), token=make_token("chat", "llama-0"))
        both = wire.encode(greeting) + wire.encode(wire.RegisterScheduler(0, b"s" * 16, ""))
        peer.socket.sendall(both)  # so that the second is there before the first's token is reviewed
        assert peer.is_closed()
    finally:
        peer.close()


def test_without_the_api_server_known_engines_come_back_and_others_are_told_to_try_again(
    node: Node, kubernetes: FakeKubernetes
) -> None:
    known = make_token("chat", "llama-0")
    first = greet(node, known)
    first.receive(wire.Welcome)
    kubernetes.down = True
    assert refusal_of(node, make_token("chat", "unknown")).code == "AuthenticationUnavailable"
    first.send(wire.RegisterScheduler(0, b"s" * 16, ""))
    first.receive(wire.Domain)
    first.close()
    again = greet(node, known)
    again.receive(wire.Welcome)
    again.close()
    kubernetes.down = False
    late = greet(node, make_token("chat", "llama-1"), engine_id="engine-b")
    late.receive(wire.Welcome)
    late.close()


def test_agent_that_may_not_ask_says_so(node: Node, kubernetes: FakeKubernetes) -> None:
    kubernetes.refuse_with = 403
    assert refusal_of(node, make_token("chat", "never-seen")).code == "AuthenticationUnavailable"
    assert node.agent is not None
    reasons = [str(line["reason"]) for line in node.agent.lines("no verdict on a token")]
    assert any("may this service account create tokenreviews?" in reason for reason in reasons)


def test_namespaces_are_read_again_and_those_not_allowed_any_more_are_sent_away(node: Node) -> None:
    stays, goes = greet(node, make_token("chat", "a")), greet(node, make_token("other", "b"), engine_id="engine-b")
    for peer in (stays, goes):
        peer.receive(wire.Welcome)
    replaced = node.folder / "allowed.new"
    replaced.write_text("chat\nnew\n")
    replaced.replace(node.folder / "allowed")
    assert goes.receive(wire.Refused).code == "NamespaceNotAllowed"
    assert goes.is_closed()
    new = greet(node, make_token("new", "c"), engine_id="engine-c")
    new.receive(wire.Welcome)
    stays.send(wire.RegisterScheduler(0, b"s" * 16, ""))
    stays.receive(wire.Domain)
    for peer in (stays, goes, new):
        peer.close()
    (node.folder / "allowed").write_text("chat\nother\nmore\n")


def test_engine_whose_namespace_is_taken_away_while_the_arena_is_pending_is_not_welcomed(
    tmp_path: Path, server: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text("chat\nother\n")
    monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
    node = Node(tmp_path, extra=f"authentication: kubernetes\nallowed_namespaces_file: {allowed}\n")
    try:
        node.start_agent(wait=False)  # without a holder there is no arena
        wait_for(node.socket_path.exists, "the socket")
        tokens = {"stays": make_token("chat", "a"), "goes": make_token("other", "b")}
        peers = {name: Peer(node.socket_path) for name in tokens}
        for name, peer in peers.items():
            peer.send(msgspec.structs.replace(hello(name, "scheduler", versions=(1, 2)), token=tokens[name]))
        admitted = b'kvpool_agent_authentications_total{outcome="admitted"} 2.0'
        wait_for(lambda: admitted in node.get("/metrics")[1], "the reviews")
        (tmp_path / "allowed.new").write_text("chat\n")
        (tmp_path / "allowed.new").replace(allowed)
        assert peers["goes"].receive(wire.Refused).code == "NamespaceNotAllowed"
        assert peers["goes"].is_closed()
        node.start_holder()
        assert peers["stays"].receive(wire.Welcome).capacity_bytes == 64 << 20
        for peer in peers.values():
            peer.close()
    finally:
        node.stop()


def test_engine_id_of_a_living_engine_is_refused_to_another_pod(node: Node) -> None:
    first = greet(node, make_token("chat", "a"))
    first.receive(wire.Welcome)
    thief = greet(node, make_token("chat", "b"), role="worker")
    assert thief.receive(wire.Refused).code == "EngineMismatch"
    for peer in (first, thief):
        peer.close()


@pytest.mark.parametrize("authentication", ["kubernetes", "none"])
def test_client_of_the_api_server_is_loaded_before_engines_can_connect_and_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authentication: str
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    (tmp_path / "allowed").write_text("chat\n")
    extra = f"authentication: {authentication}\nallowed_namespaces_file: {tmp_path}/allowed\n"
    node = Node(tmp_path, extra=extra if authentication == "kubernetes" else "")
    try:
        agent = node.start_agent(wait=False)
        wait_for(node.socket_path.exists, "the socket")
        assert ("kubernetes.client.rest" in agent.log.read_text()) == (authentication == "kubernetes")
    finally:
        node.stop()


GOOD = {
    "authenticated": True,
    "audiences": [AUDIENCE],
    "user": {
        "username": "system:serviceaccount:chat:default",
        "extra": {
            "authentication.kubernetes.io/pod-name": ["llama-0"],
            "authentication.kubernetes.io/pod-uid": ["u-1"],
        },
    },
}


def test_review_names_the_pod() -> None:
    assert read_review(GOOD, AUDIENCE) == PodIdentity("chat", "llama-0", "u-1")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"authenticated": False, "error": "expired"}, "TokenRejected"),
        ({"audiences": []}, "TokenRejected"),
        ({"audiences": ["https://kubernetes.default.svc"]}, "TokenRejected"),
        ({"user": {"username": "alice"}}, "TokenRejected"),
        ({"user": {"username": "system:serviceaccount:chat"}}, "TokenRejected"),
        ({"user": {"username": "system:serviceaccount:chat:default"}}, "TokenUnbound"),
    ],
)
def test_review_that_does_not_prove_a_pod_is_a_refusal(change: Manifest, code: str) -> None:
    outcome = read_review(GOOD | change, AUDIENCE)
    assert isinstance(outcome, Refusal)
    assert outcome.code == code


@given(st.text() | st.from_regex(re.compile(r"[\w-]*\.[\w-]*\.[\w-]*", re.ASCII)))
@example("." + base64.urlsafe_b64encode(b"[" * 30_000).decode() + ".")
def test_expiry_of_any_text_is_a_time_or_unknown(text: str) -> None:
    expiry = token_expiry(text)
    assert expiry is None or isinstance(expiry, float)


def test_expiry_is_the_tokens_own() -> None:
    assert token_expiry(make_token("chat", "a", seconds=60)) == pytest.approx(time.time() + 60, abs=2)


def test_clock_set_back_keeps_no_review_fresh() -> None:
    verdict = Verdict(PodIdentity("chat", "a", "u"), at=1000.0, expiry=50_000.0)
    assert verdict.is_fresh(now=1000.0 + FRESH_SECONDS - 1, wall=40_000.0)
    assert not verdict.is_fresh(now=1000.0 + FRESH_SECONDS, wall=30_000.0)
    assert verdict.counts(now=1000.0 + FRESH_SECONDS, wall=30_000.0)
    assert not verdict.counts(now=1000.0, wall=50_000.0 - EXPIRY_MARGIN_SECONDS)


def test_review_of_an_undated_token_ends_by_its_age() -> None:
    verdict = Verdict(PodIdentity("chat", "a", "u"), at=1000.0, expiry=None)
    assert verdict.counts(now=1000.0 + UNDATED_SECONDS - 1, wall=0.0)
    assert not verdict.counts(now=1000.0 + UNDATED_SECONDS, wall=0.0)
