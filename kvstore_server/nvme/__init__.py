"""The NVMe tier's bytes: segment files on a disk, and the index of what is in them."""
