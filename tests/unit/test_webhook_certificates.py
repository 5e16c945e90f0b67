"""The webhook's certificates: what is served is always trusted by a bundle that was published before."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from kvpool_operator.webhook import certificate_forms as forms
from kvpool_operator.webhook.certificate_keeper import CertificateKeeper, StoredSecret
from kvpool_operator.webhook.certificates import (
    CA_LIFE,
    CA_RENEWED_BEFORE,
    PUBLISHED_BEFORE_USE,
    SERVING_LIFE,
    SERVING_RENEWED_BEFORE,
    CertificateError,
    Data,
    bundle,
    bundle_patch,
    renew,
    service_names,
    serving_of,
)
from kvpool_operator.webhook.contract import Manifest

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
NAMES = service_names("kvpool-operator", "kvpool-system")


def renewed(data: Data, now: datetime) -> Data:
    """The data after a renewal that must be due."""
    fresh = renew(data, now, NAMES)
    assert fresh is not None
    return fresh


def is_trusted(data: Data, trusted: bytes) -> bool:
    """Whether one of the trusted authorities signed what is served."""
    served = x509.load_pem_x509_certificate(data["tls.crt"])
    return any(forms.is_issued_by(served, ca) for ca in x509.load_pem_x509_certificates(trusted))


def test_the_first_certificates_are_for_the_services_names() -> None:
    data = renewed({}, NOW)
    served = x509.load_pem_x509_certificate(data["tls.crt"])
    assert forms.dns_names(served) == {
        "kvpool-operator.kvpool-system.svc",
        "kvpool-operator.kvpool-system.svc.cluster.local",
    }
    assert served.not_valid_before_utc < NOW
    assert serving_of(data).expires == NOW + SERVING_LIFE
    assert is_trusted(data, bundle(data))
    assert renew(data, NOW, NAMES) is None


def test_a_serving_certificate_is_renewed_in_time_under_the_same_authority() -> None:
    data = renewed({}, NOW)
    assert renew(data, NOW + SERVING_LIFE - SERVING_RENEWED_BEFORE - timedelta(minutes=1), NAMES) is None
    fresh = renewed(data, NOW + SERVING_LIFE - SERVING_RENEWED_BEFORE + timedelta(minutes=1))
    assert fresh["tls.crt"] != data["tls.crt"]
    assert bundle(fresh) == bundle(data)


def test_other_names_need_another_certificate() -> None:
    data = renewed({}, NOW)
    fresh = renew(data, NOW, service_names("kvpool-operator", "elsewhere"))
    assert fresh is not None
    assert fresh["ca.crt"] == data["ca.crt"]
    assert fresh["tls.crt"] != data["tls.crt"]


@pytest.mark.parametrize("broken", ["tls.crt", "tls.key", "ca.crt", "ca.key"])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_broken_is_made_anew(broken: str, content: bytes) -> None:
    data = renewed({}, NOW)
    fresh = renewed({**data, broken: content}, NOW)
    assert is_trusted(fresh, bundle(fresh))
    assert renew(fresh, NOW, NAMES) is None


def test_keys_of_others_in_the_secret_are_no_reason_to_write() -> None:
    assert renew({**renewed({}, NOW), "note": b"x"}, NOW, NAMES) is None


def test_a_new_authority_is_published_before_it_signs_and_the_old_one_stays_trusted() -> None:
    first = renewed({}, NOW)
    due = NOW + CA_LIFE - CA_RENEWED_BEFORE + timedelta(minutes=1)
    announced = renewed(first, due)
    assert announced["ca.crt"] == first["ca.crt"]
    assert len(x509.load_pem_x509_certificates(bundle(announced))) == 2
    assert is_trusted(announced, bundle(first))

    assert renew(announced, due + PUBLISHED_BEFORE_USE - timedelta(minutes=1), NAMES) is None
    promoted = renewed(announced, due + PUBLISHED_BEFORE_USE)
    assert promoted["ca.crt"] == announced["next.crt"]
    assert promoted["old.crt"] == first["ca.crt"]
    assert "next.crt" not in promoted
    assert is_trusted(promoted, bundle(announced)), "a bundle published before promotion trusts what is served now"
    assert is_trusted(announced, bundle(promoted)), "a replica that still serves the old certificate is trusted"

    later = renewed(promoted, NOW + CA_LIFE + timedelta(days=1))
    assert "old.crt" not in later


def test_over_years_what_is_served_is_trusted_by_the_bundle_of_the_minute_before() -> None:
    data, now = renewed({}, NOW), NOW
    for _ in range(3 * 365 // 5):
        now += timedelta(days=5)
        for _ in range(2):
            before = bundle(data)
            data = renew(data, now, NAMES) or data
            assert is_trusted(data, before)
            now += timedelta(minutes=1)
        served = x509.load_pem_x509_certificate(data["tls.crt"])
        assert served.not_valid_after_utc > now + timedelta(days=20)


def test_expired_certificates_after_a_long_pause_are_made_anew() -> None:
    data = renewed(renewed({}, NOW), NOW + CA_LIFE + timedelta(days=1))
    assert is_trusted(data, bundle(data))
    assert "old.crt" not in data


# --- Secret and webhook configuration ---------------------------------------------------------------------------------


@dataclass
class Secret:
    """The Secret as an API server keeps it; `steal` puts another replica's write in front of ours."""

    data: Data | None = None
    version: int = 0
    steal: list[Data] = field(default_factory=list)
    writes: int = 0

    def read(self) -> StoredSecret | None:
        """Data and version."""
        return StoredSecret(dict(self.data), str(self.version)) if self.data is not None else None

    def create(self, data: Data) -> bool:
        """False when it exists."""
        self._let_others_write()
        return self.data is None and self._write(data)

    def replace(self, data: Data, resource_version: str) -> bool:
        """False when it is another version."""
        self._let_others_write()
        return resource_version == str(self.version) and self._write(data)

    def _let_others_write(self) -> None:
        if self.steal:
            self.data, self.version = self.steal.pop(), self.version + 1

    def _write(self, data: Data) -> bool:
        self.data, self.version, self.writes = data, self.version + 1, self.writes + 1
        return True


@dataclass
class Configuration:
    """The webhook configuration."""

    manifest: Manifest | None
    patches: list[list[Manifest]] = field(default_factory=list)

    def read(self) -> Manifest | None:
        """As it is."""
        return self.manifest

    def patch(self, operations: list[Manifest]) -> None:
        """Remember."""
        self.patches.append(operations)


def keeper(secret: Secret, configuration: Configuration | None = None) -> CertificateKeeper:
    """A replica."""
    return CertificateKeeper(secrets=secret, configuration=configuration or Configuration(None), dns_names=NAMES)


def test_both_replicas_serve_what_the_secret_holds() -> None:
    secret = Secret()
    first, second = keeper(secret).keep(NOW), keeper(secret).keep(NOW)
    assert first == second
    assert secret.writes == 1


def test_the_loser_of_a_write_serves_what_the_winner_wrote() -> None:
    winners = renewed({}, NOW)
    secret = Secret(steal=[winners])
    assert keeper(secret).keep(NOW).certificate == winners["tls.crt"]
    assert secret.writes == 0


def test_a_secret_that_never_stays_is_an_error_that_says_so() -> None:
    secret = Secret(data={}, steal=[{"tls.crt": b"%d" % number} for number in range(9)])
    with pytest.raises(CertificateError, match="something else write"):
        keeper(secret).keep(NOW)


def test_the_bundle_is_put_into_the_configuration_once() -> None:
    secret = Secret()
    manifest: Manifest = {"webhooks": [{"name": "pods.kvpool.io", "clientConfig": {"service": {"name": "x"}}}]}
    configuration = Configuration(manifest)
    replica = keeper(secret, configuration)
    assert replica.publish() is False
    replica.keep(NOW)
    assert replica.publish() is True
    text = base64.b64encode(bundle(secret.data or {})).decode()
    assert configuration.patches == [
        [
            {"op": "test", "path": "/webhooks/0/name", "value": "pods.kvpool.io"},
            {"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": text},
        ]
    ]
    manifest["webhooks"][0]["clientConfig"]["caBundle"] = text
    assert replica.publish() is False


def test_without_a_configuration_nothing_is_published() -> None:
    secret = Secret()
    replica = keeper(secret)
    replica.keep(NOW)
    assert replica.publish() is False
    assert bundle_patch({}, b"x") == []
