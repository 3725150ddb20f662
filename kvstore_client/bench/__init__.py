"""`kvstore bench`: how fast blocks move and are found, beside what this machine can do at best."""
