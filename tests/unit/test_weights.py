"""Digests of weight files: by content, never by name, size or header."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool_core import wire
from kvpool_core.errors import UnsupportedModelError
from kvpool_vllm import weights


class Memory:
    """What an agent remembers."""

    def __init__(self) -> None:
        self.known: dict[wire.FileKey, bytes] = {}

    def remembered(self, files: Sequence[wire.FileKey]) -> list[bytes]:
        return [self.known.get(file, b"") for file in files]

    def teach(self, files: Sequence[wire.FileKey], digests: Sequence[bytes]) -> None:
        self.known.update(zip(files, digests, strict=True))


def digest(folder: Path, memory: Memory | None = None) -> bytes:
    memory = memory or Memory()
    files = weights.find_weight_files(str(folder))
    return weights.digest_files(files, remembered=memory.remembered, teach=memory.teach)


def model(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def test_equal_files_in_other_folders_have_equal_digests(tmp_path: Path) -> None:
    assert digest(model(tmp_path / "a", b"w" * 5000)) == digest(model(tmp_path / "b", b"w" * 5000))


@pytest.mark.parametrize("position", [0, 150_000, 299_999])
def test_one_changed_byte_anywhere_is_another_digest(tmp_path: Path, position: int) -> None:
    content = bytearray(300_000)
    first = digest(model(tmp_path / "a", bytes(content)))
    content[position] = 1
    assert digest(model(tmp_path / "b", bytes(content))) != first


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "preprocessor_config.json"])
def test_file_that_says_how_weights_or_images_are_read_counts_and_one_of_the_tokenizer_does_not(
    tmp_path: Path, name: str
) -> None:
    folder = model(tmp_path / "a", b"w" * 5000)
    without = digest(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    assert digest(folder) == without
    (folder / name).write_text('{"bits": 4}')
    first = digest(folder)
    (folder / name).write_text('{"bits": 8}')
    assert len({without, first, digest(folder)}) == 3


def test_remembered_digest_spares_the_read_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    memory = Memory()
    folder = model(tmp_path / "a", b"w" * 300_000)
    first = digest(folder, memory)
    (key,) = memory.known
    memory.known[key] = b"remembered".ljust(32, b"!")
    assert digest(folder, memory) != first, "the remembered digest was used"
    file = folder / "model.safetensors"
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(memory.known) == 1
    digest(folder, memory)
    assert len(memory.known) == 2, "equal size, mtime and samples, but the change time tells: read anew"


def test_hub_cache_blob_gives_its_name(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"w")
    snapshot = tmp_path / "snapshots"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blob)
    assert weights.hub_digest(snapshot / "model.safetensors") == bytes.fromhex("ab" * 32)
    assert weights.hub_digest(blob) == b""


@pytest.mark.parametrize("path", ["missing", "empty", "org/name"])
def test_weights_that_are_no_files_cannot_be_identified(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModelError, match="cannot be identified"):
        weights.find_weight_files(str(tmp_path / path))
