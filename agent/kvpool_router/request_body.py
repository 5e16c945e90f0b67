"""An OpenAI request's body as routing sees it, and the only change ever made to it: the tenant's salt.

Invariant: a body is either forwarded byte for byte, or with nothing but `cache_salt` added, replaced or removed; what
cannot be parsed here is refused, since a more lenient parser behind might read another salt in it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

import msgspec

CACHE_SALT = "cache_salt"
_MAX_SALT_CHARS = 128
_DIGEST_PREFIX = "tenant-"
_FORBIDDEN_IN_SALT = frozenset("@/\\\x00")

_CHARS_PER_TOKEN = 4
"""Rough size of a prompt whose tokens are not known: only load is estimated with it."""


_LONGEST_PROMPT_BYTES = 8 << 20
"""A longer one goes by load: a prompt of a million tokens is about 5 MB, and its parts take many times its bytes."""
_MOST_OBJECTS, _MOST_NUMBERS = 50_000, 2_000_000
"""Of messages and their parts, and of token ids; more go by load: decoding them holds up all other requests for 0.1 s."""
_LONGEST_ARGUMENTS_BYTES = 1 << 20
"""Of `chat_template_kwargs`; longer ones go by load."""
_UNKNOWN_BYTES = 1 << 20
"""Fields that are not known here may take this much together: reading each apart takes a microsecond, some 10 bytes."""


class BodyError(ValueError):
    """The body is not a JSON object, or one that no engine wants; the message is for the client."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt given as token ids."""

    tokens: array[int]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt that an engine has to tokenize: `payload` is the body for its /tokenize, `chars` its size."""

    payload: bytes
    chars: int


Prompt = TokenPrompt | RenderedPrompt


@dataclass(frozen=True, slots=True)
class RequestBody:
    """What routing needs. `prompt` is None when its hashes cannot be foretold; `estimated_tokens` is a rough size."""

    model: str
    streaming: bool
    salt: str | None
    prompt: Prompt | None
    estimated_tokens: int
    forwarded: bytes


_Fields = dict[str, msgspec.Raw]
_fields_decoder = msgspec.json.Decoder(_Fields)
_large_decoder = msgspec.json.Decoder(
    msgspec.defstruct(
        "_LargeFields",
        [
            (name, msgspec.Raw, msgspec.Raw(b""))
            for name in (
                "messages",
                "prompt",
                "input",
                "tokens",
                "tools",
                "documents",
                "prompt_embeds",
                "chat_template_kwargs",
            )
        ],
    )
)
_string = msgspec.json.Decoder(str)


class _ContentPart(msgspec.Struct):
    type: str = ""


class _ChatMessage(msgspec.Struct):
    content: str | list[_ContentPart] | None = None


_prompt_decoder = msgspec.json.Decoder(str | list[int | str | list[int]])
_messages_decoder = msgspec.json.Decoder(list[_ChatMessage])

_CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
_TEMPLATE_FIELDS = ("documents", "reasoning_effort")
_HASHES_DIFFER = ("prompt_embeds", "truncate_prompt_tokens", "prompt_logprobs")


def salt_of_tenant(tenant: str) -> str:
    """The tenant's `cache_salt`: its name, or a digest where vLLM would refuse it or where it looks like a digest."""
    is_fit = len(tenant) <= _MAX_SALT_CHARS and not _FORBIDDEN_IN_SALT & set(tenant)
    if is_fit and not tenant.startswith(_DIGEST_PREFIX):
        return tenant
    return _DIGEST_PREFIX + hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()


def parse_body(body: bytes, *, tenant: str, trust_client_salt: bool) -> RequestBody:
    """Parse a completion's, chat completion's or embedding's body; BodyError when it is no JSON object.

    `tenant` is the gateway's header, "" when absent. It wins over the client's own salt, which counts only if trusted.
    """
    try:
        _check_unknown(body)
        fields = _fields_decoder.decode(body)
    except BodyError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BodyError(f"the request body is not a JSON object: {error}") from error
    salt = salt_of_tenant(tenant) if tenant else (_text(fields, CACHE_SALT) if trust_client_salt else None)
    keep = trust_client_salt and not tenant
    prompt, characters = _prompt(fields)
    return RequestBody(
        model=_text(fields, "model") or "",
        streaming=bytes(fields.get("stream", b"")) == b"true",
        salt=salt,
        prompt=prompt,
        estimated_tokens=_estimate(prompt, characters or len(body)),
        forwarded=body if keep else _with_salt(body, fields, salt),
    )


def _check_unknown(body: bytes) -> None:
    """BodyError for a long body that does not consist of fields known to be long."""
    if len(body) <= _UNKNOWN_BYTES:
        return
    large = msgspec.structs.asdict(_large_decoder.decode(body)).values()
    if len(body) - sum(map(_size, large)) > _UNKNOWN_BYTES:
        raise BodyError(f"fields other than the prompt and its tools take over {_UNKNOWN_BYTES} bytes; leave them out")


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes


def _with_salt(body: bytes, fields: _Fields, salt: str | None) -> bytes:
    if salt is None and CACHE_SALT not in fields:
        return body
    changed: dict[str, object] = {name: value for name, value in fields.items() if name != CACHE_SALT}
    if salt is not None:
        changed[CACHE_SALT] = salt
    return msgspec.json.encode(changed)


def _estimate(prompt: Prompt | None, characters: int) -> int:
    return len(prompt.tokens) if isinstance(prompt, TokenPrompt) else max(1, characters // _CHARS_PER_TOKEN)


def _text(fields: _Fields, name: str) -> str | None:
    """A field that should be text; None when it is absent or something else (the engine will say so)."""
    try:
        return _string.decode(fields[name])
    except (KeyError, msgspec.MsgspecError):
        return None


def _is_set(fields: _Fields, name: str) -> bool:
    return bytes(fields.get(name, b"null")) != b"null"


def _prompt(fields: _Fields) -> tuple[Prompt | None, int]:
    """The prompt, and its size in characters (0: unknown)."""
    if any(_is_set(fields, name) for name in _HASHES_DIFFER) or _echoes_logprobs(fields):
        return None, 0
    size = max(_size(fields[name]) if name in fields else 0 for name in ("messages", "prompt"))
    if size > _LONGEST_PROMPT_BYTES or _has_many_parts(fields):
        return None, size
    try:
        if _is_set(fields, "messages"):
            return _chat_prompt(fields)
        if _is_set(fields, "prompt"):
            return _completion_prompt(fields)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return None, 0
    return None, 0


def _has_many_parts(fields: _Fields) -> bool:
    """From counts that take a millisecond for a megabyte; characters within texts are counted too."""
    messages, prompt = bytes(fields.get("messages", b"")), bytes(fields.get("prompt", b""))
    if messages.count(b"{") > _MOST_OBJECTS:
        return True
    return prompt.startswith(b"[") and (
        prompt.count(b",") > _MOST_NUMBERS
        or prompt.count(b"[") > _MOST_OBJECTS
        or prompt.count(b'"') > 2 * _MOST_OBJECTS
    )


def _echoes_logprobs(fields: _Fields) -> bool:
    """Such a completion computes the whole prompt anew: vLLM skips reading its cache."""
    return bytes(fields.get("echo", b"")) == b"true" and _is_set(fields, "logprobs")


def _completion_prompt(fields: _Fields) -> tuple[Prompt | None, int]:
    given = _prompt_decoder.decode(fields["prompt"])
    value = given[0] if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int) else given
    if isinstance(value, str):
        wanted = {"model", "add_special_tokens"} & fields.keys()
        payload = {name: fields[name] for name in sorted(wanted)} | {"prompt": value}
        return RenderedPrompt(msgspec.json.encode(payload), len(value)), len(value)
    if not value or not isinstance(value[0], int):
        return None, sum(len(part) for part in value if not isinstance(part, int))
    return TokenPrompt(array("I", value)), len(value)  # type: ignore[arg-type]


def _chat_prompt(fields: _Fields) -> tuple[Prompt | None, int]:
    messages = _messages_decoder.decode(fields["messages"])
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    characters = len(bytes(fields["messages"]))
    if any(part.type != "text" for part in parts):
        return None, characters
    payload: dict[str, object] = {name: fields[name] for name in _CHAT_FIELDS if _is_set(fields, name)}
    template = _template_arguments(fields)
    if template:
        payload["chat_template_kwargs"] = template
    return RenderedPrompt(msgspec.json.encode(payload), characters), characters


def _template_arguments(fields: _Fields) -> dict[str, object]:
    """`chat_template_kwargs` with what vLLM's chat route adds to them but its /tokenize does not."""
    given: dict[str, object] = {}
    if _is_set(fields, "chat_template_kwargs"):
        if _size(fields["chat_template_kwargs"]) > _LONGEST_ARGUMENTS_BYTES:
            raise ValueError("chat_template_kwargs are too long to read")
        given.update(_fields_decoder.decode(fields["chat_template_kwargs"]))
    for name in _TEMPLATE_FIELDS:
        if _is_set(fields, name):
            given[name] = fields[name]
    if _is_set(fields, "reasoning_effort"):
        given.setdefault("enable_thinking", _text(fields, "reasoning_effort") != "none")
    return given
