"""A tier below an engine's own host tier, whose blocks move in a process of their own.

The engine's scheduler shares its interpreter with nobody: a thread there that copies blocks waits up to 5 ms for the
interpreter's lock, block by block, and the scheduler waits for it. So `mover` is a process that maps the host tier and
does all that takes time. `tier` is its twin in the scheduler and waits for nothing. Neither imports an engine.
"""
