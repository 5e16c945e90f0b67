"""One node's programs: containerd, kubelet and kube-proxy, in the node's namespaces.

Invariant: paths in here are as the node sees them; its /run and /var/lib are its own (see network.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.layout import DNS_SERVICE, DOMAIN, NAME, PODS, Node

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CONTAINERS = Path("run/containerd/io.containerd.runtime.v2.task/k8s.io")
"""Below the node's root: a folder for each container, with the pid of its first process in init.pid."""

_CONTAINERD = """\
version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.tracing"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "/run/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true  # a machine may lack CAP_SYS_RESOURCE, and every sandbox would fail
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{state}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


def write_files(node: Node, state: Path, pki: Path, *, pause: str, reserved_bytes: int) -> None:
    """The configuration files that the commands name.

    pause: the image that every pod begins with. reserved_bytes: memory that the node does not offer to pods.
    """
    folder = state / node.name
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    containerd_config = _CONTAINERD.format(socket=CONTAINERD_SOCKET, pause=pause, state=folder)
    (folder / "containerd.toml").write_text(containerd_config)
    (folder / "cni" / "10-pods.conflist").write_text(json.dumps(_cni(node)))
    (folder / "kubelet.yaml").write_text(json.dumps(_kubelet(node, pki, reserved_bytes), indent=1))
    (folder / "kube-proxy.yaml").write_text(json.dumps(_kube_proxy(node, pki), indent=1))


def containerd(node: Node, state: Path) -> list[str]:
    """The container runtime."""
    return ["containerd", "--config", str(state / node.name / "containerd.toml"), "--log-level", "warn"]


def kubelet(programs: Path, node: Node, state: Path, pki: Path) -> list[str]:
    """The kubelet."""
    return [
        str(programs / "kubelet"),
        f"--config={state / node.name / 'kubelet.yaml'}",
        f"--kubeconfig={pki / node.name}.kubeconfig",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]


def kube_proxy(programs: Path, node: Node, state: Path) -> list[str]:
    """Services."""
    return [str(programs / "kube-proxy"), f"--config={state / node.name / 'kube-proxy.yaml'}"]


def _cni(node: Node) -> dict[str, object]:
    """A wire for each pod, all traffic routed: a bridge would answer past kube-proxy between pods of one node."""
    ipam = {"type": "host-local", "ranges": [[{"subnet": node.pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {"type": "ptp", "ipMasq": False, "ipam": ipam | {"dataDir": "/run/cni-addresses"}},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _kubelet(node: Node, pki: Path, reserved_bytes: int) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{NAME}/{node.name}",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(pki / "ca.crt")}},
        "tlsCertFile": str(pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{node.name}.key"),
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": DOMAIN,
        "resolvConf": "/dev/null",
        "failSwapOn": False,
        "systemReserved": {"memory": str(reserved_bytes)},
        "enforceNodeAllocatable": [],
        "makeIPTablesUtilChains": False,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "healthzBindAddress": "127.0.0.1",
        "imageGCHighThresholdPercent": 100,  # never: no registry would bring an image back
        "evictionHard": {"memory.available": "100Mi"},
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},  # default 300 s: tests kill, and wait for the return
        "nodeLeaseDurationSeconds": 20,  # default 40: goes with the controllers' grace period
        "syncFrequency": "10s",  # default 60 s: how late a changed ConfigMap is seen in a pod
    }


def _kube_proxy(node: Node, pki: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": node.name,
        "clientConnection": {"kubeconfig": str(pki / "proxy.kubeconfig")},
        "clusterCIDR": PODS,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0},  # the whole machine's setting is not ours
    }
