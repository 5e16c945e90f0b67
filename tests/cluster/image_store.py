"""All images of all checkouts, in one OCI layout of the user's cache folder: a layer that several share is kept once.

Invariant: an image that the index names is whole. Whoever writes holds the lock; reading needs none, since blobs are named after
their content and an image is dropped only when nobody asked for it for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from tests.cluster.say import say

_KEPT = 3
_IN_USE_SECONDS = 3600.0
_LAYOUT = b'{"imageLayoutVersion": "1.0.0"}'
_NAME = "org.opencontainers.image.ref.name"
_LOADED_NAME = "io.containerd.image.name"


class ImageStore:
    """The layout in `folder`, which buildah writes to as `oci:folder:reference`."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "images"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else builds or drops images meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another run that builds images")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def has(self, reference: str) -> bool:
        """Whether the image is there; asking is using it."""
        found = any(entry["annotations"][_NAME] == reference for entry in self._index())
        if found:
            self._stamp(reference).touch()
        return found

    def write(self, reference: str, target: IO[bytes], *, without: Iterable[str] = ()) -> None:
        """An archive for `ctr images import`, less the blobs (digests) that the receiver has."""
        (entry,) = [entry for entry in self._index() if entry["annotations"][_NAME] == reference]
        named = {**entry, "annotations": {_LOADED_NAME: reference, _NAME: reference.rpartition(":")[2]}}
        index = {"schemaVersion": 2, "manifests": [named]}
        with tarfile.open(fileobj=target, mode="w|") as archive:
            for name, content in (("oci-layout", _LAYOUT), ("index.json", json.dumps(index).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            for digest in self._blobs(entry) - set(without):
                archive.add(self._blob(digest), f"blobs/{digest.replace(':', '/')}")

    def drop_old(self, repository: str) -> list[str]:
        """Keep a repository's newest images and those in use; returns what was dropped. The lock is held."""
        stamps = sorted(self._stamp(f"{repository}:*").parent.glob(self._stamp(f"{repository}:*").name), key=_used)
        old = [_reference(path) for path in stamps[:-_KEPT] if time.time() - _used(path) > _IN_USE_SECONDS]
        if old:
            left = [entry for entry in self._index() if entry["annotations"][_NAME] not in old]
            self._write_index(left)
            needed = {digest for entry in left for digest in self._blobs(entry)}
            for blob in (self.folder / "blobs" / "sha256").iterdir():
                if f"sha256:{blob.name}" not in needed:
                    blob.unlink()
            for reference in old:
                self._stamp(reference).unlink(missing_ok=True)
        return old

    def _index(self) -> list[dict[str, Any]]:
        file = self.folder / "index.json"
        entries: list[dict[str, Any]] = json.loads(file.read_text())["manifests"] if file.exists() else []
        return entries

    def _write_index(self, entries: list[dict[str, Any]]) -> None:
        fresh = self.folder / "index.new"
        fresh.write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
        fresh.rename(self.folder / "index.json")

    def _blobs(self, entry: dict[str, Any]) -> set[str]:
        manifest = json.loads(self._blob(entry["digest"]).read_text())
        parts = [entry, manifest["config"], *manifest["layers"]]
        return {part["digest"] for part in parts}

    def _blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.replace(":", "/")

    def _stamp(self, reference: str) -> Path:
        stamps = self.folder / "used"
        stamps.mkdir(exist_ok=True)
        return stamps / reference.replace("/", "%")


def _reference(stamp: Path) -> str:
    return stamp.name.replace("%", "/")


def _used(stamp: Path) -> float:
    return stamp.stat().st_mtime
