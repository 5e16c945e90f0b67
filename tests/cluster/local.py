"""The test cluster on this machine: brought up, taken down, mended.

Invariant: whatever state a killed cluster left, `up` ends with a whole one or with a ClusterError, and `down` leaves nothing
but the files below `.kvpool/cluster`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from tests.cluster import bootstrap, cgroups, control_plane, network, node, owner, pki, probes, runtime
from tests.cluster.errors import ClusterError
from tests.cluster.image_store import ImageStore
from tests.cluster.images import Images, build_images, build_pause, pause_reference
from tests.cluster.layout import LAN_ANCHOR, NODES, Node
from tests.cluster.processes import Processes
from tests.cluster.programs import programs_entry
from tests.cluster.provide import provide_debian, provide_programs
from tests.cluster.say import say, stage
from tests.harness.provision import LOGS, ROOT
from tests.harness.provision import paths as provisioned
from tests.harness.provision_cache import cache_folder, key_of
from tests.harness.provision_commands import process_environment

STATE = ROOT / ".kvpool" / "cluster"
_SOURCES = ("layout", "pki", "control_plane", "node", "network", "processes", "cgroups")


class LocalCluster:
    """The one of this clone."""

    def __init__(self) -> None:
        self._environment = process_environment()
        self.cache = cache_folder(self._environment)
        self.programs = programs_entry(self.cache)
        self.processes = Processes(STATE)
        self.kubeconfig = STATE / "kubeconfig"
        self._pki = STATE / f"pki-{_source_key('layout', 'pki')}"

    # --- up and down ------------------------------------------------------------------------------------------------

    def up(self) -> Images:
        """Bring up whatever is not; returns the images that both nodes have."""
        started = time.monotonic()
        _need_root()
        provide_programs(self.cache, LOGS, self._environment)
        provide_debian(self.cache, LOGS, self._environment)
        with owner.locked(), ThreadPoolExecutor(thread_name_prefix="cluster") as pool:
            owner.refuse_foreign(ROOT)
            pause = pool.submit(build_pause, self.cache, LOGS)
            building = pool.submit(self._build_images, pause)
            with stage("namespaces and network"):
                self._lay_ground()
            serving = pool.submit(self._start_control_plane)
            running = [pool.submit(self._start_containerd, n) for n in NODES]
            for done in running:
                done.result()
            self.load_image(pause.result())
            serving.result()
            since = {n.name: self._start_node(n) for n in NODES}
            images = building.result()
            loading = [pool.submit(self._load_images, n, images) for n in NODES]
            self._wait_ready(since)
            for loaded in loading:
                loaded.result()
        say(f"up after {time.monotonic() - started:.1f} s: export KUBECONFIG={self.kubeconfig}")
        return images

    def down(self, *, purge: bool = False) -> None:
        """End it. purge: forget what was in it, too."""
        _need_root()
        with owner.locked(), stage("down"):
            owner.refuse_foreign(ROOT)
            owner.clean()
            self.kubeconfig.unlink(missing_ok=True)
            if purge:
                shutil.rmtree(STATE, ignore_errors=True)

    def is_up(self) -> bool:
        """Whether everything that was started runs."""
        found = owner.current()
        return (
            found is not None
            and (found.clone, found.version) == (str(ROOT), self._version())
            and set(self.processes.alive()) >= set(_names())
        )

    # --- one node ---------------------------------------------------------------------------------------------------

    def stop_node(self, name: str) -> None:
        """SIGKILL a node's kubelet and containerd; its containers go on."""
        for program in ("kubelet", "containerd"):
            if (process := self.processes.get(f"{program}-{name}")) is not None:
                process.kill()

    def start_node(self, name: str) -> None:
        """Start what stop_node ended, and wait until the node is Ready."""
        (found,) = [n for n in NODES if n.name == name]
        self._start_containerd(found)
        self._wait_ready({name: self._start_node(found)})

    def load_image(self, reference: str, *nodes: str) -> None:
        """Load an image of the store on some nodes, or all."""
        for name in nodes or [n.name for n in NODES]:
            runtime.load(self.processes, name, ImageStore(self.cache), reference)

    # --- stages -----------------------------------------------------------------------------------------------------

    def _build_images(self, pause: Future[str]) -> Images:
        wait([pause])  # one at a time, and the nodes wait for that one
        with stage("images built"):
            return build_images(self.cache, LOGS, valkey_server=provisioned().valkey_server)

    def _lay_ground(self) -> None:
        """Namespaces and cgroups; all of them anew if any is missing or made by other code."""
        STATE.mkdir(parents=True, exist_ok=True)
        known = owner.current()
        ours = known is not None and (known.clone, known.version) == (str(ROOT), self._version())
        if not ours or not self._ground_is_laid():
            if known is not None or cgroups.pids():
                say(f"cleaning what is left of {known.clone if known is not None else 'a cluster'}")
            owner.clean()
            self._forget_other_programs()
            owner.take(owner.Owner(str(ROOT), str(STATE), self._version()))
            cgroups.make(*(n.name for n in NODES))
            network.start_anchors(self.processes, STATE, pause=self.programs / "pause")
            network.connect(self.processes)
            (STATE / "ground").write_text(self._anchors())
        self._write_files()

    def _ground_is_laid(self) -> bool:
        """Whether the namespaces are all there and were connected: an `up` may have been cut off between the two."""
        laid = STATE / "ground"
        held = all(self.processes.get(name) is not None for name in network.anchors())
        return held and laid.exists() and laid.read_text() == self._anchors()

    def _anchors(self) -> str:
        return " ".join(str(self.processes.known()[name]) for name in network.anchors())

    def _forget_other_programs(self) -> None:
        """An etcd reads no data of a newer one, nor a kubelet: what other programs wrote is given up, but for the images."""
        made_with = STATE / "programs"
        if not made_with.exists() or made_with.read_text() != self.programs.name:
            for folder in (STATE / "etcd", *(STATE / n.name / "kubelet" for n in NODES)):
                shutil.rmtree(folder, ignore_errors=True)
            made_with.write_text(self.programs.name)

    def _write_files(self) -> None:
        pki.make_pki(self._pki)
        control_plane.write_files(STATE, self._pki)
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(NODES)
        for n in NODES:
            node.write_files(n, STATE, self._pki, pause=pause_reference(), reserved_bytes=half)
        shutil.copyfile(self._pki / "admin.kubeconfig", self.kubeconfig)
        self.kubeconfig.chmod(0o600)

    def _start_control_plane(self) -> None:
        with stage("control plane"):
            self._in(LAN_ANCHOR, "etcd", control_plane.etcd(self.programs, STATE))
            self._in(LAN_ANCHOR, "kube-apiserver", control_plane.api_server(self.programs, STATE, self._pki))
            authority = self._pki / "ca.crt"
            ready = partial(probes.api_is_ready, authority)
            self.processes.wait_for(ready, *owner.CORE, seconds=120, what="the API server's readiness")
            self._in(LAN_ANCHOR, "controller-manager", control_plane.controller_manager(self.programs, self._pki))
            self._in(LAN_ANCHOR, "scheduler", control_plane.scheduler(self.programs, self._pki))
            self._in(LAN_ANCHOR, "dns", control_plane.dns(self.programs, STATE))
            self.kubectl("apply", "--server-side", "--filename=-", stdin=bootstrap.MANIFESTS)

    def _start_containerd(self, n: Node) -> None:
        with stage(f"containerd of {n.name}"):
            name = f"containerd-{n.name}"
            self._in(n.name, name, node.containerd(n, STATE))
            ready = partial(runtime.is_serving, self.processes, n.name)
            self.processes.wait_for(ready, name, seconds=60, what="its socket")

    def _load_images(self, n: Node, images: Images) -> None:
        with stage(f"images on {n.name}"):
            for reference in images.all():
                self.load_image(reference, n.name)

    def _start_node(self, n: Node) -> float:
        """Start kubelet and kube-proxy; returns since when the node's word counts (0: it ran before)."""
        now = time.time()
        fresh = self.processes.get(f"kubelet-{n.name}") is None
        self._in(n.name, f"kubelet-{n.name}", node.kubelet(self.programs, n, STATE, self._pki))
        self._in(n.name, f"kube-proxy-{n.name}", node.kube_proxy(self.programs, n, STATE))
        return float(int(now)) if fresh else 0.0

    def _wait_ready(self, since: dict[str, float]) -> None:
        with stage("nodes Ready, names resolved"):
            for name in since:
                ready = partial(probes.nodes_are_ready, self.kubectl, since)
                self.processes.wait_for(ready, f"kubelet-{name}", seconds=120, what="a Ready node")
            self.processes.wait_for(probes.names_resolve, "dns", seconds=60, what="an answer")

    def _in(self, place: str, name: str, command: list[str]) -> None:
        self.processes.ensure(name, [*network.enter(self.processes, place), *command])

    # --- asking it --------------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints; a CalledProcessError with its complaint."""
        command = [str(self.programs / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(command, input=stdin or "", capture_output=True, text=True, check=True).stdout

    def _version(self) -> str:
        return key_of(self.programs.name, _source_key(*_SOURCES))


def _names() -> list[str]:
    parts = ("containerd", "kubelet", "kube-proxy")
    nodes = [f"{part}-{n.name}" for part in parts for n in NODES]
    return [*network.anchors(), *owner.CORE, "controller-manager", "scheduler", "dns", *nodes]


def _source_key(*names: str) -> str:
    return key_of(*((Path(__file__).parent / f"{name}.py").read_bytes() for name in names))


def _need_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "the test cluster makes namespaces, mounts and cgroups: run it as root, or set KVPOOL_KUBECONFIG"
        )
