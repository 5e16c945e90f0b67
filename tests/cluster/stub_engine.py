"""A stand-in for engines of other vLLM versions, which cannot be had here: a package `vllm` that takes flags and serves.

It refuses flags that it does not know, as an old vLLM refuses newer ones. The same stub serves where a test is only about
whether the pod is started as its owner wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.cluster.cluster import Cluster
from tests.cluster.workloads import Manifest

PORT = 8000
FOLDER = "/stub"
_SERVER = """
import argparse, json, os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--model")
if os.environ.get("STUB_TAKES_CONNECTORS"):
    parser.add_argument("--kv-transfer-config")
arguments = parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "model"}], "arguments": vars(arguments)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


print("serving", flush=True)
ThreadingHTTPServer(("", arguments.port), Handler).serve_forever()
"""


def stub_files(namespace: str, version: str) -> Manifest:
    """The package as a ConfigMap."""
    files = {
        "server": _SERVER,
        "init": f"__version__ = {version!r}\n",
        "empty": "",
        "metadata": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "stub-vllm", "namespace": namespace},
        "data": files,
    }


def stub_pod(
    cluster: Cluster,
    name: str,
    namespace: str,
    *,
    version: str = "0.31.0",
    arguments: Sequence[str] = (),
    annotations: Mapping[str, str] | None = None,
    takes_connectors: bool = False,
    node: str = "",
) -> Manifest:
    """A labelled pod in exec form, non-root."""
    paths = {
        "server": "vllm/entrypoints/openai/api_server.py",
        "init": "vllm/__init__.py",
        "metadata": f"vllm-{version}.dist-info/METADATA",
    }
    items = [{"key": key, "path": path} for key, path in paths.items()]
    items += [
        {"key": "empty", "path": f"vllm/{folder}/__init__.py"} for folder in ("entrypoints", "entrypoints/openai")
    ]
    environment = [{"name": "PYTHONPATH", "value": FOLDER}]
    if takes_connectors:
        environment.append({"name": "STUB_TAKES_CONNECTORS", "value": "1"})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"kvpool.io/inject": "true", "app": name},
            "annotations": {"kvpool.io/pool": "chat", **(annotations or {})},
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            **({"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}),
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "vllm",
                    "image": cluster.image("base"),
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
                    "args": ["--model", "/mnt/models", f"--port={PORT}", *arguments],
                    "env": environment,
                    "ports": [{"containerPort": PORT}],
                    "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
                    "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "stub", "mountPath": FOLDER}],
                }
            ],
            "volumes": [{"name": "stub", "configMap": {"name": "stub-vllm", "items": items}}],
        },
    }
