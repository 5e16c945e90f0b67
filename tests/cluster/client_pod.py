"""A pod from which demo and tests send requests, as a client of the pool would: through Services, cluster DNS, pod addresses."""

from __future__ import annotations

from tests.cluster.cluster import Cluster
from tests.cluster.workloads import Manifest
from tests.harness.pod_transport import PodTransport

NAME = "client"


def client_pod(image: str, node: str) -> Manifest:
    """Sleeps; what it runs comes by `kubectl exec`, whose session ends with the kubelet of its node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": NAME,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python3", "-c", "import signal; signal.pause()"],
                    "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 65532,
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }


def open_client(cluster: Cluster, namespace: str) -> PodTransport:
    """Make the pod anew, wait for it, and connect."""
    cluster.kubectl("delete", "pod", NAME, f"--namespace={namespace}", "--ignore-not-found")
    pod = client_pod(cluster.image("kvpool"), cluster.nodes[0])
    cluster.apply({**pod, "metadata": {"name": NAME, "namespace": namespace}})
    cluster.kubectl("wait", f"pod/{NAME}", f"--namespace={namespace}", "--for=condition=Ready", "--timeout=60s")
    command = [str(cluster.command("kubectl")), "exec", "--stdin", NAME, f"--namespace={namespace}", "--"]
    return PodTransport([*command, "python3", "-u", "-c"], environment=cluster.environment())
