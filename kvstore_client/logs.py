"""Structured logs of the processes that serve, on stderr."""

from __future__ import annotations

import io
import logging
import os
import threading
from typing import TextIO, cast

import structlog

_STDERR_FD = 2


class LineWriter(io.TextIOBase):
    """Writes each text to a file descriptor at once, and never raises: what cannot be written is counted and dropped.

    A log whose reader has gone or whose disk is full must not stop what it tells about. There is no buffer, for one
    that cannot be flushed fails again at exit.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._dropped_count = 0

    @property
    def dropped_count(self) -> int:
        """Texts dropped, in whole or in part."""
        return self._dropped_count

    def write(self, text: str, /) -> int:
        rest = memoryview(text.encode(errors="backslashreplace"))
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                self._dropped_count += 1
        return len(text)


_stderr = LineWriter(_STDERR_FD)


def dropped_line_count() -> int:
    """Log lines that this process could not write."""
    return _stderr.dropped_count


def configure_logs(*, level: str, log_format: str) -> None:
    """Sets up structlog and the standard library's logging for the process; neither raises when it cannot write.

    `level` is debug, info, warning or error. `log_format` is console, for people, json, one object a line, or auto:
    console on a terminal, json otherwise.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    stream = cast("TextIO", _stderr)
    logging.basicConfig(level=max(least, logging.WARNING), stream=stream)
    logging.raiseExceptions = False  # a record that cannot be formatted would be reported on stderr, unguarded
    is_console = log_format == "console" or (log_format == "auto" and os.isatty(_STDERR_FD))
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
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
