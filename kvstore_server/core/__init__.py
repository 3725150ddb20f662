"""What the store decides, as values: no clock, no I/O, no threads."""
