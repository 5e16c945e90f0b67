"""The parts of the domain that one engine process knows (DESIGN section 5).

Invariant: everything that changes the bytes of a block, or what they mean, is in one of the parts; what does not (served
name, tokenizer, thread counts, parallel layout of portable pages) is in none, so that equal engines share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool_core import identity
from kvpool_core.errors import UnsupportedModelError
from kvpool_vllm.config_fields import hashed_fields
from kvpool_vllm.support import find_expandable_segments

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.kv_offload.base import CanonicalKVCaches

# Entries of a model's configuration that say where it came from, not what it computes.
_NOT_COMPUTED = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "architectures_map"}


def plain(value: object) -> object:
    """A value as canonical CBOR can encode it; what is no plain data becomes its text."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if k not in _NOT_COMPUTED}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(v) for v in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if callable(value):  # its address would differ in each process; what it made of the configuration is seen there
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return str(value)


def reject_unsupported(config: VllmConfig) -> None:
    """UnsupportedModelError with the reason and the remedy when this engine's blocks cannot be offloaded."""
    parallel, cache = config.parallel_config, config.cache_config
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    segments = find_expandable_segments(os.environ)
    reasons = (
        (config.model_config.is_encoder_decoder, "encoder-decoder models are not supported"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism is not supported: use tensor parallelism"),
        (parallel.nnodes_within_dp > 1, "tensor parallelism over several nodes is not supported"),
        (
            cache.prefix_caching_hash_algo != "sha256_cbor",
            f"--prefix-caching-hash-algo is {cache.prefix_caching_hash_algo}: set it to sha256_cbor",
        ),
        (
            transfer.kv_load_failure_policy != "recompute",
            'kv_load_failure_policy is not "recompute": a failed load would fail the request',
        ),
        (transfer.kv_role != "kv_both", f'kv_role is {transfer.kv_role!r}: set it to "kv_both"'),
        (not extra.get("canonical_layout"), 'set "canonical_layout": true in kv_connector_extra_config'),
        (
            "blocks_per_chunk" in extra or "block_size" in extra,
            "one block per chunk is supported: remove blocks_per_chunk and block_size from kv_connector_extra_config",
        ),
        (
            _accepts_partial_embeddings(config),
            "vLLM takes this engine for a consumer and accepts embeddings in part: add kvpool to VLLM_PLUGINS",
        ),
        (bool(segments), f"{segments} has expandable_segments, whose memory cannot be registered"),
    )
    for applies, reason in reasons:
        if applies:
            raise UnsupportedModelError(reason)


def _accepts_partial_embeddings(config: VllmConfig) -> bool:
    """Whether our connector's role has opened what our plugin keeps closed: it was not loaded."""
    multimodal, encoders = config.model_config.multimodal_config, config.ec_transfer_config
    is_asked_for = encoders is not None and encoders.is_ec_consumer
    return multimodal is not None and multimodal.allow_missing_mm_embeddings and not is_asked_for


def scheduler_part(config: VllmConfig, kv_cache: KVCacheConfig, *, weights: bytes, draft: bytes, seed: str) -> bytes:
    """Digest (16 bytes) of model, weights, hashing and cache configuration after all overrides.

    `weights`, `draft`: content digests of the model's and the draft model's weights (b"" without a draft model).
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    speculative = config.speculative_config
    value = {
        "model": plain(model.hf_config.to_dict()),
        "longest": model.max_model_len if _depends_on_longest(model.hf_config.to_dict()) else None,
        "settings": [_model_settings(model), *map(_settings, (cache, parallel, config.load_config))],
        "weights": weights,
        "draft": [draft, *_draft_settings(speculative)],
        "speculative": plain(speculative.method) if speculative is not None else None,
        "groups": [
            [_kind(group.kv_cache_spec, model.get_total_num_kv_heads()), sorted(group.layer_names)]
            for group in kv_cache.kv_cache_groups
        ],
        "seed": seed,
    }
    return identity.digest(value)


def adapter_settings(config: VllmConfig) -> bytes:
    """How the engine applies an adapter, canonically encoded (16 bytes)."""
    return identity.digest(_settings(config.lora_config))


def _settings(config: object) -> object:
    return plain(hashed_fields(config))


def _model_settings(model: ModelConfig) -> list[object]:
    multimodal = model.multimodal_config
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    return [_settings(model), _settings(multimodal), Path(scales).read_bytes() if scales else b""]


def _draft_settings(speculative: SpeculativeConfig | None) -> list[object]:
    draft = speculative.draft_model_config if speculative is not None else None
    if speculative is None or draft is None:
        return []
    return [plain(draft.hf_config.to_dict()), _model_settings(draft), _settings(speculative.draft_load_config)]


def _depends_on_longest(hf_config: object) -> bool:
    """Whether positions are encoded by the longest context served: so with every rope scaling but the plain one (LongRoPE
    chooses its factors by `max_model_len`, vLLM 0.32 `phi3_long_rope_scaled_rope.py`)."""
    if isinstance(hf_config, dict):
        kind = (
            hf_config.get("rope_type", hf_config.get("type"))
            if "rope_theta" in hf_config or "factor" in hf_config
            else None
        )
        return kind not in (None, "default") or any(_depends_on_longest(value) for value in hf_config.values())
    return isinstance(hf_config, list) and any(_depends_on_longest(value) for value in hf_config)


def _kind(spec: KVCacheSpec, total_kv_heads: int) -> object:
    """What a KV-cache group's pages hold, in numbers that do not depend on this worker's share of the heads."""
    names = (
        "block_size",
        "head_size",
        "head_size_v",
        "sliding_window",
        "attention_chunk_size",
        "dtype",
        "tokens_per_state",
    )
    return [type(spec).__name__, total_kv_heads, {name: plain(getattr(spec, name, None)) for name in names}]


def worker_parts(config: VllmConfig, caches: CanonicalKVCaches, layer_names: list[list[str]]) -> tuple[bytes, bytes]:
    """(shared part, rank part) of a worker: 16 bytes each, the rank part b"" when every page is parallelism-agnostic.

    UnsupportedModelError when a layer has no canonical mapping. `layer_names`: per group, in the order of its data refs.
    """
    shared: list[object] = [str(config.cache_config.kv_cache_layout), config.device_config.device_type]
    own: list[object] = []
    agnostic = True
    layers = config.compilation_config.static_forward_context
    for refs, names in zip(caches.group_data_refs, layer_names, strict=True):
        if len(refs) != len(names):
            raise UnsupportedModelError("this cache layout packs several layers into one page: no canonical mapping")
        for ref, name in zip(refs, names, strict=True):
            mapping = ref.mapping
            if mapping is None:
                raise UnsupportedModelError(f"layer {name} has no canonical mapping in this engine's cache layout")
            agnostic = agnostic and mapping.parallelism_agnostic
            shared.append([name, mapping.canonical_page_size_bytes, _encoding(layers.get(name))])
            own.append([name, [list(_run(run)) for run in mapping.runs], mapping.num_writers, mapping.writer_index])
    parallel = config.parallel_config
    own.append([parallel.tensor_parallel_size, parallel.prefill_context_parallel_size, parallel.rank])
    return identity.digest(shared), b"" if agnostic else identity.digest(own)


def _run(run: object) -> tuple[int, ...]:
    names = ("local_offset", "canonical_offset", "fragment_size", "num_fragments", "local_stride", "canonical_stride")
    return tuple(int(getattr(run, name)) for name in names)


def _encoding(layer: object) -> object:
    """How a layer's attention backend encodes a page: backend, CPU instruction set, scales of a quantised cache."""
    implementation = getattr(layer, "impl", None)
    backend = getattr(layer, "attn_backend", None)
    scales = [repr(getattr(layer, name, None)) for name in ("_q_scale_float", "_k_scale_float", "_v_scale_float")]
    return [
        getattr(backend, "__name__", str(backend)),
        type(implementation).__name__,
        plain(getattr(layer, "isa", None)),
        plain(getattr(implementation, "kv_cache_dtype", None)),
        scales,
    ]


def private_nonce() -> bytes:
    """16 random bytes that make a domain of one process."""
    return hashlib.blake2b(os.urandom(32), digest_size=16).digest()
