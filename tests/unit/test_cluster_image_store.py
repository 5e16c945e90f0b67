"""The store of images: an archive has exactly what the receiver lacks, and dropping an image keeps what others share."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
from pathlib import Path

import pytest

from tests.cluster.image_store import ImageStore

SHARED = b"a layer that all have"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    store = ImageStore(tmp_path)
    (store.folder / "blobs" / "sha256").mkdir(parents=True)
    return store


def put(store: ImageStore, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    (store.folder / "blobs" / "sha256" / digest).write_bytes(content)
    return f"sha256:{digest}"


def add(store: ImageStore, reference: str, *layers: bytes) -> str:
    """As buildah does; returns the manifest's digest."""
    config = {"digest": put(store, f"config of {reference}".encode())}
    manifest = {"config": config, "layers": [{"digest": put(store, layer)} for layer in layers]}
    digest = put(store, json.dumps(manifest).encode())
    file = store.folder / "index.json"
    index = json.loads(file.read_text()) if file.exists() else {"manifests": []}
    index["manifests"].append({"digest": digest, "annotations": {"org.opencontainers.image.ref.name": reference}})
    file.write_text(json.dumps(index))
    return digest


def blobs(store: ImageStore) -> set[bytes]:
    return {path.read_bytes() for path in (store.folder / "blobs" / "sha256").iterdir()}


def test_an_archive_names_the_image_and_leaves_out_what_the_receiver_has(store: ImageStore) -> None:
    manifest = add(store, "localhost/kvpool/kvpool:1", SHARED, b"own")
    shared = put(store, SHARED)
    written = io.BytesIO()

    store.write("localhost/kvpool/kvpool:1", written, without={shared})

    written.seek(0)
    with tarfile.open(fileobj=written) as archive:
        names = archive.getnames()
        index_file = archive.extractfile("index.json")
        assert index_file is not None
        (named,) = json.load(index_file)["manifests"]
    assert f"blobs/{manifest.replace(':', '/')}" in names
    assert f"blobs/{shared.replace(':', '/')}" not in names
    assert len([name for name in names if name.startswith("blobs/")]) == 3
    assert named["annotations"]["io.containerd.image.name"] == "localhost/kvpool/kvpool:1"


def test_old_images_go_and_their_layers_with_them_unless_shared(store: ImageStore) -> None:
    for number in range(5):
        add(store, f"localhost/kvpool/kvpool:{number}", SHARED, f"own of {number}".encode())
        assert store.has(f"localhost/kvpool/kvpool:{number}")
        hours_ago = time.time() - 3600 * (24 - number)
        os.utime(store.folder / "used" / f"localhost%kvpool%kvpool:{number}", (hours_ago, hours_ago))
    add(store, "localhost/kvpool/base:1", SHARED)

    dropped = store.drop_old("localhost/kvpool/kvpool")

    assert dropped == ["localhost/kvpool/kvpool:0", "localhost/kvpool/kvpool:1"]
    assert not store.has("localhost/kvpool/kvpool:0")
    assert store.has("localhost/kvpool/kvpool:2")
    assert store.has("localhost/kvpool/base:1")
    assert SHARED in blobs(store)
    assert b"own of 1" not in blobs(store)
    assert b"own of 2" in blobs(store)


def test_an_image_that_was_asked_for_just_now_stays(store: ImageStore) -> None:
    for number in range(5):
        add(store, f"localhost/kvpool/kvpool:{number}", SHARED)
        assert store.has(f"localhost/kvpool/kvpool:{number}")

    assert store.drop_old("localhost/kvpool/kvpool") == []
