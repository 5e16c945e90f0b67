"""A pool that goes takes everything of its own along and nothing else; uninstalling never leaves anything hanging."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.cluster.cluster import Cluster
from tests.cluster.external_valkey import NAME, external_valkey
from tests.cluster.installation import (
    RELEASE,
    SYSTEM,
    helm_install,
    pool_manifest,
    wait_pool_ready,
)
from tests.cluster.owned import owned
from tests.cluster.waiting import wait_for

OURS = 100_000
FOREIGN = 1_000
DELETE_SECONDS = 60.0
PASSWORD = "purge-me"
FILL = """
for i = 1, tonumber(ARGV[2]) do redis.call('set', ARGV[1] .. i, 'x') end
return redis.call('dbsize')
"""
COUNT = """
local n, cursor = 0, '0'
repeat
  local found = redis.call('scan', cursor, 'match', ARGV[1] .. '*', 'count', 10000)
  cursor, n = found[1], n + #found[2]
until cursor == '0'
return n
"""


def evaluate(cluster: Cluster, namespace: str, script: str, *arguments: str) -> int:
    """A script run by the external server."""
    program = (
        "import socket,sys\n"
        "words=['AUTH',sys.argv[1]]\n"
        "def send(w):\n"
        "    s.sendall(b'*%d\\r\\n'%len(w)+b''.join(b'$%d\\r\\n%s\\r\\n'%(len(x.encode()),x.encode()) for x in w))\n"
        "    return f.readline().decode().strip()\n"
        "s=socket.create_connection(('127.0.0.1',6379)); s.settimeout(60); f=s.makefile('rb')\n"
        "send(words)\n"
        "print(send(['EVAL',sys.argv[2],'0',*sys.argv[3:]]))"
    )
    out = cluster.kubectl(
        "exec", NAME, f"--namespace={namespace}", "--", "python3", "-c", program, PASSWORD, script, *arguments
    )
    assert out.startswith(":"), out
    return int(out.strip().removeprefix(":"))


def test_deletion_purges_our_keys_and_objects_and_the_pool_can_come_back(
    operator: Cluster, make_namespace: Callable[..., str]
) -> None:
    namespace = make_namespace("delete")
    endpoint = external_valkey(operator, namespace, PASSWORD)
    external = {"endpoints": [endpoint], "authSecretRef": {"name": NAME}}
    pool = pool_manifest("chat", namespace, capacity="64Mi", valkey={"external": external})
    operator.apply(pool)
    wait_pool_ready(operator, "chat", namespace)
    prefix = f"kvpool:{namespace}/chat:"
    evaluate(operator, namespace, FILL, prefix, str(OURS))
    evaluate(operator, namespace, FILL, "kvpool:other/chat:", str(FOREIGN))
    assert owned(operator, "chat", namespace)

    started = time.monotonic()
    operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", f"--timeout={DELETE_SECONDS:g}s")
    operator.apply(pool)  # at once: nothing of the old one may be taken for the new one's
    assert time.monotonic() - started < DELETE_SECONDS
    assert evaluate(operator, namespace, COUNT, prefix) == 0
    assert evaluate(operator, namespace, COUNT, "kvpool:other/chat:") == FOREIGN
    events = operator.get("events", f"--namespace={namespace}")["items"]
    assert any(event["reason"] == "KeysPurged" for event in events)
    wait_pool_ready(operator, "chat", namespace)

    operator.kubectl("delete", "pod", NAME, f"--namespace={namespace}", "--wait=true")  # Valkey is gone, too
    operator.kubectl("delete", "kvpool", "chat", f"--namespace={namespace}", "--timeout=90s")
    wait_for(lambda: not owned(operator, "chat", namespace), seconds=60, what="every owned object is gone")


def test_uninstalling_with_pools_standing_leaves_nothing_hanging(
    operator: Cluster, make_namespace: Callable[..., str]
) -> None:
    namespace = make_namespace("uninstall")
    external = {"endpoints": ["valkey.nowhere.example:6379"]}
    operator.apply(pool_manifest("chat", namespace, capacity="64Mi", valkey={"external": external}))
    wait_for(lambda: owned(operator, "chat", namespace), seconds=30, what="the pool's objects")
    operator.helm("uninstall", RELEASE, f"--namespace={SYSTEM}", "--wait", "--timeout=90s")
    try:
        operator.kubectl("delete", "namespace", namespace, "--timeout=90s")
        operator.kubectl("delete", "namespace", SYSTEM, "--timeout=90s")
    finally:
        helm_install(operator)
