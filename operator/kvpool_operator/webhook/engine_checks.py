"""Whether an engine, as it is configured, can be given the connector; what the user set wins. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
from kvpool_operator.webhook.environment import known_values
from kvpool_operator.webhook.skip_reasons import (
    ARGUMENT_UNKNOWN,
    CONFIG_FILE,
    ENGINE_UNSUPPORTED,
    ENGINE_VERSION_UNSUPPORTED,
    OWN_HASH_ALGORITHM,
    OWN_KV_EVENTS,
    OWN_KV_TRANSFER,
    PREFIX_CACHING_OFF,
    Skip,
)

ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_REFUSING_BACKEND = re.compile(r"\bROCM_(SEGMENTED_)?ATTN\b", re.IGNORECASE)
"""Attention backends that vLLM does not take with a connector: chosen by name, in whatever flag, it does not start."""
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
    if any(each.key or each.value != TRANSFER_CONFIG for each in engine.flags.find(TRANSFER_FLAG)):
        return Skip(OWN_KV_TRANSFER, f"the engine has its own {TRANSFER_FLAG}: remove it to use the pool")
    for flag in ("--kv-offloading-size", "--kv-offloading-backend"):
        if engine.flags.has(flag):
            return Skip(OWN_KV_TRANSFER, f"the engine has {flag}, vLLM's own offloading: remove it to use the pool")
    return None


def check_unknown_arguments(engine: Engine) -> Skip | None:
    """What comes from a ConfigMap or Secret cannot be seen, and may be any flag."""
    token = engine.flags.unknown()
    if not token:
        return None
    return Skip(
        ARGUMENT_UNKNOWN,
        f"argument {token} comes from outside of the pod and may be any flag: write flags into the pod",
    )


def check_config_file(engine: Engine) -> Skip | None:
    """What stands in a file cannot be seen, and flags would override it."""
    if not engine.flags.has("--config"):
        return None
    return Skip(
        CONFIG_FILE, "the engine reads flags from a --config file, which may hold its own: write them as arguments"
    )


def check_prefix_caching(engine: Engine) -> Skip | None:
    """Blocks are found by their prefix; the tiers' keys are hashes of one algorithm."""
    if engine.flags.is_on("--enable-prefix-caching", "--no-enable-prefix-caching") is False:
        return Skip(PREFIX_CACHING_OFF, "the engine has --no-enable-prefix-caching: remove it to use the pool")
    algorithm = engine.flags.value(HASH_FLAG)
    if algorithm not in (None, HASH_ALGORITHM):
        return Skip(OWN_HASH_ALGORITHM, f"the engine has {HASH_FLAG} {algorithm}: remove it, or set {HASH_ALGORITHM}")
    return None


def check_events(engine: Engine) -> Skip | None:
    """The router follows the engine's cache by its events; the user's own configuration of them is kept if it has them."""
    if not engine.flags.has(EVENTS_FLAG) or engine.flags.enables(EVENTS_FLAG, "enable_kv_cache_events"):
        return None
    return Skip(
        OWN_KV_EVENTS,
        f'the engine has its own {EVENTS_FLAG} without "enable_kv_cache_events": true: set it, or remove the flag',
    )


def check_supported(engine: Engine) -> Skip | None:
    """Ways of running an engine whose blocks cannot be offloaded: the connector would be inert, or vLLM refuse to start."""
    flags = engine.flags
    unsupported = (
        (flags.number("--pipeline-parallel-size", "-pp", default=1) != 1, "pipeline parallelism"),
        (flags.number("--nnodes", "-n", default=1) != 1, "several nodes for one engine"),
        (flags.has("--headless"), "a headless engine"),
        (flags.has("--omni"), "vLLM-Omni"),
        (flags.has("--grpc"), "an engine that serves gRPC, where routers speak HTTP,"),
        (flags.has("--uds"), "an engine that serves on a Unix socket, which routers cannot reach,"),
        (flags.is_on("--use-replayssm", "--no-use-replayssm") is True, "--use-replayssm"),
        (any(_REFUSING_BACKEND.search(token) for token in flags.tokens), "attention backend ROCM_ATTN"),
        (has_expandable_segments(known_values(engine.container)), "expandable_segments in PyTorch's ALLOC_CONF"),
    )
    found = next((what for applies, what in unsupported if applies), "")
    return Skip(ENGINE_UNSUPPORTED, f"{found} is not supported: the engine serves without the pool") if found else None


def has_expandable_segments(values: Mapping[str, str]) -> bool:
    """As PyTorch reads them, in any of its variables; what comes from elsewhere is found out in the engine."""
    settings = (values.get(name, "").replace(" ", "").lower() for name in ALLOCATOR_VARIABLES)
    return any("expandable_segments:true" in each for each in settings)


ENGINE_CHECKS: Final[tuple[Callable[[Engine], Skip | None], ...]] = (
    check_version,
    check_transfer,
    check_config_file,
    check_unknown_arguments,
    check_prefix_caching,
    check_events,
    check_supported,
)


def missing_arguments(engine: Engine) -> list[str]:
    """Flags to append; those that the user set to what is needed stay."""
    wanted = ((TRANSFER_FLAG, TRANSFER_CONFIG), (EVENTS_FLAG, EVENTS_CONFIG), (HASH_FLAG, HASH_ALGORITHM))
    return [part for flag, value in wanted if not engine.flags.has(flag) for part in (flag, value)]
