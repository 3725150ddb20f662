"""Two shared cores make single examples slow now and then, so none has a deadline of its own."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("contract", deadline=None)
settings.load_profile("contract")
