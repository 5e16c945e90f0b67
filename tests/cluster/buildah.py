"""buildah, kept to itself: its storage in the user's cache folder, its mounts in a namespace of their own.

Invariant: nothing of it is left when it ends, however it ends, but its storage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.image_store import ImageStore
from tests.harness.provision_commands import pip_setting, process_environment, run_logged

_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""What this machine trusts is trusted while an image is built, and not in the image."""
_PRIVATE = 'mount -t tmpfs tmpfs "$0" && exec "$@"'


class Buildah:
    """The commands that images are made with."""

    def __init__(self, cache: Path, logs: Path, store: ImageStore) -> None:
        self._store = store
        self._storage = cache / "buildah"
        self._log = logs / "provision-cluster-images.log"
        self._environment = process_environment()

    def build(
        self,
        reference: str,
        *,
        folder: Path,
        file: Path,
        base: str | None,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """Build a Containerfile; its layers are kept for the next time."""
        given = {**(arguments or {}), **({"BASE": base} if base is not None else {})}
        with tempfile.NamedTemporaryFile("w", prefix="kvpool-pip-", suffix=".conf") as pip:
            pip.write(_pip_settings(self._environment))
            pip.flush()
            self._run(
                "build",
                *("--isolation=chroot", "--network=host", "--layers", "--pull=never", f"--tag={reference}"),
                *(f"--build-arg={name}={value}" for name, value in given.items()),
                f"--secret=id=pip.conf,src={pip.name}",
                *(["--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro"] if _CERTIFICATES.exists() else []),
                f"--file={file}",
                str(folder),
                what=f"building the image {reference}",
            )

    def load(self, reference: str) -> None:
        """Have an image from the store, unless it is there."""
        if not self._has(reference):
            with tempfile.NamedTemporaryFile(dir=self._scratch(), suffix=".tar") as archive:
                self._store.write(reference, archive)
                archive.flush()
                self._run("pull", f"oci-archive:{archive.name}", what=f"loading {reference}")

    def save(self, reference: str) -> None:
        """Put an image into the store."""
        target = f"oci:{self._store.folder}:{reference}"
        self._run("push", "--disable-compression", reference, target, what=f"saving {reference}")

    def drop(self, reference: str) -> None:
        """Forget an image, if it is there."""
        if self._has(reference):
            self._run("rmi", reference, what=f"removing the image {reference}")

    def push(self, reference: str, target: str) -> None:
        """Send an image to a registry, which the user has logged in to."""
        self.load(reference)
        self._run("push", reference, f"docker://{target}", what=f"pushing {target}", remedy="Try `buildah login`.")

    def _has(self, reference: str) -> bool:
        names = self._storage / "overlay-images" / "images.json"
        return names.exists() and f'"{reference}"' in names.read_text()

    def _scratch(self) -> Path:
        scratch = self._storage / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        return scratch

    def _run(self, command: str, *arguments: str, what: str, remedy: str = "") -> None:
        with tempfile.TemporaryDirectory(prefix="kvpool-buildah-") as run:
            own: Sequence[str] = (
                *("unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _PRIVATE, run),
                *("buildah", f"--root={self._storage}", f"--runroot={run}/run", "--storage-driver=overlay"),
            )
            run_logged(
                [*own, command, *arguments],
                log=self._log,
                environment=self._environment | {"TMPDIR": str(self._scratch())},
                what=what,
                remedy=remedy,
            )


def _pip_settings(environment: Mapping[str, str]) -> str:
    """The machine's way to packages, as a pip.conf: the environment first, then its own configuration."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    lines = []
    for setting in ("index-url", "extra-index-url", "trusted-host", "timeout"):
        variable = "PIP_DEFAULT_TIMEOUT" if setting == "timeout" else f"PIP_{setting.replace('-', '_').upper()}"
        if value := environment.get(variable) or pip_setting(python, f"global.{setting}"):
            lines.append(f"{setting} = {value}")
    if _CERTIFICATES.exists():
        lines.append(f"cert = {_CERTIFICATES}")
    return "\n".join(["[global]", *lines, ""])
