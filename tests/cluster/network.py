"""The namespaces of control plane and nodes, and the wires between them.

Owns three anchors: tiny programs whose only purpose is to hold a namespace. Nothing is mounted or named on the host, so when
the cluster's processes end, its namespaces, mounts and links go with them. Invariant: a node writes to no folder of the host
but those below `.kvpool`: its /run, /var/lib and /var/log are its own.
"""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.layout import CONTROL, HOST, LAN, LAN_ANCHOR, LINK, NODES, SERVICES, Node
from tests.cluster.processes import Process, Processes

# hostPath folders, sockets, CNI's state: /run is memory; /var/lib and /var/log show the host's content and keep what is
# written to themselves, but for the parts that shall outlive a stop.
_NODE_MOUNTS = """
set -e
mount --make-rshared /
mkdir -p "$1/kubelet" "$1/containerd" "$1/pod-logs"
mount -t tmpfs -o mode=0755 tmpfs /run
for name in lib log; do
  mkdir -p /run/own/$name/upper /run/own/$name/work
  mount -t overlay -o lowerdir=/var/$name,upperdir=/run/own/$name/upper,workdir=/run/own/$name/work overlay /var/$name
done
mkdir -p /var/lib/kubelet /var/lib/containerd /var/lib/cni /var/log/pods
mount --bind "$1/kubelet" /var/lib/kubelet
mount --bind "$1/containerd" /var/lib/containerd
mount --bind "$1/pod-logs" /var/log/pods
exec "$2"
"""


def anchors() -> tuple[str, ...]:
    """The names under which the anchors are recorded."""
    return (f"anchor-{LAN_ANCHOR}", *(f"anchor-{node.name}" for node in NODES))


def start_anchors(processes: Processes, state: Path, *, pause: Path) -> None:
    """Make the namespaces."""
    processes.ensure(f"anchor-{LAN_ANCHOR}", ["unshare", "--net", "--", pause])
    for node in NODES:
        mounts = ["unshare", "--net", "--mount", "--propagation", "private", "--"]
        processes.ensure(
            f"anchor-{node.name}", [*mounts, "sh", "-c", _NODE_MOUNTS, node.name, state / node.name, pause]
        )
    for name in anchors():
        ready = partial(_is_program, processes, name, pause)
        processes.wait_for(ready, name, seconds=20, what="its namespaces")


def connect(processes: Processes) -> None:
    """Lay the wires between fresh anchors."""
    lan = _anchor(processes, LAN_ANCHOR)
    _in(lan, "ip link set lo up", "ip link add br0 type bridge")
    _in(lan, f"ip address add {LAN.format(1)} dev br0", "ip link set br0 up", "sysctl -qw net.ipv4.ip_forward=1")
    _run(f"ip link add {LINK} type veth peer name host netns {lan.pid}")
    _in(lan, "ip link set host master br0 up")
    _run(f"ip address add {HOST}/24 dev {LINK}", f"ip link set {LINK} up")
    for node in NODES:
        _connect_node(node, lan=lan, anchor=_anchor(processes, node.name))
    # Services are reached through the first node's kube-proxy
    for run in (_run, lambda *commands: _in(lan, *commands)):
        run(f"ip route add {SERVICES} via {NODES[0].address}", *_pod_routes(NODES))


def enter(processes: Processes, name: str) -> list[str]:
    """What to put before a command so that it runs in the namespaces of `lan` or a node."""
    anchor = _anchor(processes, name)
    spaces = ["--net"] if name == LAN_ANCHOR else ["--net", "--mount"]
    return ["nsenter", "--target", str(anchor.pid), *spaces, "--"]


def node_root(processes: Processes, name: str) -> Path:
    """A node's file system, seen from the host."""
    return Path("/proc", str(_anchor(processes, name).pid), "root")


def disconnect() -> None:
    """Take the host's wire away if it is there: the rest goes with the namespaces, which the kernel ends when it likes."""
    if Path(f"/sys/class/net/{LINK}").exists():
        subprocess.run(["ip", "link", "delete", LINK], check=False, capture_output=True)


def _connect_node(node: Node, *, lan: Process, anchor: Process) -> None:
    _run(f"ip link add eth0 netns {anchor.pid} type veth peer name {node.name} netns {lan.pid}")
    _in(lan, f"ip link set {node.name} master br0 up")
    _in(
        anchor,
        "ip link set lo up",
        f"ip address add {node.address}/24 dev eth0",
        "ip link set eth0 up",
        f"ip route add default via {CONTROL}",
        "sysctl -qw net.ipv4.ip_forward=1",
        *_pod_routes(tuple(other for other in NODES if other is not node)),
    )


def _pod_routes(nodes: tuple[Node, ...]) -> list[str]:
    return [f"ip route add {node.pods} via {node.address}" for node in nodes]


def _anchor(processes: Processes, name: str) -> Process:
    found = processes.get(f"anchor-{name}")
    if found is None:
        raise ClusterError(f"the namespaces of {name} are gone: run `make cluster-up`")
    return found


def _is_program(processes: Processes, name: str, program: Path) -> bool:
    process = processes.get(name)
    try:
        return process is not None and Path(f"/proc/{process.pid}/exe").readlink() == program.resolve()
    except FileNotFoundError:
        return False


def _in(process: Process, *commands: str) -> None:
    _run(*(f"nsenter --target {process.pid} --net -- {command}" for command in commands))


def _run(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise ClusterError(f"`{command}` failed: {done.stderr.strip()}")
