"""vLLM's command-line flags, read as its own parser reads them. Pure.

Both spellings (`--a-b`, `--a_b`), `--flag value`, `--flag=value`, `--flag.key value`, `-n2`, and abbreviations (argparse,
and vLLM's FlexibleArgumentParser over it). Invariant: a flag that vLLM would see is seen here too; the last one wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvpool_operator.webhook.environment import is_resolved
from kvpool_operator.webhook.value_flags import OPTIONAL_VALUE_FLAGS, VALUE_FLAGS

MODEL_FLAG: Final = "--model"

SHORTEST: Final[Mapping[str, str]] = {
    "--kv-transfer-config": "--kv-t",
    "--kv-events-config": "--kv-e",
    "--kv-offloading-size": "--kv-o",
    "--kv-offloading-backend": "--kv-o",
    "--prefix-caching-hash-algo": "--prefix-c",
    "--enable-prefix-caching": "--enable-p",
    "--no-enable-prefix-caching": "--no-enable-p",
    "--pipeline-parallel-size": "--pi",
    "--tensor-parallel-size": "--te",
    "--data-parallel-size-local": "--data-parallel-size-",
    "--nnodes": "--nn",
    "--headless": "--he",
    "--use-replayssm": "--use-r",
    "--no-use-replayssm": "--no-use-r",
    "--port": "--po",
    "--uds": "--ud",
}
"""The shortest abbreviations that argparse may take for these flags of vLLM 0.32; ambiguous ones it refuses itself."""

_NUMBER_AT_LETTER = re.compile(r"(-[a-z])(\d+)")


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One place where a flag stands: `key` behind a dot ("" without), its value ("" where it has none)."""

    flag: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Flags:
    """The arguments of an engine."""

    tokens: tuple[str, ...]
    takes_model_first: bool = False
    """Whether a first argument that is no flag is the model, as of `vllm serve`."""

    def find(self, *flags: str) -> Iterator[Occurrence]:
        """Occurrences of several flags in order."""
        for index, token in enumerate(self.tokens):
            name, has_value, value = _split(token)
            name, _, key = name.partition(".")
            name = name.replace("_", "-") if name.startswith("--") else name
            flag = next((flag for flag in flags if _means(name, flag)), None)
            if flag is not None:
                following = self.tokens[index + 1] if index + 1 < len(self.tokens) else ""
                yield Occurrence(flag, key.replace("-", "_"), value if has_value else following)

    def has(self, flag: str) -> bool:
        """Whether the flag stands anywhere."""
        return any(True for _ in self.find(flag))

    def value(self, *flags: str) -> str | None:
        """Value of the last of several equivalent flags; None without one."""
        values = [occurrence.value for occurrence in self.find(*flags) if not occurrence.key]
        return values[-1] if values else None

    def number(self, *flags: str, default: int) -> int | None:
        """The same as a whole number; None where it is none."""
        text = self.value(*flags)
        if text is None:
            return default
        return int(text) if text.isascii() and text.isdigit() else None

    def is_on(self, flag: str, opposite: str) -> bool | None:
        """What a switch and its opposite come to; None without either."""
        found = [occurrence.flag == flag for occurrence in self.find(flag, opposite)]
        return found[-1] if found else None

    def enables(self, flag: str, key: str) -> bool:
        """Whether a flag with JSON settings sets `key` to true. vLLM lets `--flag.key` replace all of `--flag JSON`."""
        occurrences = list(self.find(flag))
        of_key = [each.value for each in occurrences if each.key == key]
        if any(each.key for each in occurrences):
            return bool(of_key) and of_key[-1].lower() == "true"
        return bool(occurrences) and _json_object(occurrences[-1].value).get(key) is True

    def unknown(self) -> str:
        """An argument that may be any flag, since it comes from outside of the pod; "" when there is none."""
        before_first = MODEL_FLAG if self.takes_model_first else ""
        for former, token in zip((before_first, *self.tokens), self.tokens, strict=False):
            name = token.partition("=")[0]
            if name.startswith(("$(", "-")) and not is_resolved(name) and not _awaits_value(former):
                return token
        return ""


def _awaits_value(token: str) -> bool:
    """Whether the next argument is this one's value. `--flag.key` always has one; of an abbreviation it is not known."""
    name, _, key = token.partition(".")
    name = name.replace("_", "-") if name.startswith("--") else name
    return "=" not in token and name in (VALUE_FLAGS if key else VALUE_FLAGS | OPTIONAL_VALUE_FLAGS)


def _split(token: str) -> tuple[str, str, str]:
    """Name, "=" where a value follows in the same token, and that value."""
    short = _NUMBER_AT_LETTER.fullmatch(token)
    return (short[1], "=", short[2]) if short else token.partition("=")


def _means(name: str, flag: str) -> bool:
    shortest = SHORTEST.get(flag, flag)
    return name == flag or (flag.startswith(name) and name.startswith(shortest))


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
