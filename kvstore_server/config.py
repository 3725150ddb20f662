"""The daemon's configuration: data, read once.

Sources, last wins: defaults, one YAML file, `KVSTORE_` environment variables (`KVSTORE_MEMORY__CAPACITY=8GiB`),
command-line flags. docs/configuration.md is generated from this file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvstore.errors import InvalidArgumentError
from kvstore_client.address import default_socket_path
from kvstore_client.hosting import LOOPBACK_ALLOWED, is_loopback
from kvstore_client.sizes import SIZE_ALLOWED, parse_size
from kvstore_server.machine import memory_limit_bytes

ENV_PREFIX = "KVSTORE_"
ENV_DELIMITER = "__"


def _check_size(value: object) -> int:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise ValueError(SIZE_ALLOWED)  # noqa: TRY004  (pydantic turns ValueErrors into messages)
    try:
        return parse_size(str(value), field="size")
    except InvalidArgumentError:
        raise ValueError(SIZE_ALLOWED) from None


Size = Annotated[ByteSize, BeforeValidator(_check_size)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


_OWN_BYTES = 96 << 20
"""What the daemon needs beside its arena: measured 75 to 85 MiB, and some room."""


def _default_capacity_bytes() -> ByteSize:
    # A quarter leaves the engine, its page cache and its own host buffers the rest; never below 16 MiB.
    return ByteSize(max(memory_limit_bytes() // 4, 16 << 20))


class MemoryConfig(_Section):
    """The memory tier."""

    capacity: Size = Field(default_factory=_default_capacity_bytes)
    """Bytes of the arena, a hard cap for the node; default a quarter of this machine's (or cgroup's) memory."""
    slab_size: Size | None = None
    """Bytes of a slab, the unit in which space moves between namespaces and the largest block possible;
    default a 32nd of the capacity, between 4 MiB and 256 MiB."""
    high_watermark: float = Field(default=0.95, gt=0, le=1)
    """Eviction starts above this share of the capacity."""
    low_watermark: float = Field(default=0.90, gt=0, le=1)
    """Eviction stops at this share; the gap makes it come in batches."""

    @property
    def slab_bytes(self) -> int:
        """Rounded to whole pages, and small enough that at least one slab fits."""
        default_bytes = min(max(self.capacity // 32, 4 << 20), 256 << 20)
        wanted = default_bytes if self.slab_size is None else int(self.slab_size)
        return max(min(wanted, int(self.capacity)) // 4096 * 4096, 4096)

    @model_validator(mode="after")
    def _check(self) -> MemoryConfig:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark} must not be above high_watermark {self.high_watermark}"
            )
        if self.capacity < 1 << 20:
            raise ValueError(f"capacity {int(self.capacity)} is too small; allowed: at least 1MiB")
        if self.slab_size is not None and not 4096 <= self.slab_size <= self.capacity:
            raise ValueError(
                f"slab_size {int(self.slab_size)} is out of range; "
                f"allowed: 4096 bytes to the capacity, {int(self.capacity)}"
            )
        limit_bytes = memory_limit_bytes()
        if self.capacity + _OWN_BYTES > limit_bytes:
            raise ValueError(
                f"capacity {self.capacity.human_readable()} and {ByteSize(_OWN_BYTES).human_readable()} for the daemon "
                f"itself are more than this machine or container may use ({ByteSize(limit_bytes).human_readable()}); "
                "the kernel would kill it"
            )
        return self


def _check_host(host: str) -> str:
    if not is_loopback(host):
        raise ValueError(LOOPBACK_ALLOWED)
    return host


LoopbackHost = Annotated[str, AfterValidator(_check_host)]
Port = Annotated[int, Field(ge=0, le=65535)]


class GrpcConfig(_Section):
    """Where the store service listens."""

    host: LoopbackHost = "127.0.0.1"
    """Loopback only."""
    port: Port = 7450
    """TCP port; 0 takes a free one."""
    socket_path: Path | None = Field(default_factory=default_socket_path)
    """Unix socket for clients of this node, which find it by themselves; an empty string means none."""
    stream_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """Longest life of one data stream; a peer that stalls is cut off and its blocks are free again."""
    copy_threads: int = Field(default=2, ge=1, le=64)
    """Threads for copies and checksums; they release the interpreter, so more than the cores is useless."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_none(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("socket_path") == "":
            return {**data, "socket_path": None}
        return data


class MetricsConfig(_Section):
    """Where Prometheus scrapes."""

    host: LoopbackHost = "127.0.0.1"
    """Loopback only."""
    port: Port = 7451
    """TCP port of `/metrics`; 0 takes a free one."""


class LogConfig(_Section):
    """What is logged, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: for people on a terminal, one JSON object a line otherwise."""


class ShutdownConfig(_Section):
    """What SIGTERM does."""

    grace_s: float = Field(default=10.0, ge=0, le=3_600)
    """How long running calls may go on after admission has stopped."""


class Config(BaseSettings):
    """All of it."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        use_attribute_docstrings=True,
    )

    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """The memory tier."""
    grpc: GrpcConfig = Field(default_factory=GrpcConfig)
    """Where the store service listens."""
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Where Prometheus scrapes."""
    log: LogConfig = Field(default_factory=LogConfig)
    """What is logged, on stderr."""
    shutdown: ShutdownConfig = Field(default_factory=ShutdownConfig)
    """What SIGTERM does."""


def load_config(*, file: Path | None, flags: Mapping[str, Mapping[str, object]]) -> Config:
    """The effective configuration; raises `InvalidArgumentError` that names every wrong field.

    `flags` holds what was given on the command line, by section and field.
    """

    class FileConfig(Config):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=in_file)

    in_file = _read_sections(file) if file is not None else {}
    given: dict[str, Any] = {section: dict(values) for section, values in flags.items()}
    try:
        return FileConfig(**given)
    except SettingsError as error:
        raise InvalidArgumentError(f"{error}; set single fields, such as KVSTORE_MEMORY__CAPACITY=8GiB") from error
    except ValidationError as error:
        raise InvalidArgumentError("\n".join(_explain(error))) from error


def _read_sections(file: Path) -> dict[str, Any]:
    """What a YAML file says; a section with nothing in it says nothing."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError.of("--config", str(file), "a readable YAML file") from error
    except yaml.YAMLError as error:
        raise InvalidArgumentError(f"{file} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{file} holds no sections; `kvstore config` prints a valid file")
    # An unknown name stays, so that it is refused.
    return {str(name): value for name, value in content.items() if value is not None or name not in Config.model_fields}


def unknown_environment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that look like settings and are none: most likely typing errors.

    That is a `KVSTORE_…__…` that names no field, and a field's name with single underscores, unless its value
    is one that Kubernetes sets for a Service called `kvstore-grpc` or the like. Other names are not ours to judge.
    """
    known = {
        f"{ENV_PREFIX}{section}{ENV_DELIMITER}{field}".upper()
        for section, info in Config.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        for field in info.annotation.model_fields
    }
    lookalikes = {name.replace(ENV_DELIMITER, "_") for name in known}
    return sorted(
        name
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX)
        and name.upper() not in known
        and (ENV_DELIMITER in name or (name.upper() in lookalikes and not value.startswith("tcp://")))
    )


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors():
        field = ".".join(str(part) for part in detail["loc"]) or "configuration"
        message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if detail["type"] in ("model_type", "model_attributes_type"):
            message = "a section, with its settings indented below it"
        if detail["type"] == "extra_forbidden":
            lines.append(f"{field} is not a setting; see `kvstore config` for all of them")
        elif isinstance(detail["input"], dict | BaseModel):
            lines.append(f"{field}: {message}")
        else:
            lines.append(f"{field} is {detail['input']!r}; allowed: {message}")
    return lines
