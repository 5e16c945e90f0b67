"""Injected pods hold all that the connector needs, once, and nothing of the user's is overridden."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from kvpool_operator.webhook import contract
from kvpool_operator.webhook import skip_reasons as reasons
from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.engine_checks import ALLOCATOR_VARIABLES
from kvpool_operator.webhook.inject import AlreadyInjected, Injection, decide, stamp_skip
from kvpool_operator.webhook.skip_reasons import Skip
from kvpool_vllm import startup, support
from tests.harness.engine import API_SERVER, EVENTS_CONFIG, EXTRA_CONFIG, TRANSFER_CONFIG
from tests.unit.webhook_pods import (
    AROUND,
    GOLDEN,
    RECORDED_NAMES,
    around,
    engine,
    engine_pod,
    env_of,
    injected,
    outcome,
    pool_with,
    recorded,
    skip_reason,
)

INJECTABLE = [name for name in RECORDED_NAMES if "custom" in name or "vllm" in name]


@pytest.mark.parametrize("name", RECORDED_NAMES)
def test_recorded_pods_become_the_golden_ones(name: str) -> None:
    """After a wanted change: `make generate`, and read the diff."""
    assert outcome(recorded(name)) == json.loads((GOLDEN / name).read_text())


def test_the_configuration_is_the_one_that_the_engine_tests_run_with() -> None:
    expected = {**TRANSFER_CONFIG, "kv_connector_extra_config": EXTRA_CONFIG}
    assert json.loads(contract.TRANSFER_CONFIG) == {**expected, "kv_connector_module_path": "kvpool_vllm.entry"}
    assert json.loads(contract.EVENTS_CONFIG) == EVENTS_CONFIG


def test_webhook_and_connector_mean_the_same_flags_and_version() -> None:
    assert support.SUPPORTED_VLLM == contract.SUPPORTED_VLLM
    arguments = ["serve", *engine(injected(engine_pod("--seed", "0")))["args"], "--more"]
    place = startup.injected_arguments(arguments)
    assert arguments[: place.start] + arguments[place.stop :] == ["serve", "--seed", "0", "--more"]


@pytest.mark.parametrize("name", INJECTABLE)
def test_a_second_call_changes_nothing(name: str) -> None:
    assert isinstance(decide(injected(recorded(name)), AROUND), AlreadyInjected)


def test_a_second_call_puts_back_what_another_webhook_took_away() -> None:
    once = injected(recorded("inferenceservice-vllm-first-call.pod.json"))
    changed = copy.deepcopy(once)
    original = engine(recorded("inferenceservice-vllm-reinvoked.pod.json"))
    for part in ("args", "env", "volumeMounts"):
        engine(changed)[part] = original[part]
    again = injected(changed)
    assert engine(again)["args"] == engine(once)["args"]
    assert env_of(again) == env_of(once)
    assert engine(again)["resources"] == engine(once)["resources"]
    assert [each["name"] for each in again["spec"]["initContainers"]] == [contract.INIT_CONTAINER]
    assert isinstance(decide(again, AROUND), AlreadyInjected)


@pytest.mark.parametrize("missing", [{"pool": None}, {"facts": None}])
def test_nothing_is_taken_back_from_a_pod_that_is_injected(missing: dict[str, Any]) -> None:
    assert isinstance(decide(injected(engine_pod()), around(**missing)), AlreadyInjected)


@pytest.mark.parametrize("label", ["kvpool.io/pool", "kvpool.io/pool-namespace", "kvpool.io/role"])
def test_a_label_of_an_injected_pod_is_not_changed_but_put_back(label: str) -> None:
    pod = injected(engine_pod())
    needed = pod["metadata"]["labels"].pop(label)
    assert injected(pod)["metadata"]["labels"][label] == needed
    pod["metadata"]["labels"][label] = "mine"
    assert outcome(pod)["metadata"]["labels"][label] == "mine"


def test_a_stamp_copied_from_another_pod_does_not_count() -> None:
    pod = engine_pod()
    pod["metadata"]["annotations"][contract.INJECTED_ANNOTATION] = "default/chat"
    assert isinstance(decide(pod, AROUND), Injection)
    assert contract.INJECTED_ANNOTATION not in stamp_skip(pod, Skip("X", "y"))["metadata"]["annotations"]


def test_a_former_skip_reason_is_removed() -> None:
    pod = engine_pod()
    pod["metadata"]["annotations"][contract.SKIPPED_ANNOTATION] = "NoReadyAgent: before"
    assert contract.SKIPPED_ANNOTATION not in injected(pod)["metadata"]["annotations"]


def test_the_pod_given_is_not_changed() -> None:
    pod = engine_pod(resources={"limits": {"memory": "2Gi"}, "requests": {"memory": "2Gi"}})
    before = copy.deepcopy(pod)
    decide(pod, AROUND)
    stamp_skip(pod, Skip("X", "y"))
    assert pod == before


# --- what the user set wins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--kv-transfer-config", "{}"), reasons.OWN_KV_TRANSFER),
        (("--kv_transfer_config", "{}"), reasons.OWN_KV_TRANSFER),
        (('--kv-transfer-config={"kv_connector":"NixlConnector"}',), reasons.OWN_KV_TRANSFER),
        (("--kv_transfer_config={}",), reasons.OWN_KV_TRANSFER),
        (("--kv-transfer-config.kv_connector", "X"), reasons.OWN_KV_TRANSFER),
        (("--kv_transfer-config.kv_role=kv_both",), reasons.OWN_KV_TRANSFER),
        (("--kv-transfer", "{}"), reasons.OWN_KV_TRANSFER),
        (("--kv-transfer-config", "$(MY_CONFIG)"), reasons.OWN_KV_TRANSFER),
        (("--kv-offloading-size", "8"), reasons.OWN_KV_TRANSFER),
        (("--kv_offloading_backend=lmcache",), reasons.OWN_KV_TRANSFER),
        (("--config", "/etc/vllm.yaml"), reasons.CONFIG_FILE),
        (("--config=/etc/vllm.yaml",), reasons.CONFIG_FILE),
        (("--no-enable-prefix-caching",), reasons.PREFIX_CACHING_OFF),
        (("--no_enable_prefix_caching",), reasons.PREFIX_CACHING_OFF),
        (("--prefix-caching-hash-algo", "sha256"), reasons.OWN_HASH_ALGORITHM),
        (("--prefix_caching_hash_algo=builtin",), reasons.OWN_HASH_ALGORITHM),
        (("--kv-events-config", '{"enable_kv_cache_events":false}'), reasons.OWN_KV_EVENTS),
        (("--kv-events-config", "no json"), reasons.OWN_KV_EVENTS),
        (("--kv_events_config.publisher", "zmq"), reasons.OWN_KV_EVENTS),
        (("--pipeline-parallel-size", "2"), reasons.ENGINE_UNSUPPORTED),
        (("-pp", "2"), reasons.ENGINE_UNSUPPORTED),
        (("--pipeline_parallel_size=2",), reasons.ENGINE_UNSUPPORTED),
        (("--nnodes", "2"), reasons.ENGINE_UNSUPPORTED),
        (("--headless",), reasons.ENGINE_UNSUPPORTED),
        (("-n2",), reasons.ENGINE_UNSUPPORTED),
        (("-n", "1", "--nnodes", "2"), reasons.ENGINE_UNSUPPORTED),
        (("--pipeline", "2"), reasons.ENGINE_UNSUPPORTED),
        (("--pipeline-parallel-size", "$(PP)"), reasons.ENGINE_UNSUPPORTED),
        (("--omni",), reasons.ENGINE_UNSUPPORTED),
        (("--attention-backend", "ROCM_ATTN"), reasons.ENGINE_UNSUPPORTED),
        (("--attention-config.backend=rocm_attn",), reasons.ENGINE_UNSUPPORTED),
        (("-ac", '{"backend": "ROCM_SEGMENTED_ATTN"}'), reasons.ENGINE_UNSUPPORTED),
        (("--use-replayssm",), reasons.ENGINE_UNSUPPORTED),
        (("--no-use_replayssm", "--use_replayssm"), reasons.ENGINE_UNSUPPORTED),
        (("--enable-prefix-caching", "--no-enable-prefix-caching"), reasons.PREFIX_CACHING_OFF),
        (("--prefix-caching-hash-algo=sha256_cbor", "--prefix-cachi=sha256"), reasons.OWN_HASH_ALGORITHM),
        (
            ("--kv-events-config", '{"enable_kv_cache_events": true}', "--kv-events-config", "{}"),
            reasons.OWN_KV_EVENTS,
        ),
        (
            ("--kv-events-config.publisher=zmq", '--kv-events-config={"enable_kv_cache_events": true}'),
            reasons.OWN_KV_EVENTS,
        ),
        (
            ("--kv-events-config.enable_kv_cache_events=true", "--kv-events-config.enable_kv_cache_events=false"),
            reasons.OWN_KV_EVENTS,
        ),
        (("--max-model-len", "8", "$(EXTRA)"), reasons.ARGUMENT_UNKNOWN),
        (("--max-model-len=8", "$(EXTRA)"), reasons.ARGUMENT_UNKNOWN),
        (("--max-model-len=8", "--$(NAME)=x"), reasons.ARGUMENT_UNKNOWN),
        (("--enforce-eager", "$(EXTRA)"), reasons.ARGUMENT_UNKNOWN),
        (("--no_enable_log_requests", "$(EXTRA)"), reasons.ARGUMENT_UNKNOWN),
        (("-ep", "$(EXTRA)"), reasons.ARGUMENT_UNKNOWN),
        (("--flag-of-tomorrow", "$(EXTRA)"), reasons.ARGUMENT_UNKNOWN),
        (("--grpc",), reasons.ENGINE_UNSUPPORTED),
        (("--uds", "/run/vllm.sock"), reasons.ENGINE_UNSUPPORTED),
        (("--uds=/run/vllm.sock",), reasons.ENGINE_UNSUPPORTED),
    ],
)
def test_an_engine_with_its_own_settings_is_left_alone(arguments: tuple[str, ...], expected: str) -> None:
    assert skip_reason(engine_pod(*arguments)) == expected
    assert skip_reason(engine_pod(command=("vllm", "serve", "m", *arguments))) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ("--no-enable-prefix-caching", "--enable-prefix-caching"),
        ("--prefix-caching-hash-algo", "sha256", "--prefix_caching_hash_algo", "sha256_cbor"),
        ("--use-replayssm", "--no-use-replayssm"),
        ("--attention-backend", "ROCM_AITER_UNIFIED_ATTN"),
        ("-pp", "2", "--pipeline-parallel-size", "1"),
        ("--nnodes=2", "-n=1"),
        ("--max-model-len", "$(LENGTH)", "--served-model-name=$(NAME)"),
        ("--served-model-name", "a", "/models/$(NAME)"),
        ("-tp", "$(RANKS)", "--gpu_memory_utilization", "$(SHARE)", "--hf-token", "$(TOKEN)"),
        ("--attention-config.backend", "$(BACKEND)"),
        ("--grpc-port", "50051"),
    ],
)
def test_the_last_of_several_counts_and_values_may_come_from_elsewhere(arguments: tuple[str, ...]) -> None:
    assert skip_reason(engine_pod(*arguments)) == ""
    assert skip_reason(engine_pod("$(MODEL)", *arguments, command=("vllm", "serve"))) == ""


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (engine_pod("$(X)", command=("python3", "-m", "vllm.entrypoints.openai.api_server")), reasons.ARGUMENT_UNKNOWN),
        (engine_pod("$(X)", command=("python3", "-c", API_SERVER)), reasons.ARGUMENT_UNKNOWN),
        (engine_pod("--model", "$(X)", command=("python3", "-m", "vllm.entrypoints.openai.api_server")), ""),
        (engine_pod("$(X)", command=("python3", "-m", "vllm.entrypoints.cli.main", "serve")), ""),
        (engine_pod("$(X)", command=(), image="vllm/vllm-openai:v0.32.0"), ""),
        (engine_pod("$(X)", "$(Y)", command=(), image="vllm/vllm-openai:v0.32.0"), reasons.ARGUMENT_UNKNOWN),
    ],
)
def test_a_first_argument_from_elsewhere_is_the_model_only_where_the_server_takes_one(
    pod: Manifest, expected: str
) -> None:
    assert skip_reason(pod) == expected


def test_flags_in_a_variable_of_the_pod_are_seen() -> None:
    env = [{"name": "EXTRA", "value": "--kv-transfer-config={}"}]
    assert skip_reason(engine_pod("$(EXTRA)", env=env)) == reasons.OWN_KV_TRANSFER


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("expandable_segments:True",), reasons.ENGINE_UNSUPPORTED),
        (("max_split_size_mb:64, expandable_segments: True",), reasons.ENGINE_UNSUPPORTED),
        (("$(SEGMENTS)",), reasons.ENGINE_UNSUPPORTED),
        (("expandable_segments:False",), ""),
        (("expandable_segments:True", "max_split_size_mb:64"), ""),
    ],
)
def test_expandable_segments_are_not_supported(name: str, values: tuple[str, ...], expected: str) -> None:
    env = [{"name": "SEGMENTS", "value": "expandable_segments:True"}]
    assert skip_reason(engine_pod(env=[*env, *({"name": name, "value": value} for value in values)])) == expected


def test_webhook_and_connector_look_at_the_same_variables() -> None:
    assert support.ALLOCATOR_VARIABLES == ALLOCATOR_VARIABLES


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq"}'),
        ("--kv_events_config.enable_kv_cache_events=true",),
        ("--kv-events-config.enable-kv-cache-events", "True"),
    ],
)
def test_the_users_events_are_kept(arguments: tuple[str, ...]) -> None:
    args = engine(injected(engine_pod(*arguments)))["args"]
    assert args[: len(arguments)] == list(arguments)
    assert contract.EVENTS_CONFIG not in args


def test_flags_that_the_user_set_as_needed_are_not_repeated() -> None:
    args = engine(injected(engine_pod("--prefix_caching_hash_algo=sha256_cbor")))["args"]
    assert args == [
        "--prefix_caching_hash_algo=sha256_cbor",
        contract.TRANSFER_FLAG,
        contract.TRANSFER_CONFIG,
        contract.EVENTS_FLAG,
        contract.EVENTS_CONFIG,
    ]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("vllm/vllm-openai:v0.32.0", ""),
        ("vllm/vllm-openai:v0.32.1.post1", ""),
        ("vllm/vllm-openai:v0.32.0-x86_64", ""),
        ("vllm/vllm-openai:v0.31.0", reasons.ENGINE_VERSION_UNSUPPORTED),
        ("vllm/vllm-openai:0.33.0", reasons.ENGINE_VERSION_UNSUPPORTED),
        ("vllm/vllm-openai:v0.3.2", reasons.ENGINE_VERSION_UNSUPPORTED),
        ("registry:5000/vllm-openai:v0.20.0@sha256:abc", reasons.ENGINE_VERSION_UNSUPPORTED),
        ("vllm/vllm-openai:latest", ""),
        ("vllm/vllm-openai", ""),
        ("kserve/vllmserver:v0.20.0", ""),
    ],
)
def test_the_tag_of_vllms_own_images_is_its_version(image: str, expected: str) -> None:
    assert skip_reason(engine_pod(image=image)) == expected


# --- environment ------------------------------------------------------------------------------------------------------


def test_variables_that_the_user_set_stay_and_references_come_after_what_they_name() -> None:
    pod = injected(engine_pod(env=[{"name": "KVPOOL_ENDPOINT", "value": "10.0.0.1:1"}]))
    assert env_of(pod)["KVPOOL_ENDPOINT"] == "10.0.0.1:1"
    names = [entry["name"] for entry in engine(injected(engine_pod()))["env"]]
    assert names.index("KVPOOL_POD_IP") < names.index("KVPOOL_ENDPOINT")


def test_pull_secrets_of_the_pool_are_added_in_its_own_namespace() -> None:
    pod = engine_pod()
    pod["spec"]["imagePullSecrets"] = [{"name": "mine"}]
    found = injected(pod, pool_with(image_pull_secrets=("registry",)))
    assert found["spec"]["imagePullSecrets"] == [{"name": "mine"}, {"name": "registry"}]
