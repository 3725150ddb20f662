"""Engines hold K and V in torch tensors, and so do these tests."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the [transformers] extra")
