"""The vLLM server of a pod is found in every form that takes appended flags, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from kvpool_operator.webhook import skip_reasons as reasons
from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.engine_command import Engine, find_engine
from kvpool_operator.webhook.skip_reasons import Skip
from tests.harness.engine import API_SERVER
from tests.unit.webhook_pods import engine_pod, recorded


def found(pod: Manifest) -> Engine:
    """The engine, which must be found."""
    engine = find_engine(pod)
    assert isinstance(engine, Engine), engine
    return engine


def reason(pod: Manifest) -> str:
    """Why there is none."""
    engine = find_engine(pod)
    assert isinstance(engine, Skip), engine
    return engine.reason


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (("vllm", "serve", "m"), ()),
        (("vllm", "serve", "m"), ("--port", "9000")),
        (("vllm",), ("serve", "m", "--port=9000")),
        (("/usr/local/bin/vllm", "serve"), ("m",)),
        (("python", "-m", "vllm.entrypoints.openai.api_server"), ("--model=m",)),
        (("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"), ()),
        (("/usr/bin/python3.11", "-u", "-X", "dev", "-Wdefault", "-m", "vllm.entrypoints.openai.api_server"), ()),
        (("python3", "-m", "vllm.entrypoints.launchers.api_server.entry"), ()),
        (("python3", "-m", "vllm.entrypoints.cli.main", "serve", "m"), ()),
        (("python3", "/usr/local/bin/vllm", "serve", "m"), ()),
        (("python3", "-c", API_SERVER), ("--model", "m")),
        (("tini", "-g", "--", "vllm", "serve", "m"), ()),
        (("/usr/bin/dumb-init", "vllm", "serve", "m"), ()),
    ],
)
def test_exec_forms_of_the_server_are_found(command: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    assert found(engine_pod(*arguments, command=command)).index == 0


@pytest.mark.parametrize(
    "image",
    [
        "vllm/vllm-openai:v0.32.0",
        "docker.io/vllm/vllm-openai@sha256:abc",
        "registry.example.com:5000/mirror/vllm-openai",
        "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0",
    ],
)
def test_args_alone_are_the_servers_flags_where_the_image_starts_it(image: str) -> None:
    assert found(engine_pod("--model", "m", command=(), image=image)).flags.value("--model") == "m"


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        (("bash", "-c", "vllm serve m"), (), reasons.SHELL_COMMAND),
        (("/bin/sh", "/start-vllm.sh"), (), reasons.SHELL_COMMAND),
        (("bash", "-c"), ("exec vllm serve m",), reasons.SHELL_COMMAND),
        (("bash", "-c", "sleep 1"), (), reasons.NO_ENGINE_FOUND),
        (("vllm", "bench", "serve"), (), reasons.NO_ENGINE_FOUND),
        (("vllm",), (), reasons.NO_ENGINE_FOUND),
        (("python3", "-m", "sglang.launch_server"), (), reasons.NO_ENGINE_FOUND),
        (("python3", "-c", "import vllm.entrypoints.openai.api_server"), (), reasons.NO_ENGINE_FOUND),
        (("python3", "serve.py"), (), reasons.NO_ENGINE_FOUND),
        (("python3",), (), reasons.NO_ENGINE_FOUND),
        ((), ("--model", "m"), reasons.NO_ENGINE_FOUND),
        ((), (), reasons.NO_ENGINE_FOUND),
        (("python3", "-m", "huggingfaceserver"), ("--model_id=m",), reasons.NOT_A_VLLM_SERVER),
        (("python3", "-I", "-m", "vllm.entrypoints.openai.api_server"), (), reasons.COMMAND_NOT_EXTENSIBLE),
        (("python3", "-uE", "-m", "vllm.entrypoints.openai.api_server"), (), reasons.COMMAND_NOT_EXTENSIBLE),
        (("vllm", "serve", "m", "--", "x"), (), reasons.COMMAND_NOT_EXTENSIBLE),
        (("uv", "run", "vllm", "serve", "m"), (), reasons.NO_ENGINE_FOUND),
        (("tini", "--"), (), reasons.NO_ENGINE_FOUND),
    ],
)
def test_anything_else_is_a_reason_to_step_aside(
    command: tuple[str, ...], arguments: tuple[str, ...], expected: str
) -> None:
    assert reason(engine_pod(*arguments, command=command)) == expected


def test_an_image_that_brings_its_own_arguments_is_left_alone() -> None:
    assert reason(engine_pod(command=(), image="vllm/vllm-openai:v0.32.0")) == reasons.COMMAND_NOT_EXTENSIBLE


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ("inferenceservice-custom.pod.json", 8080),
        ("inferenceservice-vllm-first-call.pod.json", 8080),
        ("inferenceservice-vllm-reinvoked.pod.json", 8080),
    ],
)
def test_predictors_that_kserve_makes_are_found(pod: str, expected: int) -> None:
    engine = found(recorded(pod))
    assert (engine.container["name"], engine.port) == ("kserve-container", expected)


def test_the_huggingface_server_is_no_vllm_server() -> None:
    assert reason(recorded("inferenceservice-huggingface.pod.json")) == reasons.NOT_A_VLLM_SERVER


def test_the_preset_of_an_llminferenceservice_is_a_shell_command() -> None:
    assert reason(recorded("llminferenceservice.pod.json")) == reasons.SHELL_COMMAND


def with_annotations(pod: Manifest, **annotations: str) -> Manifest:
    """The pod with annotations `kvpool.io/<name>`."""
    pod["metadata"]["annotations"] |= {f"kvpool.io/{name}": value for name, value in annotations.items()}
    return pod


def test_sidecars_do_not_hide_the_engine_and_two_engines_need_a_name() -> None:
    pod = engine_pod("--port", "1234")
    pod["spec"]["containers"].insert(0, {"name": "proxy", "image": "envoy", "args": ["--port", "8000"]})
    assert (found(pod).index, found(pod).port) == (1, 1234)

    pod["spec"]["containers"].append({"name": "second", "image": "x", "command": ["vllm", "serve", "n"]})
    assert reason(pod) == reasons.SEVERAL_ENGINES
    assert found(with_annotations(pod, container="second")).index == 2


def test_an_engine_among_the_init_containers_is_left_alone() -> None:
    pod = engine_pod(command=("/app/proxy",))
    pod["spec"]["initContainers"] = [{"name": "vllm", "restartPolicy": "Always", "command": ["vllm", "serve", "m"]}]
    assert reason(pod) == reasons.NO_ENGINE_FOUND
    assert reason(with_annotations(pod, container="vllm")) == reasons.CONTAINER_NOT_FOUND


def test_a_named_container_is_trusted_where_flags_can_be_appended() -> None:
    named = with_annotations(engine_pod("--model", "m", command=("/app/serve",)), container="engine")
    assert found(named).port == 8000
    assert reason(with_annotations(engine_pod(command=()), container="engine")) == reasons.COMMAND_NOT_EXTENSIBLE
    assert (
        reason(with_annotations(engine_pod(command=("sh", "-c", "vllm serve")), container="engine"))
        == reasons.SHELL_COMMAND
    )
    assert reason(with_annotations(engine_pod(), container="absent")) == reasons.CONTAINER_NOT_FOUND


@pytest.mark.parametrize(
    "command",
    [
        ("env", "-i", "/app/serve"),
        ("/usr/bin/env", "PYTHONPATH=/app", "/app/serve"),
        ("sudo", "-u", "vllm", "/app/serve"),
        ("/app/serve", "--env", "PYTHONPATH=/x"),
        ("python3", "-I", "/app/serve.py"),
        ("tini", "--", "python3", "-sE", "-m", "app"),
    ],
)
def test_a_named_container_that_would_lose_our_path_is_left_alone(command: tuple[str, ...]) -> None:
    assert reason(with_annotations(engine_pod(command=command), container="engine")) == reasons.COMMAND_NOT_EXTENSIBLE


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("sh", "-c", "exec /app/serve"), reasons.SHELL_COMMAND),
        (("/bin/bash", "-o", "pipefail", "-ec", "/app/serve"), reasons.SHELL_COMMAND),
        (("busybox", "sh", "-c", "/app/serve"), reasons.SHELL_COMMAND),
        (("tini", "--", "sh", "-c", "/app/serve"), reasons.SHELL_COMMAND),
        (("nice", "-n", "5", "bash", "-lc", "/app/serve"), reasons.SHELL_COMMAND),
        (("sh", "/app/serve.sh"), ""),
        (("/app/serve", "-c", "4"), ""),
    ],
)
def test_a_named_container_whose_shell_would_drop_flags_is_left_alone(command: tuple[str, ...], expected: str) -> None:
    pod = with_annotations(engine_pod("--model", "m", command=command), container="engine")
    engine = find_engine(pod)
    assert (engine.reason if isinstance(engine, Skip) else "") == expected


def test_a_named_container_serves_on_its_only_declared_port() -> None:
    pod = engine_pod("x", command=("/app/serve",), ports=[{"containerPort": 7000}])
    assert found(with_annotations(pod, container="engine")).port == 7000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), 8000),
        (("--port", "9000"), 9000),
        (("--port=9001",), 9001),
        (("--port", "1", "--port", "2"), 2),
        (("--port", "$(PORT)"), 7777),
    ],
)
def test_the_port_is_the_last_flag_or_vllms_default(arguments: tuple[str, ...], expected: int) -> None:
    assert found(engine_pod(*arguments, env=[{"name": "PORT", "value": "7777"}])).port == expected


def test_a_port_from_elsewhere_is_the_declared_one_or_asked_for() -> None:
    arguments, env = ("--port", "$(PORT)"), [{"name": "PORT", "valueFrom": {"configMapKeyRef": {"name": "c"}}}]
    assert found(engine_pod(*arguments, env=env, ports=[{"containerPort": 8123}])).port == 8123
    assert reason(engine_pod(*arguments, env=env)) == reasons.PORT_UNKNOWN
    assert found(with_annotations(engine_pod(*arguments, env=env), port="8124")).port == 8124
    for wrong in ("0", "65536", "x", "-1", ""):
        assert reason(with_annotations(engine_pod(), port=wrong)) == reasons.PORT_UNKNOWN
