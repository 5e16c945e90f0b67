"""The JSON Patch (RFC 6902) that makes one value of another. Pure. Invariant: applied to `before` it gives `after`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpool_operator.webhook.contract import Manifest


def json_patch(before: object, after: object, path: str = "") -> list[Manifest]:
    """Operations; none for equal values. Lists are compared by position, and only grow at their end or are replaced."""
    return list(_operations(before, after, path))


def _operations(before: Any, after: Any, path: str) -> Iterator[Manifest]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(before, after, path)
    elif isinstance(before, list) and isinstance(after, list) and len(after) >= len(before):
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from _operations(old, new, f"{path}/{index}")
        yield from ({"op": "add", "path": f"{path}/-", "value": value} for value in after[len(before) :])
    elif before != after or type(before) is not type(after):
        yield {"op": "replace", "path": path, "value": after}


def _of_objects(before: Manifest, after: Manifest, path: str) -> Iterator[Manifest]:
    for key in before.keys() - after.keys():
        yield {"op": "remove", "path": f"{path}/{escaped(key)}"}
    for key, value in after.items():
        if key not in before:
            yield {"op": "add", "path": f"{path}/{escaped(key)}", "value": value}
        else:
            yield from _operations(before[key], value, f"{path}/{escaped(key)}")


def escaped(key: str) -> str:
    """A key as part of a JSON Pointer."""
    return key.replace("~", "~0").replace("/", "~1")
