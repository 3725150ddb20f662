"""Stands for TensorRT-LLM where it is not installed: the names that its KV-cache connector interface has."""

from __future__ import annotations

__version__ = "1.2.1"
