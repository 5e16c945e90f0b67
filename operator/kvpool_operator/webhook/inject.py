"""What becomes of a pod that opted in: given the cache, left alone with a reason, or already done. Pure.

Invariant: idempotent. Given its own result, also after another webhook changed the pod in between, it adds only what
is missing; what the user set is never overridden.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from kvpool_operator.webhook.contract import (
    CONNECTOR_VOLUME,
    INIT_CONTAINER,
    INJECTED_ANNOTATION,
    PORT_ANNOTATION,
    SKIPPED_ANNOTATION,
    Manifest,
    engine_labels,
)
from kvpool_operator.webhook.engine_checks import ENGINE_CHECKS, missing_arguments
from kvpool_operator.webhook.engine_command import Engine, find_engine
from kvpool_operator.webhook.engine_memory import init_resources, raise_memory
from kvpool_operator.webhook.environment import add_environment
from kvpool_operator.webhook.pieces import (
    add_mounts,
    add_volumes,
    build_init_container,
    has_named,
)
from kvpool_operator.webhook.skip_reasons import Skip
from kvpool_operator.webhook.step_aside import (
    check_kind,
    check_labels,
    check_names,
    check_namespace,
    check_pool,
    choose_image,
)
from kvpool_operator.webhook.views import NamespaceFacts, PoolView


@dataclass(frozen=True, slots=True)
class Injection:
    """The pod with everything that it needs."""

    pod: Manifest
    pool: tuple[str, str]


@dataclass(frozen=True, slots=True)
class AlreadyInjected:
    """Nothing is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What decides besides the pod itself."""

    namespace: str
    reference: tuple[str, str]
    """(namespace, name) of the pool that the pod asks for."""
    pool: PoolView | None
    facts: NamespaceFacts | None


def decide(pod: Manifest, around: Surroundings) -> Injection | Skip | AlreadyInjected:
    """What becomes of the pod; `pod` is not changed."""
    if is_injected(pod):
        return _complete(pod, around)
    skip = (
        check_kind(pod)
        or check_pool(around.pool, around.reference, around.namespace)
        or check_namespace(around.facts, around.namespace)
    )
    if skip or around.pool is None or around.facts is None:
        return skip or AlreadyInjected()
    engine = _checked_engine(pod)
    if isinstance(engine, Skip):
        return engine
    skip = check_names(pod, engine.container) or check_labels(pod, around.pool)
    if skip:
        return skip
    pool = choose_image(pod, around.pool, around.namespace)
    if isinstance(pool, Skip):
        return pool
    return Injection(injected(pod, engine, pool, around.facts), around.reference)


def is_injected(pod: Manifest) -> bool:
    """Whether the pod went through here before; an annotation copied from elsewhere is not enough."""
    annotations = pod.get("metadata", {}).get("annotations") or {}
    spec = pod.get("spec", {})
    return (
        INJECTED_ANNOTATION in annotations
        and has_named(spec.get("initContainers"), INIT_CONTAINER)
        and has_named(spec.get("volumes"), CONNECTOR_VOLUME)
    )


def _checked_engine(pod: Manifest) -> Engine | Skip:
    engine = find_engine(pod)
    if isinstance(engine, Skip):
        return engine
    return next((skip for check in ENGINE_CHECKS if (skip := check(engine))), engine)


def _complete(pod: Manifest, around: Surroundings) -> Injection | AlreadyInjected:
    """A second call: put back what a webhook in between took away. Nothing is taken back from a pod that is injected."""
    engine = _checked_engine(pod)
    if isinstance(engine, Skip) or around.pool is None:
        return AlreadyInjected()
    changed = copy.deepcopy(pod)
    _add_to(changed, engine, around.pool)
    return AlreadyInjected() if changed == pod else Injection(changed, around.reference)


def injected(pod: Manifest, engine: Engine, pool: PoolView, facts: NamespaceFacts) -> Manifest:
    """A copy of the pod with everything that the engine needs."""
    changed = copy.deepcopy(pod)
    spec = changed["spec"]
    resources = init_resources(changed, engine)
    raise_memory(changed, engine, pool, facts)
    spec["initContainers"] = [*(spec.get("initContainers") or []), build_init_container(pod, engine, pool, resources)]
    _add_to(changed, engine, pool)
    return changed


def _add_to(pod: Manifest, engine: Engine, pool: PoolView) -> None:
    """Everything that can be added twice without harm."""
    container: Manifest = pod["spec"]["containers"][engine.index]
    add_volumes(pod["spec"], pool)
    add_mounts(container)
    add_environment(container, engine.port)
    arguments = missing_arguments(engine)
    if arguments:
        container["args"] = [*(container.get("args") or []), *arguments]
    metadata = pod["metadata"]
    metadata["labels"] = engine_labels(pool.namespace, pool.name) | (metadata.get("labels") or {})
    annotations = metadata["annotations"] = metadata.get("annotations") or {}
    annotations |= {INJECTED_ANNOTATION: f"{pool.namespace}/{pool.name}", PORT_ANNOTATION: str(engine.port)}
    annotations.pop(SKIPPED_ANNOTATION, None)


def stamp_skip(pod: Manifest, skip: Skip) -> Manifest:
    """The pod with the reason on it, without a stamp that says otherwise."""
    changed = copy.deepcopy(pod)
    metadata = changed.setdefault("metadata", {})
    annotations = metadata["annotations"] = metadata.get("annotations") or {}
    annotations[SKIPPED_ANNOTATION] = skip.text
    annotations.pop(INJECTED_ANNOTATION, None)
    return changed
