"""The cluster's certificates and kubeconfigs, made once and kept with its state.

Invariant: one authority signs all of them; a kubeconfig carries its certificate inside, so the file alone is enough.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.cluster.layout import API_SERVICE, CONTROL, DOMAIN, NODES, api_url

_LIFETIME = datetime.timedelta(days=3650)
_API_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}")
_COMPLETE = ".complete"
_SIGNING_ONLY = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True, slots=True)
class _Identity:
    """Who a certificate names: common name, group, and for servers the names they are reached by."""

    name: str
    group: str = ""
    hosts: tuple[str, ...] = ()


_SERVERS = {
    "apiserver": _Identity("kube-apiserver", hosts=(CONTROL, API_SERVICE, "127.0.0.1", "localhost", *_API_NAMES)),
    "kubelet-client": _Identity("kube-apiserver-kubelet-client", "system:masters"),
}
_CLIENTS = {
    "admin": _Identity("kubernetes-admin", "system:masters"),
    "controller-manager": _Identity("system:kube-controller-manager"),
    "scheduler": _Identity("system:kube-scheduler"),
    "proxy": _Identity("system:kube-proxy"),
    "dns": _Identity("test-cluster-dns", "system:masters"),
    **{node.name: _Identity(f"system:node:{node.name}", "system:nodes", (node.name, node.address)) for node in NODES},
}


def make_pki(folder: Path) -> None:
    """Fill the folder unless it is whole."""
    if (folder / _COMPLETE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority(authority_key)
    _write(folder, "ca", authority, authority_key)
    for file, identity in {**_SERVERS, **_CLIENTS}.items():
        key = ec.generate_private_key(ec.SECP256R1())
        _write(folder, file, _sign(identity, key, authority, authority_key), key)
    for file in _CLIENTS:
        (folder / f"{file}.kubeconfig").write_text(_kubeconfig(folder, file))
    _write_service_account_key(folder)
    (folder / _COMPLETE).touch()


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvpool-test-cluster")])
    builder = _builder(name, name, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(_SIGNING_ONLY, critical=True)
    return builder.sign(key, hashes.SHA256())


def _sign(
    identity: _Identity,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]
    if identity.group:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity.group))
    builder = _builder(x509.Name(attributes), authority.subject, key.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    if identity.hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_host, identity.hosts))), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(folder: Path, file: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    (folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{file}.key").write_bytes(_private(key))


def _write_service_account_key(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "service-accounts.key").write_bytes(_private(key))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "service-accounts.pub").write_bytes(public)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _kubeconfig(folder: Path, file: str) -> str:
    def data(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    cluster = {"server": api_url(), "certificate-authority-data": data("ca.crt")}
    user = {"client-certificate-data": data(f"{file}.crt"), "client-key-data": data(f"{file}.key")}
    # JSON is YAML
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kvpool-test", "cluster": cluster}],
        "users": [{"name": file, "user": user}],
        "contexts": [{"name": "kvpool-test", "context": {"cluster": "kvpool-test", "user": file}}],
        "current-context": "kvpool-test",
    }
    return json.dumps(content, indent=1) + "\n"
