"""Remembers content digests of weight files, so that the next engine on the node need not read them again.

Pure. Invariant: a digest is given only for exactly the file version (inode, size, mtime, sampled bytes) it was taught for.
"""

from __future__ import annotations

from collections import OrderedDict

from kvpool_core.wire import FileDigests, FileKey

FILES_MAX = 65_536
"""A model has at most a few hundred files; about 20 MB in all."""


class FileDigestBook:
    """Digests by file version, the oldest forgotten first."""

    def __init__(self, limit: int = FILES_MAX) -> None:
        self._limit = limit
        self._digests: OrderedDict[FileKey, bytes] = OrderedDict()

    def answer(self, message: FileDigests) -> FileDigests:
        """Learn the digests given, then give those known (b"" = unknown)."""
        for file, digest in zip(message.files, message.digests, strict=False):
            if digest:
                self._learn(file, digest)
        return FileDigests(message.rid, message.files, [self._digests.get(file, b"") for file in message.files])

    def _learn(self, file: FileKey, digest: bytes) -> None:
        self._digests[file] = digest
        self._digests.move_to_end(file)
        if len(self._digests) > self._limit:
            self._digests.popitem(last=False)
