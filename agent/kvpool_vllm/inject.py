"""The injector: copies the connector into an engine's pod. Runs as its init container, from kvpool's image.

Invariant: `--to` holds no package in part: each is copied beside its place and renamed. Whoever runs the engine can read it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import kvpool_core
import kvpool_vllm

PACKAGES = (kvpool_core, kvpool_vllm)
SITE_FILE = "site_file.py"
FOLDER_MODE, FILE_MODE = 0o755, 0o644


def inject(target: Path) -> None:
    """Copy all packages and, last, the file by which Python runs `kvpool_vllm.startup`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvpool-", dir=target) as scratch:
        for package in PACKAGES:
            _copy_package(Path(str(package.__file__)).parent, target, Path(scratch))
        site_file = Path(scratch) / "sitecustomize.py"
        _copy_file(target / "kvpool_vllm" / SITE_FILE, site_file)
        site_file.replace(target / site_file.name)


def _copy_package(source: Path, target: Path, scratch: Path) -> None:
    fresh, stale, place = scratch / source.name, scratch / f"{source.name}.stale", target / source.name
    for file in sorted(source.rglob("*.py")):
        _copy_file(file, fresh / file.relative_to(source))
    for folder in (fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
        folder.chmod(FOLDER_MODE)
    if place.exists():
        place.rename(stale)
    fresh.rename(place)


def _copy_file(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)
    place.chmod(FILE_MODE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: `kvpool-inject --to DIR`."""
    parser = argparse.ArgumentParser(
        prog="kvpool-inject", description="Copy kvpool's connector for vLLM into a folder."
    )
    parser.add_argument(
        "--to", required=True, type=Path, metavar="DIR", help="folder that the engine has on PYTHONPATH"
    )
    target = parser.parse_args(arguments).to
    try:
        inject(target)
    except OSError as error:
        print(f"kvpool-inject: {target}: {error.strerror or error}", file=sys.stderr)  # noqa: T201 a command's output
        return 1
    print(f"kvpool-inject: the connector lies in {target}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
