"""Whether an engine, as it is configured, can be given the connector; what the user set wins. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from kvpool_operator.webhook.contract import (
    EVENTS_CONFIG,
    EVENTS_FLAG,
    HASH_ALGORITHM,
    HASH_FLAG,
    SUPPORTED_VLLM,
    TRANSFER_CONFIG,
    TRANSFER_FLAG,
)
from kvpool_operator.webhook.engine_command import SERVER_IMAGES, Engine
from kvpool_operator.webhook.skip_reasons import (
    CONFIG_FILE,
    ENGINE_UNSUPPORTED,
    ENGINE_VERSION_UNSUPPORTED,
    OWN_HASH_ALGORITHM,
    OWN_KV_EVENTS,
    OWN_KV_TRANSFER,
    PREFIX_CACHING_OFF,
    Skip,
)

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\D.*)?")


def check_version(engine: Engine) -> Skip | None:
    """The tag of vLLM's own images is its version. Elsewhere the connector finds out, inside the engine."""
    image = str(engine.container.get("image", "")).partition("@")[0].rpartition("/")[2]
    repository, _, tag = image.partition(":")
    version = _VERSION.fullmatch(tag)
    if repository not in SERVER_IMAGES or not version:
        return None
    found = (int(version[1]), int(version[2]))
    if found == SUPPORTED_VLLM:
        return None
    supported = ".".join(map(str, SUPPORTED_VLLM))
    return Skip(
        ENGINE_VERSION_UNSUPPORTED,
        f"image {image} is vLLM {found[0]}.{found[1]}, this release of kvpool is for {supported}: use an image of that version",
    )


def check_transfer(engine: Engine) -> Skip | None:
    """The user's own connector, or vLLM's own offloading."""
    own = [
        occurrence
        for occurrence in engine.flags.find(TRANSFER_FLAG, shortest="--kv-t")
        if occurrence.key or occurrence.value != TRANSFER_CONFIG
    ]
    if own:
        return Skip(OWN_KV_TRANSFER, f"the engine has its own {TRANSFER_FLAG}: remove it to use the pool")
    for flag in ("--kv-offloading-size", "--kv-offloading-backend"):
        if engine.flags.has(flag, shortest="--kv-o"):
            return Skip(OWN_KV_TRANSFER, f"the engine has {flag}, vLLM's own offloading: remove it to use the pool")
    return None


def check_config_file(engine: Engine) -> Skip | None:
    """What stands in a file cannot be seen, and flags would override it."""
    if not engine.flags.has("--config"):
        return None
    return Skip(
        CONFIG_FILE, "the engine reads flags from a --config file, which may hold its own: write them as arguments"
    )


def check_prefix_caching(engine: Engine) -> Skip | None:
    """Blocks are found by their prefix; the tiers' keys are hashes of one algorithm."""
    if engine.flags.has("--no-enable-prefix-caching", shortest="--no-enable-p"):
        return Skip(PREFIX_CACHING_OFF, "the engine has --no-enable-prefix-caching: remove it to use the pool")
    for occurrence in engine.flags.find(HASH_FLAG, shortest="--prefix-c"):
        if occurrence.value != HASH_ALGORITHM:
            return Skip(
                OWN_HASH_ALGORITHM,
                f"the engine has {HASH_FLAG} {occurrence.value}: remove it, or set {HASH_ALGORITHM}",
            )
    return None


def check_events(engine: Engine) -> Skip | None:
    """The router follows the engine's cache by its events; the user's own configuration of them is kept if it has them."""
    if not engine.flags.has(EVENTS_FLAG, shortest="--kv-e"):
        return None
    if engine.flags.enables(EVENTS_FLAG, "enable_kv_cache_events"):
        return None
    return Skip(
        OWN_KV_EVENTS,
        f'the engine has its own {EVENTS_FLAG} without "enable_kv_cache_events": true: set it, or remove the flag',
    )


def check_supported(engine: Engine) -> Skip | None:
    """Ways of running an engine whose blocks cannot be offloaded; the connector would be inert."""
    flags = engine.flags
    found = next(
        (
            what
            for applies, what in (
                (flags.number("--pipeline-parallel-size", "-pp", default=1) != 1, "pipeline parallelism"),
                (flags.number("--nnodes", "-n", default=1) != 1, "several nodes for one engine"),
                (flags.has("--headless"), "a headless engine"),
                (_has_expandable_segments(engine), "expandable_segments in PYTORCH_CUDA_ALLOC_CONF"),
            )
            if applies
        ),
        "",
    )
    return Skip(ENGINE_UNSUPPORTED, f"{found} is not supported: the engine serves without the pool") if found else None


def _has_expandable_segments(engine: Engine) -> bool:
    return any(
        entry.get("name") in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        and "expandable_segments:true" in str(entry.get("value", "")).lower()
        for entry in engine.container.get("env") or []
    )


ENGINE_CHECKS: Final[tuple[Callable[[Engine], Skip | None], ...]] = (
    check_version,
    check_transfer,
    check_config_file,
    check_prefix_caching,
    check_events,
    check_supported,
)


def missing_arguments(engine: Engine) -> list[str]:
    """Flags to append; those that the user set to what is needed stay."""
    wanted = (
        (TRANSFER_FLAG, TRANSFER_CONFIG, "--kv-t"),
        (EVENTS_FLAG, EVENTS_CONFIG, "--kv-e"),
        (HASH_FLAG, HASH_ALGORITHM, "--prefix-c"),
    )
    return [
        part
        for flag, value, shortest in wanted
        if not engine.flags.has(flag, shortest=shortest)
        for part in (flag, value)
    ]
