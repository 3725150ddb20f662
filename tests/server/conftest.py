"""What the daemon's tests share. Two shared cores make single examples slow now and then, so none has a deadline."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("server", deadline=None)
settings.load_profile("server")
