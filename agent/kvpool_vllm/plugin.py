"""A general plugin of vLLM, which runs it in an injected engine before it makes its configuration.

vLLM refuses to start an encoder-decoder model with any connector, before a connector is asked, and only its own model
configuration says that a model is one. And it takes an engine with a connector of our role for the consumer of another
engine's KV blocks, which may be sent embeddings, in part even, in place of images. Invariant: the former starts, without
our connector; the latter accepts what it accepts without it; nothing in here raises.
"""

from __future__ import annotations

import sys
from typing import Any

NAME = "kvpool"
GROUP = "vllm.general_plugins"
ENTRY_POINT = f"{__name__}:register"
OWN_MODULE = "kvpool_vllm.entry"


def register() -> None:
    """Called by vLLM in each of its processes."""
    for watch in (_watch_models, _watch_embeddings):
        try:
            watch()
        except Exception as error:  # noqa: BLE001 a vLLM that is not as expected
            _say(f"{type(error).__name__}: {error}")


def _watch_models() -> None:
    from vllm.engine.arg_utils import EngineArgs

    engine_args: Any = EngineArgs
    make = engine_args.create_model_config

    def create_model_config(self: Any) -> Any:
        model = make(self)
        if getattr(model, "is_encoder_decoder", False) and _has_ours(self):
            _say("encoder-decoder models are not supported: starting without the cache")
            self.kv_transfer_config = None
        return model

    engine_args.create_model_config = create_model_config


def _watch_embeddings() -> None:
    from vllm.config import VllmConfig

    config: Any = VllmConfig
    resolve = config._resolve_mm_embedding_inputs

    def _resolve_mm_embedding_inputs(self: Any) -> None:
        if not _has_ours(self):
            resolve(self)
            return
        transfer, self.kv_transfer_config = self.kv_transfer_config, None
        try:
            resolve(self)
        finally:
            self.kv_transfer_config = transfer

    config._resolve_mm_embedding_inputs = _resolve_mm_embedding_inputs


def _has_ours(arguments: Any) -> bool:
    transfer = getattr(arguments, "kv_transfer_config", None)
    return getattr(transfer, "kv_connector_module_path", None) == OWN_MODULE


def _say(text: str) -> None:
    print(f"kvpool: {text}", file=sys.stderr, flush=True)  # noqa: T201 as at the start, where there is no logging yet
