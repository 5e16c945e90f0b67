"""Opting in: the pod webhook that puts the connector into engine pods. Invariant: no pod is ever refused or kept from starting."""
