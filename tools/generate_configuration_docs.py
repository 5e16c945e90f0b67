"""Writes docs/configuration.md from the classes that decode the configuration: names, types, defaults and docstrings.

Invariant: the page says nothing that is not in the code, so it is never edited by hand.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType

import msgspec

from kvpool_agent.config import Config
from kvpool_router.config import RouterConfig
from kvpool_vllm.settings import Settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEADER = """# Configuration reference

<!-- Written by `make generate` from the code that reads the files; edit that. -->

Agent and router each read one YAML file, checked whole at start: an unknown key or a wrong value ends the program with exit
status 2 and a message that names the key and the remedy. `--check` only checks. On Kubernetes the operator writes these files.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a file."""

    name: str
    kind: object
    default: str
    meaning: str


def keys_of(section: type) -> list[Key]:
    """The keys of a section in their order."""
    meanings = attribute_docstrings(section)
    kinds = typing.get_type_hints(section)
    return [Key(name, kinds[name], default, meanings.get(name, "")) for name, default in _defaults(section)]


def attribute_docstrings(section: type) -> dict[str, str]:
    """Field name to the string right below it, where there is one."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match (field, below):
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _defaults(section: type) -> Iterator[tuple[str, str]]:
    if is_dataclass(section):
        for field in fields(section):
            yield field.name, "required" if field.default is MISSING else _shown(field.default)
        return
    for entry in msgspec.structs.fields(typing.cast(type[msgspec.Struct], section)):
        if entry.default is not msgspec.NODEFAULT:
            yield entry.name, _shown(entry.default)
        elif entry.default_factory is not msgspec.NODEFAULT:
            yield entry.name, _made(entry.default_factory)
        else:
            yield entry.name, "required"


def _made(factory: object) -> str:
    """What a default factory gives; only empty collections and sections are the same on every machine."""
    if factory in (list, dict):
        return _shown(typing.cast(type, factory)())
    if isinstance(factory, type) and issubclass(factory, msgspec.Struct):
        return "see below"
    return f"`{getattr(factory, '__name__', factory)}()`"


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024 and value % 1024 == 0:
        return f"`{value}`"
    return f"`{msgspec.json.encode(value).decode()}`"


def _sections_in(kind: object) -> list[type]:
    """The section classes named in a type, as in `list[Endpoint]` or `ValkeySettings | None`."""
    found = [kind] if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else []
    return found + [section for part in typing.get_args(kind) for section in _sections_in(part)]


def _kind_shown(kind: object) -> str:
    arguments = typing.get_args(kind)
    if _sections_in(kind):
        return "list of mappings" if typing.get_origin(kind) is list else "mapping"
    if typing.get_origin(kind) is typing.Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return " or ".join(_kind_shown(part) for part in arguments if part is not type(None))
    if typing.get_origin(kind) is list:
        return f"list of {_kind_shown(arguments[0])}"
    return {"str": "string", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(kind, "__name__", ""), str(kind)
    )


def section_lines(section: type, path: str) -> Iterator[str]:
    """Heading, description and table of a section, then of those inside it."""
    keys = keys_of(section)
    if path:
        yield f"### `{path}`\n"
    yield inspect.cleandoc(section.__doc__ or "") + "\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for key in keys:
        yield f"| `{key.name}` | {_kind_shown(key.kind)} | {key.default} | {key.meaning} |"
    yield ""
    for key in keys:
        for inner in _sections_in(key.kind):
            listed = "[]" if typing.get_origin(key.kind) is list else ""
            yield from section_lines(inner, f"{path}.{key.name}{listed}".lstrip("."))


def page() -> str:
    """The whole page."""
    parts = [HEADER]
    parts.append("## Agent: `python -m kvpool_agent --config FILE`\n")
    parts += section_lines(Config, "")
    parts.append("## Router: `python -m kvpool_router --config FILE`\n")
    parts += section_lines(RouterConfig, "")
    parts.append("## Connector: environment and `kv_connector_extra_config`\n")
    parts.append(
        "`socket_path`, `token_file` and `endpoint` come from `KVPOOL_SOCKET`, `KVPOOL_TOKEN_FILE` and `KVPOOL_ENDPOINT`;\n"
        "the times and the rate from `kv_connector_extra_config` under `kvpool_<name>`, or from `KVPOOL_<NAME>` in the\n"
        "environment of the engine's container, which is the way for a pod that the webhook injects.\n"
    )
    parts += section_lines(Settings, "")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
