"""The daemon's logs, as its configuration says."""

from __future__ import annotations

from kvstore_client import logs
from kvstore_server.config import LogConfig


def configure_logs(config: LogConfig) -> None:
    """Sets up structlog for the process."""
    logs.configure_logs(level=config.level, log_format=config.format)
