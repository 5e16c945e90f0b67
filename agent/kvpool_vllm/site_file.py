"""Copied as `sitecustomize.py` beside the connector in an engine's pod: Python imports it at its start."""

from kvpool_vllm import startup

startup.run(__file__)
