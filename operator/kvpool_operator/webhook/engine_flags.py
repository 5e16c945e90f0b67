"""vLLM's command-line flags, read as its own parser reads them. Pure.

Both spellings (`--a-b`, `--a_b`), `--flag value`, `--flag=value`, `--flag.key value`, and abbreviations. Invariant: a
flag that vLLM would see is seen here too; the last one wins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One place where a flag stands: `key` behind a dot ("" without), its value ("" where it has none)."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Flags:
    """The arguments of an engine."""

    tokens: tuple[str, ...]

    def find(self, flag: str, *, shortest: str = "") -> Iterator[Occurrence]:
        """Occurrences of a flag in order. shortest: shortest unambiguous abbreviation, the flag itself when empty."""
        for index, token in enumerate(self.tokens):
            name, has_value, value = token.partition("=")
            name, _, key = name.partition(".")
            name = name if _is_short(flag) else name.replace("_", "-")
            if name == flag or (shortest and flag.startswith(name) and name.startswith(shortest)):
                following = self.tokens[index + 1] if index + 1 < len(self.tokens) else ""
                yield Occurrence(key.replace("-", "_"), value if has_value else following)

    def has(self, flag: str, *, shortest: str = "") -> bool:
        """Whether the flag stands anywhere."""
        return any(True for _ in self.find(flag, shortest=shortest))

    def value(self, *flags: str) -> str | None:
        """Value of the last of several equivalent flags; None without one."""
        values = [occurrence.value for flag in flags for occurrence in self.find(flag) if not occurrence.key]
        return values[-1] if values else None

    def number(self, *flags: str, default: int) -> int | None:
        """The same as a whole number; None where it is none."""
        text = self.value(*flags)
        if text is None:
            return default
        return int(text) if text.isascii() and text.isdigit() else None

    def enables(self, flag: str, key: str) -> bool:
        """Whether a flag with JSON settings sets `key` to true, as JSON or as `--flag.key true`."""
        for occurrence in self.find(flag):
            if occurrence.key:
                is_on = occurrence.key == key and occurrence.value.lower() == "true"
            else:
                is_on = _json_object(occurrence.value).get(key) is True
            if is_on:
                return True
        return False


def _is_short(flag: str) -> bool:
    return not flag.startswith("--")


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def expand(tokens: Sequence[str], environment: Sequence[dict[str, object]]) -> tuple[str, ...]:
    """Tokens with `$(NAME)` replaced as the kubelet does, as far as the values stand in the pod."""
    values = {str(entry.get("name")): entry["value"] for entry in environment if isinstance(entry.get("value"), str)}
    return tuple(_expand(token, values) for token in tokens)


def _expand(text: str, values: dict[str, object]) -> str:
    for name, value in values.items():
        text = text.replace(f"$({name})", str(value))
    return text
