"""`kvstore simulate` and `kvstore trace`: recorded requests, replayed through the rules that the daemon goes by."""
