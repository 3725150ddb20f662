"""An engine's side of the node's agent: control over gRPC, blocks in memory that both have mapped. No torch."""
