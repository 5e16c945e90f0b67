"""Pods, pools and an independent JSON Patch for the webhook's tests."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.inject import AlreadyInjected, Injection, Surroundings, decide, stamp_skip
from kvpool_operator.webhook.skip_reasons import Skip
from kvpool_operator.webhook.views import NamespaceFacts, NodeView, PoolView

RECORDED = Path(__file__).parent / "kserve_pods"
GOLDEN = RECORDED / "golden"
RECORDED_NAMES = sorted(path.name for path in RECORDED.glob("*.pod.json"))

POOL = PoolView(
    namespace="default",
    name="chat",
    image="registry.example.com/kvpool:1.0",
    socket_folder="/var/run/kvpool/default/chat",
    capacity_bytes=64 << 30,
    ready_agents=2,
    nodes=(NodeView("large", allocatable=frozenset({"cpu", "memory", "nvidia.com/gpu"}), memory_bytes=1 << 40),),
)
AROUND = Surroundings(
    namespace="default", reference=("default", "chat"), pool=POOL, facts=NamespaceFacts("default", {"team": "a"})
)


def recorded(name: str) -> Manifest:
    """A pod as KServe's controller made it."""
    pod: Manifest = json.loads((RECORDED / name).read_text())
    return pod


def engine_pod(*arguments: str, command: tuple[str, ...] = ("vllm", "serve", "model"), **container: Any) -> Manifest:
    """A pod of a plain Deployment that opted in."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "llama-",
            "labels": {"kvpool.io/inject": "true"},
            "annotations": {"kvpool.io/pool": "chat"},
        },
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "image": "registry.example.com/llm:prod",
                    **({"command": list(command)} if command else {}),
                    **({"args": list(arguments)} if arguments else {}),
                    **container,
                }
            ]
        },
    }


def around(**changes: Any) -> Surroundings:
    """Surroundings in which a pod is injected, but for `changes`."""
    return replace(AROUND, **changes)


def pool_with(**changes: Any) -> Surroundings:
    """The same with another pool."""
    return around(pool=replace(POOL, **changes))


def injected(pod: Manifest, surroundings: Surroundings = AROUND) -> Manifest:
    """The injected pod."""
    decision = decide(pod, surroundings)
    assert isinstance(decision, Injection), decision
    return decision.pod


def skip_reason(pod: Manifest, surroundings: Surroundings = AROUND) -> str:
    """Why it is not injected; "" when it is."""
    decision = decide(pod, surroundings)
    return decision.reason if isinstance(decision, Skip) else ""


def outcome(pod: Manifest, surroundings: Surroundings = AROUND) -> Manifest:
    """The pod as it is let in."""
    decision = decide(pod, surroundings)
    if isinstance(decision, AlreadyInjected):
        return pod
    return decision.pod if isinstance(decision, Injection) else stamp_skip(pod, decision)


def engine(pod: Manifest) -> Manifest:
    """The first container."""
    container: Manifest = pod["spec"]["containers"][0]
    return container


def env_of(pod: Manifest) -> dict[str, Any]:
    """Environment of the first container by name."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in engine(pod)["env"]}


def apply_patch(value: Any, operations: list[Manifest]) -> Any:
    """RFC 6902, as the API server applies it."""
    root = {"": copy.deepcopy(value)}
    for operation in operations:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")]
        parent: Any = root
        for part in parts[:-1]:
            parent = parent[int(part) if isinstance(parent, list) else part]
        key, action = parts[-1], operation["op"]
        if isinstance(parent, list):
            _apply_to_list(parent, key, action, operation.get("value"))
        elif action == "remove":
            del parent[key]
        elif action == "test":
            assert parent[key] == operation["value"]
        else:
            assert action == "add" or key in parent
            parent[key] = copy.deepcopy(operation["value"])
    return root[""]


def _apply_to_list(parent: list[Any], key: str, action: str, value: Any) -> None:
    if action == "add":
        parent.insert(len(parent) if key == "-" else int(key), copy.deepcopy(value))
    elif action == "remove":
        del parent[int(key)]
    else:
        parent[int(key)] = copy.deepcopy(value)
