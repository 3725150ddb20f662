"""`kvstore plan`: what a model's KV cache needs of each tier, before anything is bought or started."""
