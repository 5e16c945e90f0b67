"""The images: built with buildah, kept as archives in the user's cache folder, each under a tag made from its inputs.

Invariant: a tag names one content; an image of the same inputs is neither built nor loaded twice.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.buildah import Buildah
from tests.cluster.node import PAUSE_IMAGE
from tests.cluster.programs import programs_entry
from tests.cluster.rootfs import rootfs_entry
from tests.harness.provision_cache import ProvisionError, key_of, make_once

ROOT = Path(__file__).resolve().parents[2]
_PRODUCT_INPUTS = ("Containerfile", ".containerignore", "pyproject.toml", "README.md", "LICENSE", "agent", "operator")
_LOCAL = "localhost/kvpool"
_KEPT = 3
_IN_USE_SECONDS = 3600.0
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
class Image:
    """One image: how it is called, and its archive."""

    reference: str
    archive: Path


@dataclass(frozen=True, slots=True)
class Images:
    """What pods of this checkout run. The base serves engines too: their venv is mounted."""

    base: Image
    product: Image
    valkey: Image

    def all(self) -> tuple[Image, ...]:
        """In the order in which they are loaded: what is built upon others comes after them."""
        return (self.base, self.valkey, self.product)


def build_images(cache: Path, logs: Path, *, valkey_server: Path) -> Images:
    """Build what is missing."""
    buildah = Buildah(cache, logs)
    rootfs = rootfs_entry(cache) / "rootfs.tar"
    base = _image(cache, "base", key_of(rootfs_entry(cache).name, _BASE))
    _build(buildah, base, _BASE, files={"rootfs.tar": rootfs})
    files = {"valkey-server": valkey_server, "valkey-cli": ROOT / "tests" / "cluster" / "valkey-cli"}
    valkey = _image(cache, "valkey", key_of(base.reference, _VALKEY, *(path.read_bytes() for path in files.values())))
    _build(buildah, valkey, _VALKEY, files=files, base=base)
    return Images(base=base, product=_product(buildah, cache, base), valkey=valkey)


def build_pause(cache: Path, logs: Path) -> Image:
    """What every pod of our own nodes begins with."""
    pause = Image(PAUSE_IMAGE, _entry(cache, "pause", key_of(programs_entry(cache).name, _PAUSE)) / "image.tar")
    _build(Buildah(cache, logs), pause, _PAUSE, files={"pause": programs_entry(cache) / "pause"})
    return pause


def push_images(cache: Path, logs: Path, images: Images, registry: str) -> dict[Image, str]:
    """Send them to a registry; what each is called there."""
    names = {image: f"{registry}/{image.reference.removeprefix(f'{_LOCAL}/')}" for image in images.all()}
    for image, name in names.items():
        Buildah(cache, logs).push(image.archive, image.reference, name)
    return names


def build_variant(cache: Path, logs: Path, image: Image, name: str) -> Image:
    """The same content under another digest and the tag `name`: what an upgrade looks like to the operator."""
    repository = image.reference.rpartition(":")[0]
    variant = Image(f"{repository}:{name}", _entry(cache, "variant", key_of(image.reference, name)) / "image.tar")
    _build(Buildah(cache, logs), variant, _VARIANT, files={}, base=image, arguments={"NAME": name})
    return variant


def _product(buildah: Buildah, cache: Path, base: Image) -> Image:
    if not (ROOT / "Containerfile").exists():
        raise ProvisionError(f"{ROOT / 'Containerfile'} is missing: the product's image is built from it")
    files = [path for name in _PRODUCT_INPUTS for path in _files(ROOT / name)] + sorted(ROOT.glob("requirements-*.txt"))
    contents = [part for path in files for part in (str(path.relative_to(ROOT)), path.read_bytes())]
    product = _image(cache, "kvpool", key_of(base.reference, *contents))

    def make(entry: Path) -> None:
        buildah.load(base.archive, base.reference)
        buildah.build(product.reference, folder=ROOT, file=ROOT / "Containerfile", base=base.reference)
        buildah.save(product.reference, product.archive)

    make_once(product.archive.parent, make, what="image kvpool", hint="a minute; seconds when only our code changed")
    _drop_old(buildah, cache, "kvpool")
    return product


def _drop_old(buildah: Buildah, cache: Path, name: str) -> None:
    """Every change of our code makes an image: the newest are kept, and what somebody may be loading just now."""

    def last_used(stamp: Path) -> float:
        return stamp.stat().st_mtime

    stamps = sorted(cache.glob(f"image-{name}-*/.complete"), key=last_used, reverse=True)
    for stamp in stamps[_KEPT:]:
        if time.time() - last_used(stamp) > _IN_USE_SECONDS:
            entry = stamp.parent
            shutil.rmtree(entry)
            buildah.drop(f"{_LOCAL}/{name}:{entry.name.rpartition('-')[2]}")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return [path] if path.exists() else []


def _build(
    buildah: Buildah,
    image: Image,
    recipe: str,
    *,
    files: dict[str, Path],
    base: Image | None = None,
    arguments: dict[str, str] | None = None,
) -> None:
    def make(entry: Path) -> None:
        if base is not None:
            buildah.load(base.archive, base.reference)
        context = entry / "context"
        context.mkdir(exist_ok=True)
        (context / "Containerfile").write_text(recipe)
        for name, source in files.items():
            (context / name).unlink(missing_ok=True)
            _link_or_copy(source, context / name)
        reference = base.reference if base is not None else None
        buildah.build(
            image.reference, folder=context, file=context / "Containerfile", base=reference, arguments=arguments
        )
        buildah.save(image.reference, image.archive)
        for path in context.iterdir():
            path.unlink()

    name = image.reference.removeprefix(f"{_LOCAL}/")
    make_once(image.archive.parent, make, what=f"image {name}", hint="seconds")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        target.write_bytes(source.read_bytes())
        target.chmod(source.stat().st_mode)


def _image(cache: Path, name: str, key: str) -> Image:
    return Image(f"{_LOCAL}/{name}:{key}", _entry(cache, name, key) / "image.tar")


def _entry(cache: Path, name: str, key: str) -> Path:
    return cache / f"image-{name}-{key}"
