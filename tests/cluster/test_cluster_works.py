"""What an operator's work rests on: logs, exec, port-forward, hostPath, memory-backed volumes, NetworkPolicy objects."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.cluster.cluster import Cluster

PORT = 8000
PROGRAM = """
import http.server, os, pathlib
pathlib.Path('/memory/index.html').write_text('served from memory')
pathlib.Path('/host/left').write_text('left on the host')
print('serving', flush=True)
os.chdir('/memory')
http.server.ThreadingHTTPServer(('', 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def serving_pod(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """Serves a file that lies in memory, and leaves one on its node."""
    volumes = {
        "memory": {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        "host": {"hostPath": {"path": f"/run/kvpool-test/{namespace}", "type": "DirectoryOrCreate"}},
    }
    container = {
        "name": "server",
        "image": cluster.image("base"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", PROGRAM],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in volumes],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "server", "namespace": namespace, "labels": {"app": "server"}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"kubernetes.io/hostname": cluster.nodes[-1]},
            "containers": [container],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        },
    }


@contextmanager
def forwarded(cluster: Cluster, what: str, namespace: str) -> Iterator[str]:
    """The URL of a port of this machine that `kubectl port-forward` passes on."""
    command = [str(cluster.command("kubectl")), "port-forward", what, f"--namespace={namespace}", f":{PORT}"]
    with subprocess.Popen(command, env=cluster.environment(), stdout=subprocess.PIPE, text=True) as forwarding:
        try:
            assert forwarding.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", forwarding.stdout.readline())
            assert found is not None
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            forwarding.kill()


def test_logs_exec_port_forward_and_volumes_work(cluster: Cluster, make_namespace: Callable[..., str]) -> None:
    namespace = make_namespace("works")
    cluster.apply(serving_pod(cluster, namespace))
    here = f"--namespace={namespace}"
    cluster.kubectl("wait", "pod/server", here, "--for=condition=Ready", "--timeout=60s")

    assert cluster.kubectl("logs", "server", here) == "serving\n"
    assert cluster.kubectl("exec", "server", here, "--", "cat", "/host/left") == "left on the host"
    mounts = cluster.kubectl("exec", "server", here, "--", "cat", "/proc/mounts")
    assert re.search(r"^tmpfs /memory tmpfs", mounts, re.MULTILINE)
    with forwarded(cluster, "pod/server", namespace) as url, urllib.request.urlopen(url, timeout=10) as reply:
        assert reply.read() == b"served from memory"

    cluster.kubectl("delete", "pod", "server", here)
    cluster.apply(serving_pod(cluster, namespace))
    cluster.kubectl("wait", "pod/server", here, "--for=condition=Ready", "--timeout=60s")
    assert cluster.kubectl("exec", "server", here, "--", "ls", "/host") == "left\n"


def test_network_policies_are_taken(cluster: Cluster, make_namespace: Callable[..., str]) -> None:
    """This network enforces none."""
    namespace = make_namespace("policies")
    spec = {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"], "ingress": []}
    metadata = {"name": "closed", "namespace": namespace}
    cluster.apply({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec})
    found = cluster.get("networkpolicy", "closed", f"--namespace={namespace}")
    assert found["spec"]["podSelector"] == spec["podSelector"]
