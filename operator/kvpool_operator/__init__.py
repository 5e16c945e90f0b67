"""The control plane: reconciles KVCachePool objects and puts the connector into engine pods."""
