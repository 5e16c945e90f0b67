"""The file with the namespaces that may use a pool, as the operator resolves `allowedNamespaces`: one name a line, or `*`.

Invariant: what was last read stays valid while the file cannot be read; before the first reading nobody is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ALL = "*"


@dataclass(frozen=True, slots=True)
class AllowedNamespaces:
    """Namespaces by name. `everything`: all of the cluster."""

    names: frozenset[str] = frozenset()
    everything: bool = False

    def __contains__(self, namespace: str) -> bool:
        return self.everything or namespace in self.names


def parse_namespaces(text: str) -> AllowedNamespaces:
    """The names in a file's text; blank lines do not count."""
    names = frozenset(line.strip() for line in text.splitlines() if line.strip())
    return AllowedNamespaces(names - {ALL}, everything=ALL in names)


class NamespaceFile:
    """Reads the file again when it changed; a mounted ConfigMap changes by a swap of links, which gives a new inode."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.allowed = AllowedNamespaces()
        self.problem = ""
        """Why the file cannot be read now; "" when it can."""

    def refresh(self) -> bool:
        """Look at the file; whether what it says has changed."""
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            self.problem = ""
            if seen == self._seen:
                return False
            allowed = parse_namespaces(self._path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            self.problem = f"cannot read {self._path}: {error}"
            return False
        self._seen = seen
        former, self.allowed = self.allowed, allowed
        return allowed != former
