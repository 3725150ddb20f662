"""The store daemon: memory tier on slabs, served over gRPC."""
