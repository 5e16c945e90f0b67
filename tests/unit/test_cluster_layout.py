"""The test cluster's addresses, certificates and mounts fit together; whether they work is shown by the cluster itself."""

from __future__ import annotations

import base64
import ipaddress
import json
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509

from tests.cluster import layout, pki, programs
from tests.cluster.cluster import engine_mounts
from tests.cluster.leftovers import Machine, snapshot
from tests.harness.provision import Paths


def test_pods_services_and_nodes_have_networks_of_their_own() -> None:
    lan = ipaddress.ip_network(layout.LAN.format(0))
    pods = [ipaddress.ip_network(node.pods) for node in layout.NODES]
    services = ipaddress.ip_network(layout.SERVICES)

    assert all(network.subnet_of(ipaddress.ip_network(layout.PODS)) for network in pods)  # type: ignore[arg-type]
    assert not any(one.overlaps(other) for one in (lan, services) for other in (*pods, *({lan, services} - {one})))
    assert {ipaddress.ip_address(node.address) in lan for node in layout.NODES} == {True}
    assert ipaddress.ip_address(layout.DNS_SERVICE) in services
    whole = ipaddress.ip_network(layout.NETWORK)
    assert all(network.subnet_of(whole) for network in (lan, services, *pods))  # type: ignore[arg-type]


def test_a_kubeconfig_is_enough_by_itself_and_its_certificate_is_signed_by_the_authority(tmp_path: Path) -> None:
    pki.make_pki(tmp_path / "pki")

    content = json.loads((tmp_path / "pki" / "admin.kubeconfig").read_text())
    authority = base64.b64decode(content["clusters"][0]["cluster"]["certificate-authority-data"])
    certificate = x509.load_pem_x509_certificate(
        base64.b64decode(content["users"][0]["user"]["client-certificate-data"])
    )

    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    ssl.create_default_context(cadata=authority.decode())


def test_the_pki_is_made_once_and_anew_when_it_was_cut_off(tmp_path: Path) -> None:
    pki.make_pki(tmp_path / "pki")
    first = (tmp_path / "pki" / "ca.crt").read_bytes()

    pki.make_pki(tmp_path / "pki")
    assert (tmp_path / "pki" / "ca.crt").read_bytes() == first

    (tmp_path / "pki" / ".complete").unlink()
    pki.make_pki(tmp_path / "pki")
    assert (tmp_path / "pki" / "ca.crt").read_bytes() != first


@pytest.mark.parametrize(
    ("home", "own"), [("/opt/python/bin", (Path("/opt/python"),)), ("/usr/bin", ())], ids=["own Python", "Debian's"]
)
def test_an_engine_mounts_the_python_that_its_venv_was_made_from(
    home: str, own: tuple[Path, ...], tmp_path: Path
) -> None:
    venv, models = tmp_path / "engine", tmp_path / "models"
    (models / "tiny").mkdir(parents=True)
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text(f"home = {home}\nversion_info = 3.11.7\n")
    paths = Paths(
        python=Path("/p"),
        engine_python=venv / "bin" / "python",
        models={"tiny": models / "tiny"},
        valkey_server=Path("/v"),
    )

    assert engine_mounts(paths) == (venv, models, *own)


def test_every_tool_that_the_module_names_is_built() -> None:
    built = programs.packages()

    assert {"./coredns", "./pause", "k8s.io/kubernetes/cmd/kubelet", "helm.sh/helm/v4/cmd/helm"} <= set(built)
    assert programs.kubernetes_version().startswith("v1.36.")


def test_what_a_snapshot_has_more_is_named_by_its_kind() -> None:
    empty: frozenset[str] = frozenset()
    before = Machine(empty, empty, empty, empty, empty, frozenset({"/run/lock"}))
    after = Machine(empty, frozenset({"0:42 /mnt"}), empty, empty, empty, frozenset({"/run/lock"}))

    assert after.added_since(before) == {"mounts": ["0:42 /mnt"]}


def test_a_snapshot_has_what_this_process_started() -> None:
    before = snapshot()
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert snapshot().added_since(before)["processes"] == [f"{child.pid} sleep 60"]
        finally:
            child.kill()
