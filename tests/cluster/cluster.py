"""The cluster that demo and cluster tests use: the one on this machine, or the one that KVPOOL_KUBECONFIG names.

Invariant: what a `Cluster` offers works on both, but for what is marked *local*, which needs the nodes' processes and says so
elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster import runtime
from tests.cluster.errors import ClusterError
from tests.cluster.images import Images, build_images, build_variant, push_images
from tests.cluster.layout import NETWORK, NODES
from tests.cluster.local import STATE, LocalCluster
from tests.cluster.programs import clients_entry, make_programs
from tests.cluster.provide import provide_debian
from tests.harness.provision import LOGS, Paths
from tests.harness.provision import paths as provisioned
from tests.harness.provision_cache import cache_folder
from tests.harness.provision_commands import process_environment

COMMAND_SECONDS = 120.0


class CommandError(ClusterError):
    """kubectl or helm ended non-zero; the message has the command and what it printed."""


class Cluster:
    """A running cluster whose nodes have the images of this checkout."""

    def __init__(
        self, *, kubeconfig: Path, commands: Mapping[str, Path], images: Mapping[str, str], local: LocalCluster | None
    ) -> None:
        self.kubeconfig = kubeconfig
        self._commands = commands
        self._images = images
        self._local = local

    @classmethod
    def ensure(cls) -> Cluster:
        """Bring up what is not, build the images that are not built, load those that are not loaded."""
        return _foreign(Path(process_environment()["KVPOOL_KUBECONFIG"])) if is_foreign() else _local()

    # --- commands ---------------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
        """What kubectl prints."""
        return self._command("kubectl", *arguments, stdin=stdin, seconds=seconds)

    def helm(self, *arguments: str, stdin: str | None = None, seconds: float = 300.0) -> str:
        """What helm prints."""
        return self._command("helm", *arguments, stdin=stdin, seconds=seconds)

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Server-side apply."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=text)

    def get(self, *arguments: str) -> Any:
        """`kubectl get ... --output=json`, parsed."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def command(self, name: str) -> Path:
        """The program kubectl or helm, for what needs a process of its own (port-forward). It finds `environment`."""
        return self._commands[name]

    def environment(self) -> dict[str, str]:
        """What such a process is started with."""
        direct = {"NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), NETWORK)))} if self._local else {}
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), **direct}

    # --- images -----------------------------------------------------------------------------------------------------

    def image(self, name: str) -> str:
        """The reference of kvpool, valkey, engine or base; its tag is made from its inputs."""
        return self._images[name]

    def make_variant(self, name: str, suffix: str) -> str:
        """*local*: the same image under another digest and a tag that ends so, on both nodes: what an upgrade looks like."""
        local = self._need_local("make_variant")
        variant = build_variant(local.cache, LOGS, self._images[name], suffix)
        local.load_image(variant)
        return variant

    def tag_image(self, reference: str, other: str) -> None:
        """*local*: another name for the same digest, on both nodes."""
        local = self._need_local("tag_image")
        for node in self.nodes:
            runtime.tag(local.processes, node, reference, other)

    def remove_image(self, node: str, reference: str) -> None:
        """*local*: take an image from a node."""
        runtime.remove(self._need_local("remove_image").processes, node, reference)

    def restore_image(self, node: str, reference: str) -> None:
        """*local*: give a node back an image of this checkout or a variant."""
        self._need_local("restore_image").load_image(reference, node)

    # --- nodes and processes ----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        if self._local is not None:
            return tuple(node.name for node in NODES)
        return tuple(node["metadata"]["name"] for node in self.get("nodes")["items"])

    @property
    def is_local(self) -> bool:
        """Whether what is marked *local* works."""
        return self._local is not None

    @property
    def audit_log(self) -> Path:
        """*local*: who wrote which object, a JSON line each, but for Kubernetes' own parts."""
        self._need_local("audit_log")
        return STATE / "logs" / "audit.log"

    def stop_node(self, node: str) -> None:
        """*local*: SIGKILL a node's kubelet and containerd; its containers go on running."""
        self._need_local("stop_node").stop_node(node)

    def start_node(self, node: str) -> None:
        """*local*: start both again and wait until the node is Ready."""
        self._need_local("start_node").start_node(node)

    def container_pid(self, namespace: str, pod: str, container: str) -> int:
        """*local*: the pid, on this machine, of a running container's first process."""
        local = self._need_local("container_pid")
        found = self.get("pod", pod, f"--namespace={namespace}")
        for kind in ("containerStatuses", "initContainerStatuses"):
            for status in found["status"].get(kind, []):
                if status["name"] == container and "running" in status["state"]:
                    container_id = status["containerID"].rpartition("/")[2]
                    return runtime.first_process(local.processes, found["spec"]["nodeName"], container_id).pid
        raise ClusterError(f"container {container} of pod {namespace}/{pod} does not run")

    def kill_container(self, namespace: str, pod: str, container: str, number: int = signal.SIGKILL) -> None:
        """*local*: a signal from the host, past the kubelet."""
        os.kill(self.container_pid(namespace, pod, container), number)

    # --- engines ----------------------------------------------------------------------------------------------------

    @property
    def engine_python(self) -> Path:
        """The interpreter with vLLM, as a pod of the image `engine` sees it when `engine_mounts` are mounted."""
        return provisioned().engine_python

    @property
    def engine_mounts(self) -> tuple[Path, ...]:
        """Folders of this machine that an engine's pod mounts read-only, each at its own path: venv, its Python, models."""
        return engine_mounts(provisioned())

    def model(self, name: str) -> Path:
        """The folder of a test model, inside `engine_mounts`."""
        return provisioned().models[name]

    # ----------------------------------------------------------------------------------------------------------------

    def _command(self, name: str, *arguments: str, stdin: str | None, seconds: float) -> str:
        try:
            done = subprocess.run(
                [self._commands[name], *arguments],
                input=stdin or "",
                capture_output=True,
                text=True,
                check=False,
                env=self.environment(),
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{name} {' '.join(arguments)} did not end within {seconds:g} s") from error
        if done.returncode:
            output = (done.stderr + done.stdout).strip()
            raise CommandError(f"{name} {' '.join(arguments)} ended with {done.returncode}: {output}")
        return done.stdout

    def _need_local(self, what: str) -> LocalCluster:
        if self._local is None:
            raise ClusterError(
                f"{what} needs the nodes' processes: it works on the test cluster of `make cluster-up` only"
            )
        return self._local


def is_foreign() -> bool:
    """Whether KVPOOL_KUBECONFIG names the cluster."""
    return bool(process_environment().get("KVPOOL_KUBECONFIG"))


def engine_mounts(paths: Paths) -> tuple[Path, ...]:
    """The venv, the models, and the interpreter that the venv was made from unless the images have it themselves."""
    settings = paths.engine_python.parent.parent / "pyvenv.cfg"
    lines = dict(line.split(" = ", 1) for line in settings.read_text().splitlines() if " = " in line)
    prefix = Path(lines["home"]).parent
    own = () if prefix == Path("/usr") else (prefix,)
    models = sorted({path.parent.resolve() for path in paths.models.values()})
    return (paths.engine_python.parent.parent, *models, *own)


def _local() -> Cluster:
    local = LocalCluster()
    images = local.up()
    commands = {name: local.programs / name for name in ("kubectl", "helm")}
    references = _references(images, {reference: reference for reference in images.all()})
    return Cluster(kubeconfig=local.kubeconfig, commands=commands, images=references, local=local)


def _foreign(kubeconfig: Path) -> Cluster:
    environment = process_environment()
    registry = environment.get("KVPOOL_IMAGE_REGISTRY")
    if registry is None:
        raise ClusterError("KVPOOL_KUBECONFIG is set: set KVPOOL_IMAGE_REGISTRY to where its nodes get images from")
    cache = cache_folder(environment)
    provide_debian(cache, LOGS, environment)
    commands = {name: Path(found) for name in ("kubectl", "helm") if (found := shutil.which(name))}
    if len(commands) < 2:
        make_programs(cache, LOGS, environment, clients_only=True)
        commands = {name: clients_entry(cache) / name for name in ("kubectl", "helm")}
    images = build_images(cache, LOGS, valkey_server=provisioned().valkey_server)
    names = push_images(cache, LOGS, images, registry.rstrip("/"))
    return Cluster(kubeconfig=kubeconfig, commands=commands, images=_references(images, names), local=None)


def _references(images: Images, names: Mapping[str, str]) -> dict[str, str]:
    base = names[images.base]
    return {"kvpool": names[images.product], "valkey": names[images.valkey], "engine": base, "base": base}
