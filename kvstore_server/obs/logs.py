"""Structured logs on stderr: for people on a terminal, JSON lines otherwise."""

from __future__ import annotations

import logging
import sys

import structlog

from kvstore_server.config import LogConfig


def configure_logs(config: LogConfig) -> None:
    """Sets up structlog for the process; standard-library loggers keep their own way to stderr."""
    level = logging.getLevelNamesMapping()[config.level.upper()]
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)
    is_console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if is_console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if is_console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
