"""What a forked child inherits and must not use as it is: its parent's connections, and locks that nobody will open.

A lock that another thread of the parent held at the moment of the fork stays shut in the child for ever.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    def after_fork(self) -> None:
        """Called in the child, before anything else runs there."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def mend_after_fork(thing: Inherited) -> None:
    """Has `thing.after_fork` called in every child that is forked while it lives."""
    _inherited.add(thing)


def _after_fork_in_child() -> None:
    for thing in tuple(_inherited):
        thing.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
