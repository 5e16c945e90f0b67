"""The engines that demo and cluster tests run in pods: a plain Deployment, and a predictor as KServe's controller makes it.

Invariant: nothing here names kvpool but the label and the annotation with which a workload opts in; the rest comes from
the webhook.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.engine import KV_CACHE_BYTES
from tests.harness.engine_client import BLOCK_SIZE

Manifest = dict[str, Any]
PREDICTOR = Path(__file__).resolve().parents[1] / "unit" / "kserve_pods" / "inferenceservice-vllm-first-call.pod.json"
MODEL_FOLDER = "/mnt/models"
PLAIN_PORT = 8000
PREDICTOR_PORT = 8080
ENGINE_USER = 1000
MEMORY = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "6Gi"}}


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where an engine's program comes from in a pod. `folders`: host folders that are mounted read-only at the same path."""

    image: str
    python: str
    folders: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


def engine_arguments(*, port: int, served_name: str, kv_cache_bytes: int = KV_CACHE_BYTES) -> list[str]:
    """As `tests.harness.engine.Engine` starts its engines, so that answers are bit for bit comparable."""
    return [
        f"--port={port}", f"--served-model-name={served_name}", f"--model={MODEL_FOLDER}", "--dtype=float32",
        "--enforce-eager", f"--block-size={BLOCK_SIZE}", "--max-model-len=4096", "--gpu-memory-utilization=0.3",
        "--max-num-seqs=8", "--seed=0", "--no-enable-log-requests", f"--kv-cache-memory-bytes={kv_cache_bytes}",
    ]  # fmt: skip


def engine_environment(core: str) -> dict[str, str]:
    """One core each, nothing fetched, writable folders under /tmp."""
    return {
        "TORCHDYNAMO_DISABLE": "1",  # the image has no C++ compiler
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def plain_deployment(
    name: str,
    runtime: Runtime,
    *,
    model: Path,
    node: str | None,
    core: str = "0",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    **sizes: int,
) -> list[Manifest]:
    """Deployment and Service of an engine that a team runs by itself."""
    container: Manifest = {
        "name": "vllm",
        "image": runtime.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [runtime.python, "-m", "vllm.entrypoints.openai.api_server"],
        "args": [*engine_arguments(port=PLAIN_PORT, served_name="model", **sizes), *arguments],
        "env": _environment({**engine_environment(core), **runtime.env}),
        "ports": [{"name": "http", "containerPort": PLAIN_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PLAIN_PORT}, "periodSeconds": 1},
        "startupProbe": {
            "httpGet": {"path": "/health", "port": PLAIN_PORT},
            "periodSeconds": 2,
            "failureThreshold": 200,
        },
        "resources": MEMORY,
    }
    spec: Manifest = {"containers": [container]}
    _mount(spec, container, runtime, model)
    return _deployment(name, spec, labels=labels or {}, annotations=annotations or {}, node=node, port=PLAIN_PORT)


def predictor_deployment(
    name: str, runtime: Runtime, *, model: Path, node: str | None, core: str, pool: str, **sizes: int
) -> list[Manifest]:
    """A predictor: metadata, container, environment and volumes as KServe's controller made them, with our runtime.

    Its second container (KServe's agent) is left out: that image is not there. Probes are as frequent as a test wants.
    """
    pod = json.loads(PREDICTOR.read_text())
    container = next(c for c in pod["spec"]["containers"] if c["name"] == "kserve-container")
    kept = [v for v in container["volumeMounts"] if v["name"] == "devshm"]
    environment = {e["name"]: e["value"] for e in container["env"]}
    container |= {
        "image": runtime.image,
        "command": [runtime.python, *container["command"][1:]],
        "args": engine_arguments(port=PREDICTOR_PORT, served_name="model", **sizes),
        "env": _environment({**environment, **engine_environment(core), **runtime.env}),
        "volumeMounts": kept,
        "resources": MEMORY,
    }
    container["startupProbe"] |= {"initialDelaySeconds": 2, "periodSeconds": 2, "failureThreshold": 200}
    container["readinessProbe"] |= {"periodSeconds": 1}
    spec: Manifest = {
        "containers": [container],
        "volumes": [v for v in pod["spec"]["volumes"] if v["name"] == "devshm"],
        "securityContext": {"runAsNonRoot": True, "runAsUser": ENGINE_USER, "runAsGroup": ENGINE_USER},
    }
    _mount(spec, container, runtime, model)
    labels = {k: v for k, v in pod["metadata"]["labels"].items() if k != "pod-template-hash"}
    annotations = {**pod["metadata"]["annotations"], "kvpool.io/pool": pool}
    return _deployment(name, spec, labels=labels, annotations=annotations, node=node, port=PREDICTOR_PORT)


def _environment(values: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _mount(spec: Manifest, container: Manifest, runtime: Runtime, model: Path) -> None:
    volumes = spec.setdefault("volumes", [])
    mounts = container.setdefault("volumeMounts", [])
    for number, folder in enumerate(runtime.folders):
        volumes.append({"name": f"engine-{number}", "hostPath": {"path": folder, "type": "Directory"}})
        mounts.append({"name": f"engine-{number}", "mountPath": folder, "readOnly": True})
    volumes.append({"name": "model", "hostPath": {"path": str(model), "type": "Directory"}})
    mounts.append({"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True})
    if all(mount["mountPath"] != "/dev/shm" for mount in mounts):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})


def _deployment(
    name: str,
    spec: Manifest,
    *,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    node: str | None,
    port: int,
) -> list[Manifest]:
    selector = {"app": labels.get("app", name)}
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    spec["terminationGracePeriodSeconds"] = 5
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": selector},
            "template": {
                "metadata": {"labels": {**labels, **selector}, "annotations": dict(annotations)},
                "spec": spec,
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": port}]},
    }
    return [deployment, service]
