"""Content digests of the files that hold an engine's weights.

Invariant: two different sets of values never get the same digest; what cannot be read has none. A digest is the blob's
name where a hub cache names files by their SHA-256, else BLAKE2b over the whole file, remembered by the node's agent
under (device, inode, size, mtime, sampled bytes).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool_core import identity, wire
from kvpool_core.errors import UnsupportedModelError

DIGEST_BYTES = 32
_CHUNK_BYTES = 8 * 1024 * 1024
_SAMPLE_BYTES = 64 * 1024
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIG_PATTERNS = ("*quant*config.json", "*processor_config.json", "modeling_*.py", "configuration_*.py")
"""What else of the folder decides what is computed: vLLM reads them past the model's configuration."""
_HUB_BLOB = re.compile(r"[0-9a-f]{64}")

Remembered = Callable[[Sequence[wire.FileKey]], list[bytes]]
Teach = Callable[[Sequence[wire.FileKey], Sequence[bytes]], None]


def find_weight_files(model: str) -> list[Path]:
    """Weight files of a model given as a folder or a single file, with the files that say how they and images are read;
    UnsupportedModelError when there are no weights to read."""
    path = Path(model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UnsupportedModelError(
            f"weights of {model!r} are not files on this machine: their content cannot be identified"
        )
    files = sorted({file for pattern in _PATTERNS for file in path.glob(pattern) if file.is_file()})
    if not files:
        raise UnsupportedModelError(
            f"no weight files ({', '.join(_PATTERNS)}) in {model}: their content cannot be identified"
        )
    return files + sorted({file for pattern in _CONFIG_PATTERNS for file in path.glob(pattern) if file.is_file()})


def digest_files(files: Sequence[Path], *, remembered: Remembered, teach: Teach) -> bytes:
    """One digest (16 bytes) of the names and contents of `files`; UnsupportedModelError names an unreadable one."""
    try:
        keys = [file_key(file) for file in files]
        known = remembered(keys)
        digests: list[bytes] = []
        for file, key, digest in zip(files, keys, known, strict=True):
            found = hub_digest(file) or digest
            if not found:
                found = content_digest(file)
                teach([key], [found])
            digests.append(found)
    except OSError as error:
        raise UnsupportedModelError(f"weights cannot be read: {error}") from error
    return identity.digest([[file.name, digest] for file, digest in zip(files, digests, strict=True)])


def hub_digest(file: Path) -> bytes:
    """SHA-256 of a file that a hub cache stores under that name (large files; small ones are named by git), else b""."""
    if not file.is_symlink():
        return b""
    blob = file.resolve()
    return bytes.fromhex(blob.name) if blob.parent.name == "blobs" and _HUB_BLOB.fullmatch(blob.name) else b""


def content_digest(file: Path) -> bytes:
    """BLAKE2b-256 of the whole file; hashlib lets other threads run meanwhile."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with file.open("rb", buffering=0) as stream:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while read := stream.readinto(buffer):
            state.update(buffer[:read])
    return state.digest()


def file_key(file: Path) -> wire.FileKey:
    """What tells a file from its former self without reading it whole: status and samples of its start, middle and end."""
    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        state = hashlib.blake2b(status.st_ctime_ns.to_bytes(8, "big"), digest_size=16)  # ctime: mtime can be set back
        for position in (0, status.st_size // 2, max(0, status.st_size - _SAMPLE_BYTES)):
            stream.seek(position)
            state.update(stream.read(_SAMPLE_BYTES))
    return wire.FileKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, state.digest())
