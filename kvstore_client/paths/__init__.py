"""The ways that blocks travel besides gRPC streams, one module each, and how one is chosen."""
