"""Making and reading the webhook's X.509 certificates (ECDSA P-256). No decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLOCK_SKEW = timedelta(minutes=5)
"""Certificates begin that much earlier, for API servers whose clock is behind."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def made(self) -> datetime:
        """When it was made."""
        return self.certificate.not_valid_before_utc + CLOCK_SKEW

    @property
    def expires(self) -> datetime:
        """When it ends."""
        return self.certificate.not_valid_after_utc

    def certificate_pem(self) -> bytes:
        """The certificate as a Secret holds it."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """The key as a Secret holds it."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def read_pair(certificate: bytes, key: bytes) -> Pair | None:
    """The pair; None when a part is missing or broken, or they do not belong together."""
    try:
        read = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError):
        return None
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != read.public_key():
        return None
    return Pair(read, private)


def read_certificate(pem: bytes) -> x509.Certificate | None:
    """A certificate; None when it is missing or broken."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        return None


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether the issuer signed it."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def dns_names(certificate: x509.Certificate) -> set[str]:
    """The names that a server's certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return set(names.get_values_for_type(x509.DNSName))


def make_ca(now: datetime, life: timedelta) -> Pair:
    """A new certificate authority, good for nothing but signing servers' certificates."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvpool webhook CA")])
    builder = (
        _builder(name, name, key.public_key(), now, life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return Pair(builder.sign(key, hashes.SHA256()), key)


def make_serving(ca: Pair, names: Sequence[str], now: datetime, life: timedelta) -> Pair:
    """A new server's certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvpool webhook")])
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = (
        _builder(subject, ca.certificate.subject, key.public_key(), now, min(life, ca.expires - now))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(authority, critical=False)
    )
    return Pair(builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
