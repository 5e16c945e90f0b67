"""The injector: copies the connector into an engine's pod. Runs as its init container, from kvpool's image.

Invariant: `--to` holds no package in part: each is made beside its place and renamed. Whoever runs the engine can read it.
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
from kvpool_vllm import plugin

PACKAGES = (kvpool_core, kvpool_vllm)
SITE_FILE = "site_file.py"
METADATA = "kvpool_connector-0.dist-info"
"""By its entry point vLLM finds the plugin."""
METADATA_FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: kvpool-connector\nVersion: 0\n",
    "entry_points.txt": f"[{plugin.GROUP}]\n{plugin.NAME} = {plugin.ENTRY_POINT}\n",
}
FOLDER_MODE, FILE_MODE = 0o755, 0o644


def inject(target: Path) -> None:
    """Copy all packages and, last, the file by which Python runs `kvpool_vllm.startup`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvpool-", dir=target) as name:
        scratch = Path(name)
        for package in PACKAGES:
            source = Path(str(package.__file__)).parent
            for file in sorted(source.rglob("*.py")):
                _copy_file(file, scratch / source.name / file.relative_to(source))
            _put(scratch / source.name, target)
        for file_name, text in METADATA_FILES.items():
            _write_file(scratch / METADATA / file_name, text)
        _put(scratch / METADATA, target)
        _copy_file(target / "kvpool_vllm" / SITE_FILE, scratch / "sitecustomize.py")
        (scratch / "sitecustomize.py").replace(target / "sitecustomize.py")


def _put(fresh: Path, target: Path) -> None:
    """Rename a finished folder to its place, where a former one goes away with the scratch folder."""
    for folder in (fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
        folder.chmod(FOLDER_MODE)
    place = target / fresh.name
    if place.exists():
        place.rename(fresh.with_name(f"{fresh.name}.stale"))
    fresh.rename(place)


def _write_file(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(FILE_MODE)


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
