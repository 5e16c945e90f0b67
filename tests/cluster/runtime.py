"""What is asked of a node's containerd: its images and its containers' processes.

Invariant: commands run inside the node's namespaces; a reference names the same content on every node.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile

from tests.cluster import network
from tests.cluster.errors import ClusterError
from tests.cluster.image_store import ImageStore
from tests.cluster.node import CONTAINERD_SOCKET, CONTAINERS
from tests.cluster.processes import Process, Processes, process_of


def is_serving(processes: Processes, node: str) -> bool:
    """Whether containerd answers."""
    return _run(processes, node, "version").returncode == 0


def images(processes: Processes, node: str) -> set[str]:
    """The references that the node has."""
    return set(_checked(processes, node, "images", "list", "--quiet").split())


def load(processes: Processes, node: str, store: ImageStore, reference: str) -> None:
    """Load an image unless it is there; layers that the node has are not sent again."""
    if reference in images(processes, node):
        return
    known = _checked(processes, node, "content", "list", "--quiet").split()
    command = _command(processes, node, "images", "import", "-")
    with tempfile.TemporaryFile() as output:
        importing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
        assert importing.stdin is not None
        with contextlib.suppress(BrokenPipeError), importing, importing.stdin as archive:
            store.write(reference, archive, without=known)
        if importing.returncode:
            output.seek(0)
            raise ClusterError(
                f"loading {reference} failed on {node}: {output.read().decode(errors='replace').strip()}"
            )


def tag(processes: Processes, node: str, reference: str, other: str) -> None:
    """Another name for the same content."""
    _checked(processes, node, "images", "tag", "--force", reference, other)


def remove(processes: Processes, node: str, reference: str) -> None:
    """Take an image away."""
    _checked(processes, node, "images", "remove", "--sync", reference)


def first_process(processes: Processes, node: str, container_id: str) -> Process:
    """The process that a container began with, as the host knows it."""
    file = network.node_root(processes, node) / CONTAINERS / container_id / "init.pid"
    found = process_of(int(file.read_text())) if file.exists() else None
    if found is None:
        raise ClusterError(f"container {container_id} does not run on {node}")
    return found


def _checked(processes: Processes, node: str, *arguments: str) -> str:
    done = _run(processes, node, *arguments)
    if done.returncode:
        raise ClusterError(f"ctr {' '.join(arguments)} failed on {node}: {done.stderr.strip()}")
    return done.stdout


def _run(processes: Processes, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(processes, node, *arguments), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def _command(processes: Processes, node: str, *arguments: str) -> list[str]:
    inside = network.enter(processes, node)
    return [*inside, "ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", *arguments]
