"""A container's environment, read and extended as the kubelet makes it. Pure.

The kubelet goes through `envFrom`, then through `env` in order: a later entry of a name replaces an earlier one, and
`$(NAME)` in a value is replaced by what NAME is at that place (kubelet's makeEnvironmentVariables). Invariant: what the
user set stays as it is, entry by entry; ours come behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvpool_operator.webhook.contract import CONNECTOR_PATH, SOCKET_PATH, TOKEN_PATH, Manifest

PYTHONPATH = "PYTHONPATH"

_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")


def expand(text: str, values: Mapping[str, str]) -> str:
    """The text with references replaced; one to a name that is not among the values stays, and `$$` is a `$`."""
    return _REFERENCE.sub(lambda found: _replacement(found, values), text)


def _replacement(found: re.Match[str], values: Mapping[str, str]) -> str:
    return "$" if found[0] == "$$" else values.get(found[1], found[0])


def known_values(container: Manifest) -> dict[str, str]:
    """Values by name as far as they stand in the pod; those from elsewhere are left out, references to them remain."""
    values: dict[str, str] = {}
    for entry in container.get("env") or []:
        name, value = str(entry.get("name")), str(entry.get("value") or "")
        if value or not entry.get("valueFrom"):
            values[name] = expand(value, values)
        else:
            values.pop(name, None)
    return values


def is_resolved(text: str) -> bool:
    """Whether an expanded text refers to nothing that is unknown."""
    return "$(" not in text


def add_environment(container: Manifest, port: int) -> None:
    """Where the connector, the agent and the token are, and how routers reach the engine."""
    environment: list[Manifest] = list(container.get("env") or [])
    names = {entry.get("name") for entry in environment}
    ours: tuple[Manifest, ...] = (
        {"name": "KVPOOL_SOCKET", "value": f"{SOCKET_PATH}/agent.sock"},
        {"name": "KVPOOL_TOKEN_FILE", "value": f"{TOKEN_PATH}/token"},
        {"name": "KVPOOL_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "KVPOOL_ENDPOINT", "value": f"$(KVPOOL_POD_IP):{port}"},
    )
    environment += _python_path(container)
    environment += [entry for entry in ours if entry["name"] not in names]
    container["env"] = environment


def _python_path(container: Manifest) -> list[Manifest]:
    """One more entry, which names the user's own value; none where the connector is on the path.

    A reference to what `envFrom` does not bring after all stays as it is, and names a folder that does not exist.
    """
    own = [entry for entry in container.get("env") or [] if entry.get("name") == PYTHONPATH]
    if own and CONNECTOR_PATH in str(own[-1].get("value") or "").split(":"):
        return []
    is_set = known_values(container).get(PYTHONPATH) != "" if own else bool(container.get("envFrom"))
    return [{"name": PYTHONPATH, "value": f"{CONNECTOR_PATH}:$({PYTHONPATH})" if is_set else CONNECTOR_PATH}]
