"""The engine's environment after injection is the user's and ours, whatever the user's list looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.environment import add_environment, expand, known_values
from kvpool_operator.webhook.inject import AlreadyInjected, decide
from tests.unit.webhook_pods import AROUND, engine, engine_pod, injected

OURS = {
    "KVPOOL_SOCKET": "/run/kvpool/agent.sock",
    "KVPOOL_TOKEN_FILE": "/var/run/secrets/kvpool/token",
    "KVPOOL_POD_IP": "10.0.0.1",
    "KVPOOL_ENDPOINT": "10.0.0.1:8000",
}
CONNECTOR = "/opt/kvpool-connector"
FIELDS = {"status.podIP": "10.0.0.1"}


def kubelet_expand(text: str, values: Mapping[str, str]) -> str:
    """As k8s.io/kubernetes/third_party/forked/golang/expansion does it, byte by byte."""
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = out + "$", at + 2
        elif text[at + 1] == "(" and ")" in text[at + 2 :]:
            end = text.index(")", at + 2)
            name = text[at + 2 : end]
            out, at = out + values.get(name, f"$({name})"), end + 1
        else:
            out, at = out + text[at : at + 2], at + 2
    return out


def kubelet_environment(
    container: Manifest, sources: Mapping[str, str], from_files: Mapping[str, str]
) -> dict[str, str]:
    """As the kubelet's makeEnvironmentVariables does it. sources: values of keys in a ConfigMap; from_files: of `envFrom`."""
    values = dict(from_files) if container.get("envFrom") else {}
    for entry in container.get("env") or []:
        text = entry.get("value", "")
        if text:
            text = kubelet_expand(text, values)
        elif "fieldRef" in entry.get("valueFrom", {}):
            text = FIELDS[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        elif "valueFrom" in entry:
            key = entry["valueFrom"]["configMapKeyRef"]["key"]
            if key not in sources:
                continue  # optional
            text = sources[key]
        values[entry["name"]] = text
    return values


def from_map(name: str, key: str) -> Manifest:
    """An entry from a ConfigMap."""
    return {"name": name, "valueFrom": {"configMapKeyRef": {"name": "c", "key": key, "optional": True}}}


NAMES = st.sampled_from(["PYTHONPATH", "A", "B", "KVPOOL_SOCKET", "KVPOOL_ENDPOINT"])
PIECES = st.sampled_from(["/a", "/b", ":", "$", "$$", "$(A)", "$(B)", "$(PYTHONPATH)", "$$(A)", "$(", ")", CONNECTOR])
VALUES = st.lists(PIECES, max_size=4).map("".join)
ENTRIES = st.builds(lambda name, value: {"name": name, "value": value}, NAMES, VALUES) | st.builds(
    from_map, NAMES, st.sampled_from(["set", "absent"])
)
SOURCES = {"set": "/from-a-map"}


@given(env=st.lists(ENTRIES, max_size=6), from_files=st.dictionaries(NAMES, st.just("/x")), has_files=st.booleans())
def test_any_environment_is_kept_and_has_the_connector_on_its_path(
    env: list[Manifest], from_files: dict[str, str], has_files: bool
) -> None:
    container: Manifest = {"env": env, **({"envFrom": [{"configMapRef": {"name": "x"}}]} if has_files else {})}
    before = kubelet_environment(container, SOURCES, from_files)
    changed: Manifest = {**container, "env": list(env)}
    add_environment(changed, 8000)
    after = kubelet_environment(changed, SOURCES, from_files)

    assert changed["env"][: len(env)] == env
    named = {entry["name"] for entry in env}
    for name, value in OURS.items():
        if name not in named:
            assert after.pop(name) == value
            before.pop(name, None)
    path, own = after.pop("PYTHONPATH"), before.pop("PYTHONPATH", None)
    if CONNECTOR not in (own or "").split(":"):
        assert path in ((f"{CONNECTOR}:{own}",) if own else (CONNECTOR, f"{CONNECTOR}:", f"{CONNECTOR}:$(PYTHONPATH)"))
    assert CONNECTOR in path.split(":")
    assert after == before

    again: Manifest = {**changed, "env": list(changed["env"])}
    add_environment(again, 8000)
    assert again == changed


@given(text=VALUES, values=st.dictionaries(NAMES, VALUES))
def test_references_are_replaced_as_the_kubelet_does(text: str, values: dict[str, str]) -> None:
    assert expand(text, values) == kubelet_expand(text, values)


@given(env=st.lists(ENTRIES, max_size=6))
def test_values_that_stand_in_the_pod_are_what_the_kubelet_makes_of_them(env: list[Manifest]) -> None:
    real = kubelet_environment({"env": env}, {}, {})
    for name, value in known_values({"env": env}).items():
        if "$(" not in value:
            assert real[name] == value


def path_of(env: list[Manifest], **container: Any) -> str:
    """PYTHONPATH of the injected engine."""
    pod = injected(engine_pod(env=env, **container))
    assert isinstance(decide(pod, AROUND), AlreadyInjected)
    return kubelet_environment(engine(pod), SOURCES, {"PYTHONPATH": "/x"})["PYTHONPATH"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ([], CONNECTOR),
        ([{"name": "PYTHONPATH"}], CONNECTOR),
        ([{"name": "PYTHONPATH", "value": "/a"}], f"{CONNECTOR}:/a"),
        ([{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "/b"}], f"{CONNECTOR}:/b"),
        (
            [{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "$(PYTHONPATH):/b"}],
            f"{CONNECTOR}:/a:/b",
        ),
        ([{"name": "PYTHONPATH", "value": "/a"}, from_map("PYTHONPATH", "set")], f"{CONNECTOR}:/from-a-map"),
        ([from_map("PYTHONPATH", "set"), {"name": "PYTHONPATH", "value": "/a"}], f"{CONNECTOR}:/a"),
        ([{"name": "PYTHONPATH", "value": "/a"}, from_map("PYTHONPATH", "absent")], f"{CONNECTOR}:/a"),
        ([{"name": "PYTHONPATH", "value": CONNECTOR}, {"name": "PYTHONPATH", "value": "/a"}], f"{CONNECTOR}:/a"),
    ],
)
def test_the_users_python_path_is_kept_behind_ours(env: list[Manifest], expected: str) -> None:
    assert path_of(env) == expected


def test_a_python_path_that_envfrom_brings_is_kept() -> None:
    files = [{"configMapRef": {"name": "c"}}]
    assert path_of([], envFrom=files) == f"{CONNECTOR}:/x"
    assert path_of([{"name": "PYTHONPATH", "value": "$(PYTHONPATH):/a"}], envFrom=files) == f"{CONNECTOR}:/x:/a"
    assert path_of([{"name": "PYTHONPATH", "value": ""}], envFrom=files) == CONNECTOR


def test_what_refers_to_the_users_python_path_still_means_the_users() -> None:
    env = [{"name": "PYTHONPATH", "value": "/a"}, {"name": "OTHER", "value": "$(PYTHONPATH)/x"}]
    assert kubelet_environment(engine(injected(engine_pod(env=env))), {}, {})["OTHER"] == "/a/x"


def test_a_python_path_that_another_webhook_set_behind_ours_is_extended_too() -> None:
    pod = injected(engine_pod())
    engine(pod)["env"].append({"name": "PYTHONPATH", "value": "/b"})
    assert kubelet_environment(engine(injected(pod)), {}, {})["PYTHONPATH"] == f"{CONNECTOR}:/b"
