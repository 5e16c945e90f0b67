"""Opting in: the pod webhook that puts the connector into engine pods.

Invariant: no pod is ever refused, nor kept from starting by anything that pod and cluster show (docs/opting-in.md, Limits).
"""
