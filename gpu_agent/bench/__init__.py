"""`kvstore bench agent`: a serving loop whose K and V do not fit, beside the same loop with room for all of them."""
