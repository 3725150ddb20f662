"""The memory tier's bytes: memory that other processes can map."""
