"""A Valkey server that is not the operator's, as a pool's `spec.valkey.external`."""

from __future__ import annotations

from tests.cluster.cluster import Cluster
from tests.cluster.workloads import Manifest

PORT = 6379
NAME = "external-valkey"
_FILL = """
for i = 1, tonumber(ARGV[2]) do
  redis.call('set', string.format('%s%032x:0:{%064x}', ARGV[1], 7, i), 'x')
end
return redis.call('dbsize')
"""
_COUNT = """
local n, cursor = 0, '0'
repeat
  local found = redis.call('scan', cursor, 'match', ARGV[1] .. '*', 'count', 10000)
  cursor, n = found[1], n + #found[2]
until cursor == '0'
return n
"""
_EVALUATE = r"""
import socket, sys
def send(*words):
    parts = [b'$%d\r\n%s\r\n' % (len(word.encode()), word.encode()) for word in words]
    server.sendall(b'*%d\r\n' % len(parts) + b''.join(parts))
    return answers.readline().decode().strip()
server = socket.create_connection(('127.0.0.1', 6379), timeout=60)
answers = server.makefile('rb')
send('AUTH', sys.argv[1])
print(send('EVAL', sys.argv[2], '0', *sys.argv[3:]))
"""


def external_valkey(cluster: Cluster, namespace: str, password: str) -> str:
    """A standalone server with a password, Ready; returns host:port. Its Secret has the same name."""
    labels = {"app": NAME}
    metadata = {"name": NAME, "namespace": namespace}
    pod: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "valkey",
                    "image": cluster.image("valkey"),
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["valkey-server", "--requirepass", password, "--save", "", "--dir", "/tmp"],
                    "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
                }
            ],
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": labels, "ports": [{"port": PORT}]},
    }
    cluster.apply(pod, service, basic_auth(NAME, namespace, password))
    cluster.kubectl("wait", f"pod/{NAME}", f"--namespace={namespace}", "--for=condition=Ready", "--timeout=60s")
    return f"{NAME}.{namespace}.svc:{PORT}"


def basic_auth(name: str, namespace: str, password: str) -> Manifest:
    """What `authSecretRef` names."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/basic-auth",
        "stringData": {"username": "default", "password": password},
    }


def fill(cluster: Cluster, namespace: str, password: str, prefix: str, number: int) -> None:
    """Write so many keys, as agents name blocks, into the server of that namespace."""
    _evaluate(cluster, namespace, password, _FILL, prefix, str(number))


def count(cluster: Cluster, namespace: str, password: str, prefix: str) -> int:
    """How many keys begin so."""
    return _evaluate(cluster, namespace, password, _COUNT, prefix)


def _evaluate(cluster: Cluster, namespace: str, password: str, script: str, *arguments: str) -> int:
    program = ["python3", "-c", _EVALUATE, password, script, *arguments]
    out = cluster.kubectl("exec", NAME, f"--namespace={namespace}", "--", *program)
    assert out.startswith(":"), out
    return int(out.strip().removeprefix(":"))
