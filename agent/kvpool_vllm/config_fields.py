"""Which of vLLM's settings are part of the domain: every field of its configuration is decided here, one way or the other.

Invariant: a field that can change the bytes of a block, or which content a block hash stands for, is in `HASHED`, or reaches
the domain by another way that `DECIDED_OTHERWISE` says. A test compares both with the installed vLLM: a field that nobody
decided about fails it.
"""

from __future__ import annotations

import dataclasses

HASHED: dict[str, frozenset[str]] = {
    "ModelConfig": frozenset(
        {
            "runner",
            "convert",
            "trust_remote_code",
            "code_revision",
            "dtype",
            "quantization",
            "quantization_config",
            "disable_sliding_window",
            "model_class_overrides",
            "model_impl",
            "hf_overrides",  # besides the model's configuration it may name one of the quantisation
        }
    ),
    "MultiModalConfig": frozenset(
        {  # a block hash names images as they came, not as these settings make embeddings of them
            "language_model_only",
            "limit_per_prompt",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "mm_device_do_normalize",
            "mm_hasher_algorithm",
            "mm_encoder_only",
            "mm_encoder_attn_backend",
            "mm_encoder_attn_dtype",
            "mm_encoder_fp8_scale_path",
            "video_pruning_rate",
            "video_pruning_method",
        }
    ),
    "CacheConfig": frozenset(
        {
            "cache_dtype",
            "kv_cache_layout",
            "prefix_caching_hash_algo",
            "sliding_window",
            "kv_cache_dtype_skip_layers",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_cache_mode",
            "mamba_block_size",
            "enable_mamba_shared_prefix_checkpoint",
            "use_replayssm",
            "use_kda_recoverssm",
            "replayssm_buffer_len",
            "kv_sharing_fast_prefill",
            "swa_bounded_replay",
        }
    ),
    "ParallelConfig": frozenset(
        {
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "cp_kv_cache_interleave_size",
            "dcp_kv_cache_interleave_size",
            "enable_hc_sp",
            "worker_cls",
            "worker_extension_cls",
        }
    ),
    "LoadConfig": frozenset({"load_format", "ignore_patterns", "model_loader_extra_config"}),
    "LoRAConfig": frozenset(
        {  # of requests with an adapter only
            "lora_dtype",
            "target_modules",
            "enable_tower_connector_lora",
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
        }
    ),
}

_OTHER_WAYS: dict[str, str] = {
    # the files' content; the configuration after all overrides and what follows from it; the own part of `max_model_len`
    "ModelConfig": """
        model model_weights revision hf_config hf_text_config hf_config_path config_format is_submodel_config
        word_embeddings_untied_by_checkpoint max_model_len multimodal_config
    """,
    # the groups and the workers' layouts
    "CacheConfig": """
        block_size user_specified_block_size prefix_match_unit hash_block_size cache_hit_alignment_tokens
        effective_attention_block_size mamba_page_size_padded skip_page_size_padded
    """,
    # the workers' parts, unless every page is parallelism-agnostic
    "ParallelConfig": "tensor_parallel_size rank world_size",
}

_IRRELEVANT: dict[str, str] = {
    "ModelConfig": """
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init generation_config override_generation_config
        seed spec_target_max_model_len allowed_local_media_path allowed_media_domains allow_deprecated_quantization
        enforce_eager return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
        disable_cascade_attn enable_prompt_embeds served_model_name hf_token enable_sleep_mode
        sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend
        enable_cumem_allocator logits_processors io_processor_plugin renderer_num_workers pooler_config
    """,
    "MultiModalConfig": """
        enable_mm_embeds allow_missing_mm_embeddings mm_processor_cache_gb mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        interleave_mm_strings skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb
    """,
    "CacheConfig": """
        gpu_memory_utilization is_attention_free num_gpu_blocks_override enable_prefix_caching
        prefix_cache_retention_interval num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency
        kv_cache_memory_bytes kv_offloading_size kv_offloading_backend
    """,
    "ParallelConfig": """
        pipeline_parallel_size data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
        data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index is_moe_model enable_expert_parallel
        enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy
        all2all_backend max_parallel_loading_workers disable_custom_all_reduce enable_shm_tensor_arena enable_elastic_ep
        elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
        disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group
        distributed_executor_backend master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
        assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_comm_backend
        dcp_q_replicate enable_fault_tolerance fault_tolerance_config
    """,
    "LoadConfig": """
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device
        use_tqdm_on_load pt_load_map_location
    """,
    "LoRAConfig": """
        max_lora_rank max_loras fully_sharded_loras max_cpu_loras default_mm_loras specialize_active_lora
        max_lora_cls_labels
    """,
}

DECIDED_OTHERWISE: dict[str, frozenset[str]] = {
    name: frozenset(f"{_OTHER_WAYS.get(name, '')} {_IRRELEVANT[name]}".split()) for name in HASHED
}


def hashed_fields(config: object) -> dict[str, object] | None:
    """The fields of one of vLLM's configurations that are part of the domain; None where there is no such configuration."""
    if config is None:
        return None
    return {name: getattr(config, name, None) for name in sorted(HASHED[type(config).__name__])}


def undecided_fields(kind: type) -> set[str]:
    """Fields of a configuration class of the installed vLLM that are in neither table."""
    assert dataclasses.is_dataclass(kind)
    names = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    return names - HASHED[kind.__name__] - DECIDED_OTHERWISE[kind.__name__]
