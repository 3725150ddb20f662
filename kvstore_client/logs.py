"""Structured logs of the processes that serve, on stderr."""

from __future__ import annotations

import logging
import sys

import structlog

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "console", "json")
"""`auto`: for people on a terminal, one JSON object a line otherwise."""


def configure_logs(*, level: str, log_format: str) -> None:
    """Sets up structlog for the process; standard-library loggers keep their own way to stderr."""
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(least, logging.WARNING), stream=sys.stderr)
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if is_console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(least),
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
