"""A general plugin of vLLM, which runs it in an injected engine before it makes its configuration.

vLLM refuses to start an encoder-decoder model with any connector, before a connector is asked, and only its own model
configuration says that a model is one. Invariant: such an engine starts, without ours; nothing in here raises.
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
    try:
        from vllm.engine.arg_utils import EngineArgs

        _watch(EngineArgs)
    except Exception as error:  # noqa: BLE001 a vLLM that is not as expected
        _say(f"{type(error).__name__}: {error}")


def _watch(engine_args: Any) -> None:
    make = engine_args.create_model_config

    def create_model_config(self: Any) -> Any:
        model = make(self)
        if getattr(model, "is_encoder_decoder", False) and _has_ours(self):
            _say("encoder-decoder models are not supported: starting without the cache")
            self.kv_transfer_config = None
        return model

    engine_args.create_model_config = create_model_config


def _has_ours(arguments: Any) -> bool:
    transfer = getattr(arguments, "kv_transfer_config", None)
    return getattr(transfer, "kv_connector_module_path", None) == OWN_MODULE


def _say(text: str) -> None:
    print(f"kvpool: {text}", file=sys.stderr, flush=True)  # noqa: T201 as at the start, where there is no logging yet
