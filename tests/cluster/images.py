"""The images: built with buildah, kept in the user's cache folder, each under a tag made from its inputs.

Invariant: a tag names one content; an image of the same inputs is neither built nor loaded twice.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.buildah import Buildah
from tests.cluster.image_store import ImageStore
from tests.cluster.programs import programs_entry
from tests.cluster.rootfs import rootfs_entry
from tests.cluster.say import say
from tests.harness.provision_cache import ProvisionError, key_of

ROOT = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).resolve().parent
_PRODUCT_INPUTS = ("Containerfile", ".containerignore", "pyproject.toml", "README.md", "LICENSE", "agent", "operator")
_PREFIX = "localhost/kvpool/"
PRODUCT = f"{_PREFIX}kvpool"
_BASE = """\
FROM scratch
ADD rootfs.tar /
CMD ["bash"]
"""
_PAUSE = """\
FROM scratch
COPY pause /pause
USER 65535:65535
ENTRYPOINT ["/pause"]
"""
_VALKEY = """\
ARG BASE
FROM ${BASE}
COPY valkey-server valkey-cli /usr/local/bin/
USER 65532:65532
ENTRYPOINT ["valkey-server"]
"""
_VARIANT = """\
ARG BASE
FROM ${BASE}
ARG NAME
LABEL kvpool.io/variant=${NAME}
"""


@dataclass(frozen=True, slots=True)
class Images:
    """References of what pods of this checkout run. The base serves engines too: their venv is mounted."""

    base: str
    product: str
    valkey: str

    def all(self) -> tuple[str, ...]:
        """In the order in which they are loaded: what is built upon others comes after them."""
        return (self.base, self.valkey, self.product)


def build_images(cache: Path, logs: Path, *, valkey_server: Path) -> Images:
    """Build what is missing."""
    making = _Making(cache, logs)
    with making.store.locked():
        base = f"{_PREFIX}base:{key_of(rootfs_entry(cache).name, _BASE)}"
        making.from_recipe(base, _BASE, files={"rootfs.tar": rootfs_entry(cache) / "rootfs.tar"})
        files = {"valkey-server": valkey_server, "valkey-cli": _HERE / "valkey-cli"}
        valkey = f"{_PREFIX}valkey:{key_of(base, _VALKEY, *(path.read_bytes() for path in files.values()))}"
        making.from_recipe(valkey, _VALKEY, files=files, base=base)
        product = f"{PRODUCT}:{key_of(base, *_product_inputs())}"
        making.image(product, folder=ROOT, file=ROOT / "Containerfile", base=base)
        making.drop_old(PRODUCT)
    return Images(base=base, product=product, valkey=valkey)


def pause_reference() -> str:
    """How the image is called that every pod of our own nodes begins with."""
    return f"{_PREFIX}pause:{key_of((_HERE / 'pause' / 'main.go').read_bytes(), _PAUSE)}"


def build_pause(cache: Path, logs: Path) -> str:
    """That image."""
    making = _Making(cache, logs)
    with making.store.locked():
        making.from_recipe(pause_reference(), _PAUSE, files={"pause": programs_entry(cache) / "pause"})
    return pause_reference()


def build_variant(cache: Path, logs: Path, reference: str, name: str) -> str:
    """The same content under another digest and the tag `name`: what an upgrade looks like to the operator."""
    making = _Making(cache, logs)
    variant = f"{reference.rpartition(':')[0]}:{reference.rpartition(':')[2]}-{name}"
    with making.store.locked():
        making.from_recipe(variant, _VARIANT, files={}, base=reference, arguments={"NAME": name})
    return variant


def push_images(cache: Path, logs: Path, images: Images, registry: str) -> dict[str, str]:
    """Send them to a registry; what each is called there."""
    names = {reference: f"{registry}/{reference.removeprefix(_PREFIX)}" for reference in images.all()}
    making = _Making(cache, logs)
    for reference, name in names.items():
        making.buildah.push(reference, name)
    return names


class _Making:
    """Builds images into the store. Its lock is held."""

    def __init__(self, cache: Path, logs: Path) -> None:
        self.store = ImageStore(cache)
        self.buildah = Buildah(cache, logs, self.store)

    def from_recipe(
        self,
        reference: str,
        recipe: str,
        *,
        files: Mapping[str, Path],
        base: str | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """An image of a few files."""
        with tempfile.TemporaryDirectory(prefix="image-", dir=self.store.folder) as folder:
            context = Path(folder)
            (context / "Containerfile").write_text(recipe)
            for name, source in files.items():
                _link_or_copy(source, context / name)
            self.image(reference, folder=context, file=context / "Containerfile", base=base, arguments=arguments)

    def image(
        self,
        reference: str,
        *,
        folder: Path,
        file: Path,
        base: str | None,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """An image, unless it is there."""
        if self.store.has(reference):
            return
        started = time.monotonic()
        if base is not None:
            self.buildah.load(base)
        self.buildah.build(reference, folder=folder, file=file, base=base, arguments=arguments)
        self.buildah.save(reference)
        self.store.has(reference)
        say(f"image {reference.removeprefix(_PREFIX)}: {time.monotonic() - started:.1f} s")

    def drop_old(self, repository: str) -> None:
        """Every change of our code makes an image: forget those that nobody uses any more."""
        for reference in self.store.drop_old(repository):
            self.buildah.drop(reference)


def _product_inputs() -> list[str | bytes]:
    if not (ROOT / "Containerfile").exists():
        raise ProvisionError(f"{ROOT / 'Containerfile'} is missing: the product's image is built from it")
    files = [path for name in _PRODUCT_INPUTS for path in _files(ROOT / name)] + sorted(ROOT.glob("requirements-*.txt"))
    return [part for path in files for part in (str(path.relative_to(ROOT)), path.read_bytes())]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return [path] if path.exists() else []


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
