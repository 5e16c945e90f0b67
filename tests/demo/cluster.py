"""`make demo`: the same table as `make demo-local`, with everything launched by the operator on a real two-node Kubernetes.

One engine is a plain Deployment, the other a predictor as KServe's controller makes it. Invariant: it ends non-zero when
any expectation failed; the pool stays for a look at it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.client_pod import open_client
from tests.cluster.cluster import Cluster, CommandError, is_foreign
from tests.cluster.errors import ClusterError
from tests.cluster.installation import (
    SYSTEM,
    delete_namespace,
    ensure_namespace,
    helm_install,
    helm_uninstall,
    pool_manifest,
    wait_pool_ready,
)
from tests.cluster.local import LocalCluster
from tests.cluster.pool_fleet import PoolFleet
from tests.cluster.workloads import Runtime, plain_deployment, predictor_deployment
from tests.demo import references as reference_answers
from tests.demo.references import References
from tests.demo.steps import KV_CACHE_BYTES, PATIENCE_ENVIRONMENT, Demo, DemoError, Prompts, report, say, warm_up
from tests.harness.engine import ROOT, Engine
from tests.harness.processes import ProgramError
from tests.harness.provision import paths as provisioned
from tests.harness.provision_cache import ProvisionError
from tests.harness.stack import clean
from tests.harness.valkey_cluster import free_ports

FOLDER = ROOT / ".kvpool" / "demo"
RESULT = ROOT / ".kvpool" / "demo.json"
REFERENCES = ROOT / ".kvpool" / "demo-reference.json"
MODEL = "demo-60m"
NAMESPACE = "inference"
POOL = "chat"
PLAIN, PREDICTOR = "llama", "llama-vllm-predictor"
VALKEY = {"managed": {"shards": 3, "memoryPerShard": "512Mi"}}


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Says what is done, and how long it took."""
    say(name)
    started = time.monotonic()
    yield
    say(f"{name}: done in {time.monotonic() - started:.1f} s")


def launch(cluster: Cluster) -> None:
    """The three moves; what an earlier run left goes first, since the first prompts are to be cold."""
    with stage("removing what an earlier demo left"):
        delete_namespace(cluster, NAMESPACE)
    with stage("helm install"):
        helm_install(cluster)
    with stage("kubectl apply: the pool"):
        ensure_namespace(cluster, NAMESPACE)
        cluster.apply(pool_manifest(POOL, NAMESPACE, valkey=VALKEY))
        wait_pool_ready(cluster, POOL, NAMESPACE)
    with stage("kubectl apply: two engines, one of them a KServe predictor"):
        node_a, node_b = cluster.nodes[:2]
        runtime = Runtime(
            cluster.image("engine"),
            str(cluster.engine_python),
            tuple(map(str, cluster.engine_mounts)),
            env=PATIENCE_ENVIRONMENT,
        )
        model = cluster.model(MODEL)
        plain = plain_deployment(
            PLAIN,
            runtime,
            model=model,
            node=node_a,
            core="0",
            labels={"kvpool.io/inject": "true"},
            annotations={"kvpool.io/pool": POOL},
            kv_cache_bytes=KV_CACHE_BYTES,
        )
        predictor = predictor_deployment(
            PREDICTOR, runtime, model=model, node=node_b, core="1", pool=POOL, kv_cache_bytes=KV_CACHE_BYTES
        )
        for manifest in (*plain, *predictor):
            manifest["metadata"]["namespace"] = NAMESPACE
        cluster.apply(*plain, *predictor)


def references_of(prompts: Prompts) -> References:
    """Answers of an engine without the connector; asked once and kept."""
    parts = provisioned()
    model = parts.models[MODEL]
    reference = Engine(
        "reference", model, paths=parts, folder=FOLDER, port=free_ports(1)[0], cores="1", socket=None,
        kv_cache_bytes=KV_CACHE_BYTES,
    )  # fmt: skip
    key = reference_answers.key_of(parts.engine_python, model, prompts, reference.arguments)
    known = reference_answers.load(REFERENCES, key)
    if known is not None:
        return known
    clean(FOLDER)
    with stage("asking a reference engine without the connector (its answers are kept for later runs)"):
        try:
            reference.start().wait_ready()
            asked = reference_answers.ask(reference, prompts.long, prompts.endings, prompts.unrelated)
        finally:
            reference.program.kill()
    reference_answers.keep(REFERENCES, key, asked)
    return asked


def run() -> int:
    """Bring everything up, run the steps, print and write the table."""
    with stage("cluster and images"):
        cluster = Cluster.ensure()
    launch(cluster)
    prompts = Prompts.make()
    references = references_of(prompts)
    transport = open_client(cluster, NAMESPACE)
    try:
        with stage("engines Ready and identified"):
            node_a, node_b = cluster.nodes[:2]
            engines = [(PLAIN, node_a), (PREDICTOR, node_b)]
            fleet = PoolFleet(cluster, transport, name=POOL, namespace=NAMESPACE, engines=engines)
            for engine in fleet.engines:
                engine.wait_identified()
        warm_up(fleet)
        demo = Demo(fleet, references, prompts)
        try:
            demo.run()
        finally:
            outcome = report(demo.rows, RESULT)
    finally:
        transport.close()
    show(cluster, fleet)
    return outcome


def show(cluster: Cluster, fleet: PoolFleet) -> None:
    """What a user sees, and what to do next."""
    for command in (
        ("get", "kvpool", f"--namespace={NAMESPACE}"),
        ("get", "pods", f"--namespace={NAMESPACE}", "--output=wide"),
        ("get", "pods", f"--namespace={SYSTEM}"),
    ):
        print(f"$ kubectl {' '.join(command)}\n{cluster.kubectl(*command)}")
    print(f"The pool goes on. Look at it:  export KUBECONFIG={cluster.kubeconfig}")
    print(f"                               kubectl -n {NAMESPACE} describe kvpool {POOL}")
    print(f"Ask it (from inside: {fleet.router.url}):")
    print(f"  kubectl -n {NAMESPACE} port-forward service/{POOL}-router 8080:80 &")
    print(f"  curl -si localhost:8080/v1/completions -H 'content-type: application/json' -d '{example_body(fleet)}'")
    print(f"Remove the pool:               kubectl -n {NAMESPACE} delete kvpool {POOL}")
    print("End all of it:                 make demo-down")


def example_body(fleet: PoolFleet) -> str:
    """A completion of more than one block."""
    prompt = "a prompt of more than one block which is stored and found again when it is sent once more"
    return json.dumps({"model": fleet.engines[0].served_name, "prompt": prompt, "max_tokens": 16})


def end() -> int:
    """End the cluster of this checkout with all that is in it; from a cluster of others only remove what is ours."""
    if not is_foreign():
        LocalCluster().down(purge=True)
        return 0
    cluster = Cluster.ensure()
    delete_namespace(cluster, NAMESPACE)
    helm_uninstall(cluster)
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--down", action="store_true", help="end what the demo left running")
    try:
        return end() if parser.parse_args().down else run()
    except (ClusterError, CommandError, DemoError, ProgramError, ProvisionError, TimeoutError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
