"""What routing reads in a body, and the only change it makes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_router.request_body import BodyError, RenderedPrompt, RequestBody, TokenPrompt, parse_body, salt_of_tenant


def parse(body: dict[str, Any] | bytes, *, tenant: str = "", trust: bool = False) -> RequestBody:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_body(raw, tenant=tenant, trust_client_salt=trust)


def asked(body: dict[str, Any]) -> Any:
    """The body for /tokenize."""
    prompt = parse(body).prompt
    assert isinstance(prompt, RenderedPrompt)
    return json.loads(prompt.payload)


def test_completion_is_tokenized_as_it_would_be_computed() -> None:
    assert asked({"model": "m", "prompt": "hi", "add_special_tokens": False, "n": 2}) == {
        "model": "m",
        "prompt": "hi",
        "add_special_tokens": False,
    }
    assert asked({"prompt": ["hi"]}) == {"prompt": "hi"}


def test_chat_template_gets_what_vllms_chat_route_gives_it() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "documents": [{"title": "t"}],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"x": 1},
        "continue_final_message": True,
        "add_generation_prompt": False,
        "tools": None,
    }
    assert asked(body) == {
        "messages": body["messages"],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {
            "x": 1,
            "documents": [{"title": "t"}],
            "reasoning_effort": "none",
            "enable_thinking": False,
        },
    }


def test_assistant_turns_without_content_are_text() -> None:
    assert asked({"messages": [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "user"}]})


def test_token_ids_are_taken_as_they_are() -> None:
    prompt = parse({"prompt": [1, 2, 70_000]}).prompt
    assert isinstance(prompt, TokenPrompt)
    assert list(prompt.tokens) == [1, 2, 70_000]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", "b"]},
        {"prompt": [1, "a"]},
        {"prompt": [-1]},
        {"prompt": [2**40]},
        {"prompt": 7},
        {"prompt": "a", "prompt_logprobs": 0},
        {"prompt": "a", "truncate_prompt_tokens": 1},
        {"prompt": "a", "echo": True, "logprobs": 1},
        {"prompt": "a", "prompt_embeds": "x"},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"messages": 1},
    ],
)
def test_other_prompts_have_no_hashes(body: dict[str, Any]) -> None:
    parsed = parse(body)
    assert parsed.prompt is None
    assert parsed.estimated_tokens >= 1


def test_untouched_bodies_stay_the_same_bytes() -> None:
    raw = b' {"prompt":"x",\n"temperature":1.50,"prompt":"y"} '
    assert parse(raw).forwarded is raw
    assert parse(b'{"cache_salt":"a","prompt":"x"}', trust=True).forwarded == b'{"cache_salt":"a","prompt":"x"}'


def test_other_fields_keep_their_bytes_when_the_salt_changes() -> None:
    raw = b'{"temperature":1.50,"seed":123456789012345678901234567890,"x":"\\u00e4","cache_salt":"mine"}'
    assert parse(raw).forwarded == b'{"temperature":1.50,"seed":123456789012345678901234567890,"x":"\\u00e4"}'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"cache_salt":"evil","prompt":"x"}',
        b'{"cache\\u005fsalt":"evil","prompt":"x"}',
        b'{"cache_salt":"a","prompt":"x","cache_salt":"evil"}',
        b'{"cache_salt":{"evil":1},"prompt":"x"}',
    ],
)
def test_no_spelling_of_a_clients_salt_gets_through(raw: bytes) -> None:
    assert "cache_salt" not in json.loads(parse(raw).forwarded)
    assert b"evil" not in parse(raw, tenant="red").forwarded
    assert json.loads(parse(raw, tenant="red").forwarded)["cache_salt"] == "red"


def test_tenant_name_that_vllm_refuses_as_salt_becomes_a_digest() -> None:
    for name in ("a@b.example", "team/a", "x" * 129):
        salt = salt_of_tenant(name)
        assert salt.startswith("tenant-")
        assert salt == salt_of_tenant(name) != salt_of_tenant(name + "!")
    assert salt_of_tenant("team-a") == "team-a"


def test_prompt_too_long_to_parse_goes_by_load() -> None:
    for body in (
        {"prompt": [300] * 2_000_000},
        {"messages": [{"content": "x" * 9_000_000}]},
        {"messages": [], "chat_template_kwargs": {"x": 1}, "tools": [], "prompt": "x" * 9_000_000},
    ):
        parsed = parse(body, tenant="red")
        assert parsed.prompt is None
        assert json.loads(parsed.forwarded) == body | {"cache_salt": "red"}
    assert parse({"prompt": "x" * 8_000_000}).prompt is not None


def test_megabytes_of_fields_that_no_engine_knows_are_refused() -> None:
    for extra in ({f"field-{number}": 1 for number in range(100_000)}, {"x": "y" * 1_100_000}):
        with pytest.raises(BodyError, match=r"^fields other than .* leave them out"):
            parse({"prompt": "hi", **extra})
    assert parse({"prompt": "hi", "x": "y" * 1_000_000}).prompt is not None
    for name in ("messages", "tools", "input", "documents", "prompt_embeds", "tokens"):
        parse({name: "y" * 1_100_000})


def test_tenant_named_like_a_digest_does_not_get_that_tenants_salt() -> None:
    digest = salt_of_tenant("team/a")
    assert len({digest, salt_of_tenant(digest), salt_of_tenant(salt_of_tenant(digest))}) == 3


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["prompt", "messages", "model", "stream", "cache_salt", "tools", "chat_template_kwargs"])


@settings(max_examples=60)
@given(st.dictionaries(NAMES | st.text(max_size=5), JSON, max_size=6), st.sampled_from(["", "red"]))
def test_only_the_salt_ever_changes(body: dict[str, Any], tenant: str) -> None:
    forwarded = json.loads(parse(body, tenant=tenant).forwarded)
    expected = {name: value for name, value in body.items() if name != "cache_salt"}
    assert forwarded == expected | ({"cache_salt": "red"} if tenant else {})


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_body_error(raw: bytes) -> None:
    with contextlib.suppress(BodyError):
        parse(raw)


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": [{}] * 60_000},
        {"prompt": [1] * 2_100_000},
        {"prompt": [[1]] * 60_000},
        {"prompt": ["a"] * 60_000},
    ],
)
def test_prompt_of_very_many_parts_goes_by_load(prompt: dict[str, object]) -> None:
    body = parse({"model": "m", **prompt})
    assert body.prompt is None
    assert body.estimated_tokens > 10_000


def test_long_template_arguments_go_by_load_and_are_forwarded() -> None:
    sent = {"model": "m", "messages": [{"content": "x"}], "chat_template_kwargs": {"documents": "x" * (2 << 20)}}
    body = parse(sent)
    assert body.prompt is None
    assert json.loads(body.forwarded) == sent
