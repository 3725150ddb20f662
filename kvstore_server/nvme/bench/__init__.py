"""`kvstore bench nvme`: the NVMe tier beside the disk that it is on."""
