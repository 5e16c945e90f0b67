"""What a fresh cluster has beside what Kubernetes itself makes: the Service of the DNS.

CoreDNS runs beside the API server, so the Service has no selector and its endpoint is written here.
"""

from __future__ import annotations

import json

from tests.cluster.layout import CONTROL, DNS_SERVICE

_NAME = "kube-dns"
_SYSTEM = {"namespace": "kube-system", "labels": {"k8s-app": _NAME, "kubernetes.io/service-name": _NAME}}
_PORTS = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
MANIFESTS = "\n---\n".join(
    json.dumps(manifest)
    for manifest in (
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": _NAME, **_SYSTEM},
            "spec": {"clusterIP": DNS_SERVICE, "ports": _PORTS},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{_NAME}-process", **_SYSTEM},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [CONTROL], "conditions": {"ready": True}}],
            "ports": _PORTS,
        },
    )
)
