"""Fewer bits for blocks that leave the GPU: what a plane is encoded to, and how."""
