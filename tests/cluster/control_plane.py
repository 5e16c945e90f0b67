"""The programs of the control plane and how they are started. They run in the namespace `lan`.

Invariant: flags differ from Kubernetes' defaults only where a comment or DESIGN section 12 says why.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster.layout import API_PORT, CONTROL, DOMAIN, PODS, SERVICES

_ETCD = "http://127.0.0.1:2379"

_AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, verbs: [get, list, watch]}
- {level: None, userGroups: ["system:nodes"]}
- {level: None, users: ["system:kube-controller-manager", "system:kube-scheduler", "system:apiserver"]}
- level: None
  resources: [{group: authentication.k8s.io}, {group: authorization.k8s.io}]
- {level: Metadata}
"""
"""Who wrote what: tests ask it whether a leader that lost its lease wrote again."""

_COREFILE = """\
.:53 {{
    errors
    health 127.0.0.1:8080
    ready 127.0.0.1:8181
    kubernetes {domain} in-addr.arpa {{
        kubeconfig {kubeconfig}
        ttl 1
    }}
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""
"""Nothing outside the cluster has a name: it is said at once."""


def write_files(state: Path, pki: Path) -> None:
    """The configuration files that the commands name."""
    (state / "audit.yaml").write_text(_AUDIT_POLICY)
    (state / "Corefile").write_text(_COREFILE.format(domain=DOMAIN, kubeconfig=pki / "dns.kubeconfig"))
    (state / "etcd").mkdir(mode=0o700, exist_ok=True)


def etcd(programs: Path, state: Path) -> list[str]:
    """etcd; what it writes need not outlive the machine, only its own process."""
    return [
        str(programs / "etcd"),
        f"--data-dir={state / 'etcd'}",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(programs: Path, state: Path, pki: Path) -> list[str]:
    """The API server. Webhooks are called at their endpoints: no kube-proxy runs beside it."""
    return [
        str(programs / "kube-apiserver"),
        f"--etcd-servers={_ETCD}",
        f"--bind-address={CONTROL}",
        f"--advertise-address={CONTROL}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",  # nodes' names resolve nowhere
        "--enable-aggregator-routing=true",
        "--allow-privileged=true",
        f"--audit-policy-file={state / 'audit.yaml'}",
        f"--audit-log-path={state / 'logs' / 'audit.log'}",
        "--audit-log-maxsize=50",
        "--audit-log-maxbackup=1",
        "--profiling=false",
    ]


def controller_manager(programs: Path, pki: Path) -> list[str]:
    """The controllers. A node that is silent for 20 s (default 50) is unknown: tests wait for that."""
    return [
        str(programs / "kube-controller-manager"),
        f"--kubeconfig={pki / 'controller-manager.kubeconfig'}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        "--use-service-account-credentials",
        f"--cluster-cidr={PODS}",
        "--node-monitor-grace-period=20s",
        "--node-monitor-period=2s",
        "--profiling=false",
    ]


def scheduler(programs: Path, pki: Path) -> list[str]:
    """The scheduler."""
    return [
        str(programs / "kube-scheduler"),
        f"--kubeconfig={pki / 'scheduler.kubeconfig'}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    ]


def dns(programs: Path, state: Path) -> list[str]:
    """CoreDNS, as a process beside the API server: it needs no node to be up."""
    return [str(programs / "coredns"), "-conf", str(state / "Corefile")]
