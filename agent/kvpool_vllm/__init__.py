"""kvpool's connector inside a vLLM engine: vLLM's OffloadingConnector over the node's kvpool agent.

Imports only what vLLM itself ships. Invariant: whatever fails in here costs the engine misses, never an answer.
"""
