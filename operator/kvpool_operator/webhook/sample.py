"""The two sample pods by which a namespace's policies are tried: one as plain as any, one with all that injection adds."""

from __future__ import annotations

from typing import Final

from kvpool_operator.webhook.contract import Manifest
from kvpool_operator.webhook.engine_command import Engine
from kvpool_operator.webhook.engine_flags import Flags
from kvpool_operator.webhook.inject import injected
from kvpool_operator.webhook.views import NamespaceFacts, PoolView

_AMOUNTS: Final = {"cpu": "100m", "memory": "128Mi"}


def sample_pods(pool: PoolView) -> tuple[Manifest, Manifest]:
    """(plain, injected), without the label by which the webhook is called."""
    container: Manifest = {
        "name": "engine",
        "image": pool.image,
        "command": ["vllm", "serve"],
        "resources": {"requests": dict(_AMOUNTS), "limits": dict(_AMOUNTS)},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    plain: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "kvpool-sample-"},
        "spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0},
    }
    engine = Engine(0, container, Flags(()), 8000)
    return plain, injected(plain, engine, pool, NamespaceFacts("", bounds_memory=True))
