"""The Job that removes a pool's keys from an external Valkey when the pool goes.

Invariant: it ends within PURGE_SECONDS whatever Valkey does, and touches keys that start with the pool's prefix only.
"""

from __future__ import annotations

from kvpool_operator import names
from kvpool_operator.names import Manifest
from kvpool_operator.plan import pods
from kvpool_operator.plan.agent import CREDENTIALS_FOLDER, tolerations
from kvpool_operator.pool import ExternalValkey, Pool
from kvpool_operator.settings import Settings

PURGE_SECONDS = 40
"""The whole deletion shall take a minute, agents and pod start included."""


def build_purge_job(pool: Pool, settings: Settings) -> Manifest | None:
    """The Job; None unless the pool's keys lie in an external Valkey and shall go."""
    external = pool.external
    if external is None or not pool.must_purge:
        return None
    spec = pods.pod_spec(
        pool,
        "default",
        restartPolicy="Never",
        tolerations=tolerations(pool),  # where agents ran there is room now, and a way to Valkey
        terminationGracePeriodSeconds=5,
        containers=[_purge(pool, external, settings)],
        volumes=[pods.secret_volume("valkey", external.secret_name)] if external.secret_name else None,
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        # no owner: a deletion in the foreground would take the Job away before it ran
        "metadata": {
            "name": names.purge_name(pool),
            "namespace": pool.namespace,
            "labels": names.labels(pool, names.PURGE),
        },
        "spec": {
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": 300,
            "activeDeadlineSeconds": PURGE_SECONDS + 10,
            "template": {"metadata": {"labels": names.labels(pool, names.PURGE)}, "spec": spec},
        },
    }


def _purge(pool: Pool, external: ExternalValkey, settings: Settings) -> Manifest:
    command = ["kvpool-purge", "--prefix", names.key_prefix(pool), "--deadline-seconds", str(PURGE_SECONDS)]
    command += ["--endpoints", ",".join(external.endpoints)]
    if external.secret_name:
        command += ["--username-file", f"{CREDENTIALS_FOLDER}/username"]
        command += ["--password-file", f"{CREDENTIALS_FOLDER}/password"]
    mounts = [{"name": "valkey", "mountPath": CREDENTIALS_FOLDER, "readOnly": True}]
    return {
        "name": "purge",
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": command,
        "securityContext": pods.security_context(),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts if external.secret_name else [],
    }
