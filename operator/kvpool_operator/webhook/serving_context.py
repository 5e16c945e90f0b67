"""The TLS side of the webhook: a context whose certificate is exchanged while it serves. The key never lies on a disk."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool_operator.webhook.certificates import Serving


def build_context() -> ssl.SSLContext:
    """A server's context without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def load(context: ssl.SSLContext, serving: Serving) -> None:
    """Serve this certificate from the next handshake on; connections that exist keep theirs."""
    with _in_memory(serving.certificate) as certificate, _in_memory(serving.key) as key:
        context.load_cert_chain(certificate, key)


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path for OpenSSL, which reads files only."""
    descriptor = os.memfd_create("kvpool-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
