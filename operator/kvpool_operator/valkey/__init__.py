"""The managed Valkey: its configuration, and the forming and healing of its cluster."""
