"""Flags of vLLM 0.32 behind which the next argument can be nothing but their value.

Invariant: a flag that vLLM's parser takes without a value is not among them (an engine test compares with the parser). One
that is missing here costs an engine the cache where its value comes from outside of the pod, and nothing else.
"""

from __future__ import annotations

from typing import Final

_NAMES: Final = """
    --additional-config --all2all-backend --allowed-headers --allowed-local-media-path --allowed-media-domains
    --allowed-methods --allowed-origins --anthropic-disabled-thinking-effort --api-key --api-server-count
    --attention-backend --attention-config --aux-output-config --block-size --chat-template
    --chat-template-content-format --code-revision --cohere-format --collect-detailed-traces --compilation-config
    --config --config-format --convert --cp-kv-cache-interleave-size --cpu-distributed-timeout-seconds --cpu-offload-gb
    --cpu-offload-params --cudagraph-capture-sizes --custom-histogram-buckets --data-parallel-address
    --data-parallel-backend --data-parallel-rank --data-parallel-rpc-port --data-parallel-size
    --data-parallel-size-local --data-parallel-start-rank --data-parallel-supervisor-port --dbo-decode-token-threshold
    --dbo-prefill-token-threshold --dcp-comm-backend --dcp-kv-cache-interleave-size --decode-context-parallel-size
    --default-chat-template-kwargs --default-mm-loras --device-ids --device-memory-utilization --diffusion-config
    --disable-access-log-for-endpoints --distributed-executor-backend --distributed-timeout-seconds --download-dir
    --dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s
    --dp-sync-interval --dtype --ec-manager-config --ec-transfer-config --elastic-ep-max-dp-size --engram-config
    --eplb-config --expert-placement-strategy --fault-tolerance-config --fingerprint-mode --fingerprint-value
    --gdn-prefill-backend --generation-config --gpu-memory-utilization --grpc-port --h11-max-header-count
    --h11-max-incomplete-event-size --hf-config-path --hf-overrides --host --ignore-patterns --io-processor-plugin
    --ir-op-priority --jit-monitor-mode --kda-decode-backend --kda-prefill-backend --kernel-config --kv-cache-dtype
    --kv-cache-dtype-skip-layers --kv-cache-memory-bytes --kv-cache-metrics-sample --kv-events-config
    --kv-offloading-backend --kv-offloading-size --kv-transfer-config --limit-mm-per-prompt --linear-backend
    --load-format --log-config-file --log-level --logging-config --logits-processors --logprobs-mode
    --long-prefill-token-threshold --lora-dtype --lora-modules --lora-target-modules --mamba-backend --mamba-block-size
    --mamba-cache-dtype --mamba-cache-mode --mamba-cache-philox-rounds --mamba-ssm-cache-dtype --mamba-ssu-algorithm
    --master-addr --master-port --max-cpu-loras --max-cudagraph-capture-size --max-log-len --max-logprobs
    --max-lora-cls-labels --max-lora-rank --max-loras --max-model-len --max-num-active-seqs --max-num-batched-tokens
    --max-num-queued-reqs --max-num-queued-tokens --max-num-scheduled-tokens --max-num-seqs
    --max-parallel-loading-workers --media-io-kwargs --middleware --mm-encoder-attn-backend --mm-encoder-attn-dtype
    --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-encoder-tp-mode
    --mm-hasher-algorithm --mm-ipc-gpu-memory-gb --mm-processor-cache-gb --mm-processor-cache-type --mm-processor-device
    --mm-processor-kwargs --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --model --model-class-overrides --model-impl
    --model-loader-extra-config --moe-backend --nnodes --node-rank --num-gpu-blocks-override --numa-bind-cpus
    --numa-bind-nodes --offload-backend --offload-group-size --offload-num-in-group --offload-params
    --offload-prefetch-step --optimization-level --otlp-traces-endpoint --override-generation-config
    --per-request-spec-decode-metrics --performance-mode --pipeline-parallel-size --pooler-config --port
    --prefill-context-parallel-size --prefill-schedule-interval --prefix-cache-retention-interval
    --prefix-caching-hash-algo --prefix-match-unit --profiler-config --pt-load-map-location --quantization
    --quantization-config --reasoning-config --reasoning-parser --reasoning-parser-plugin --renderer-num-workers
    --replayssm-buffer-len --response-role --revision --root-path --runner --safetensors-load-strategy
    --safetensors-prefetch-block-size --safetensors-prefetch-num-threads --scheduler-cls --scheduling-policy --seed
    --served-model-name --show-hidden-metrics-for-version --shutdown-timeout --sleep-preserve-parameter-names
    --sparse-indexer-topk-backend --spec-method --spec-model --spec-tokens --speculative-config
    --sse-keep-alive-interval --ssl-ca-certs --ssl-cert-reqs --ssl-certfile --ssl-ciphers --ssl-keyfile
    --stream-interval --structured-outputs-config --tensor-parallel-size --tokenizer --tokenizer-mode
    --tokenizer-revision --tool-call-parser --tool-parser-plugin --tool-server --tool-strict-level --ubatch-size --uds
    --uvicorn-log-level --video-pruning-method --video-pruning-rate --watermark --watermark-config
    --weight-transfer-config --worker-cls --worker-extension-cls -ac -asc -cc -dc -dcp -dp -dpa -dpb -dpl -dpn -dpp -dpr
    -n -pcp -pp -q -r -sc -tp
"""
VALUE_FLAGS: Final = frozenset(_NAMES.split())
OPTIONAL_VALUE_FLAGS: Final = frozenset({"--hf-token"})
"""May stand alone; a reference behind it is a Secret's token, no flag."""
