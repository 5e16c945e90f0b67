"""A real two-node Kubernetes on this machine, for the demo and the cluster tests: see README.md beside this file."""
