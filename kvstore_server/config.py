"""The daemon's configuration: data, read once.

Sources, last wins: defaults, one YAML file, `KVSTORE_` environment variables (`KVSTORE_MEMORY__CAPACITY=8GiB`),
command-line flags. docs/configuration.md is generated from this file.
"""

from __future__ import annotations

import os
import re
from collections import Counter
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
from kvstore.slab import SLAB_SOCKET_SUFFIX
from kvstore_client.address import default_socket_path
from kvstore_client.hosting import LOOPBACK_ALLOWED, is_loopback
from kvstore_client.sizes import SIZE_ALLOWED, parse_size
from kvstore_server.machine import memory_limit_bytes

ENV_PREFIX = "KVSTORE_"
ENV_DELIMITER = "__"
BULK_PORT = 7454


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


def default_slab_bytes(capacity_bytes: int) -> int:
    """Of a slab, for a capacity of the memory tier: whole huge pages, and at least one slab fits."""
    wanted = min(max(capacity_bytes // 32, 4 << 20), 256 << 20) >> 21 << 21
    return max(min(wanted, capacity_bytes) // 4096 * 4096, 4096)


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
    policy: Literal["phix", "lru", "arc", "s3fifo", "window-lfu"] = "phix"
    """Which blocks leave first. `phix` learns which are used again, and when, and takes hints of clients into
    account; the others learn nothing: `lru`, `arc`, `s3fifo`, `window-lfu`. `kvstore simulate` compares them on traces
    of your own."""
    pages: Literal["auto", "hugetlb", "huge-tmpfs", "plain"] = "auto"
    """Memory of the arena: huge pages that were set aside (`vm.nr_hugepages`), a tmpfs mounted with `huge=`, or
    plain memory; `auto` takes the best there is. Copies run up to five times slower on 4 KiB pages."""
    huge_mount: Path | None = None
    """A folder for `huge-tmpfs`, on a tmpfs mounted with `huge=always`, `within_size` or `advise`; default any such."""
    lock: bool = False
    """Keep the arena from being swapped out; needs RLIMIT_MEMLOCK of the capacity, or CAP_IPC_LOCK."""

    @property
    def slab_bytes(self) -> int:
        """Rounded to whole pages, by default to huge ones, and small enough that at least one slab fits."""
        if self.slab_size is None:
            return default_slab_bytes(int(self.capacity))
        return max(min(int(self.slab_size), int(self.capacity)) // 4096 * 4096, 4096)

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


class NvmeConfig(_Section):
    """The NVMe tier: what memory has no room for any more, on a disk of this node, warm after a restart.

    docs/nvme.md has the arithmetic and what to do when something is wrong.
    """

    path: Path | None = None
    """Folder of the tier, there already, for one daemon alone. None, or an empty string: there is no such tier."""
    capacity: Size | None = None
    """Bytes of the whole folder on disk, index included: a hard cap. Required with `nvme.path`."""
    segment_size: Size | None = None
    """Bytes of a segment, the file in which space moves between namespaces; rounded down to whole pages of 4 KiB.
    A block that does not fit into one stays off the disk. Default that of the segments that are there, else an eighth
    of the capacity, 16 MiB to 1 GiB; if set, segments of another size are deleted."""
    free_reserve: Size | None = None
    """Bytes of the file system that stay free for others; default 5 % of it, at most 10 GiB."""
    sync: Literal["data", "none"] = "data"
    """`data`: a block is on the device before the index names it, so it survives the loss of power. `none`: it
    survives the end of the daemon only; what a power cut tore is found out by its checksum and dropped."""
    policy: Literal["phix", "lru", "arc", "s3fifo", "window-lfu"] = "phix"
    """Which blocks leave first; as `memory.policy`."""
    admission: Literal["worth", "all", "second-hit", "adaptive"] = "worth"
    """Which blocks may enter. `worth`: all while there is room, then those that are worth more than what would have to
    leave, as far as `policy` can tell; `all`; `second-hit`: those that were used twice; `adaptive`: the one or the
    other by what has paid so far. Whole chains enter, or none of their blocks."""
    write_budget_per_day: Size | None = None
    """Most bytes written in a day, to spare the device; at least 1MiB. Default no limit."""
    io_threads: int = Field(default=8, ge=1, le=64)
    """Reads and writes under way at once; a single one reaches a part of what the device can do."""
    demote_batch: int = Field(default=16, ge=1, le=1024)
    """Most blocks that are written together and become findable in one transaction of the index."""
    demotion_queue: Size | None = None
    """Bytes of memory that blocks on their way to the disk may take; victims beyond are dropped. At most half of
    `memory.capacity`; default a 16th of it, at least 64 MiB if that is not more than half."""
    prefetch_in_flight: Size = ByteSize(256 << 20)
    """Bytes that prefetches may have under way at once; a quarter of `memory.capacity` if that is less."""
    compression: Literal["auto", "none", "zstd", "lz4"] = "auto"
    """Of blocks on disk. `auto`: per namespace what was measured to save more than it costs, which may be nothing."""
    load_timeout_s: float = Field(default=1.0, gt=0, le=3_600)
    """Longest wait for a read of the disk; a block that comes later is a miss. Well below the 2 s that clients give a
    call, or a disk that stalls would cost them what is in memory, too."""

    @property
    def is_enabled(self) -> bool:
        return self.path is not None

    @property
    def index_map_bytes(self) -> int:
        """Most that the index may take on disk; when it is full, the tier takes no more blocks.

        A record takes up to 1 KiB, of pages that are not full and of those that a transaction replaces: a 256th of the
        capacity has one for each block of 256 KiB. For slots of 4 KiB, the least, it would be a quarter of the disk,
        for nothing.
        """
        return _whole_pages(max(self._capacity_bytes // 256, _INDEX_BYTES_MIN))

    @property
    def segment_bytes(self) -> int:
        """Large, as files that are fresh and small are slow at first; enough of them that several namespaces fit."""
        if self.segment_size is not None:
            return _whole_pages(int(self.segment_size))
        eighth = self._room_bytes // _SEGMENT_COUNT_WANTED >> 20 << 20
        return min(max(eighth, _SEGMENT_BYTES_MIN_DEFAULT), _SEGMENT_BYTES_MAX_DEFAULT)

    @property
    def segment_count(self) -> int:
        """Most segments: with the index full and all of them made, the folder is within its capacity."""
        return self._room_bytes // self.segment_bytes

    def free_reserve_bytes(self, *, filesystem_bytes: int) -> int:
        """What must stay free on a file system of so many bytes."""
        if self.free_reserve is not None:
            return int(self.free_reserve)
        return min(filesystem_bytes // 20, 10 << 30)

    @property
    def _capacity_bytes(self) -> int:
        assert self.capacity is not None, "there is no NVMe tier: nvme.path is not set"
        return int(self.capacity)

    @property
    def _room_bytes(self) -> int:
        return max(self._capacity_bytes - self.index_map_bytes - _NVME_OTHER_BYTES, 0)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_none(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("path") == "":
            return {**data, "path": None}
        return data

    @model_validator(mode="after")
    def _check(self) -> NvmeConfig:
        if self.capacity is None:
            if self.path is not None:
                raise ValueError(
                    f"capacity is missing; allowed with path {self.path}: a size such as 200GiB, "
                    "a hard cap on what the whole folder takes on disk"
                )
            return self
        # A path that was set to nothing turns the tier off; one that was forgotten would do so unnoticed.
        if self.path is None and "path" not in self.model_fields_set:
            raise ValueError(f"capacity {int(self.capacity)} is set and path is not; allowed: both, or neither")
        if self.segment_size is not None and self.segment_size < _SEGMENT_BYTES_MIN:
            raise ValueError(f"segment_size {int(self.segment_size)} is too small; allowed: at least 1MiB")
        if self.segment_count < _SEGMENT_COUNT_MIN:
            needed_bytes = _SEGMENT_COUNT_MIN * self.segment_bytes + self.index_map_bytes + _NVME_OTHER_BYTES
            raise ValueError(
                f"capacity {int(self.capacity)} is too small; allowed: at least {needed_bytes}, for "
                f"{_SEGMENT_COUNT_MIN} segments of {self.segment_bytes} and {self.index_map_bytes} of index"
            )
        if self.write_budget_per_day is not None and self.write_budget_per_day < 1 << 20:
            raise ValueError(
                f"write_budget_per_day {int(self.write_budget_per_day)} is too small; allowed: at least 1MiB"
            )
        return self


_INDEX_BYTES_MIN = 16 << 20
_NVME_OTHER_BYTES = 1 << 20
"""Of the folder beside segments and index: folders, the lock files, and what the file system keeps per file."""
_SEGMENT_COUNT_WANTED = 8
_SEGMENT_COUNT_MIN = 2
_SEGMENT_BYTES_MIN = 1 << 20
_SEGMENT_BYTES_MIN_DEFAULT = 16 << 20
_SEGMENT_BYTES_MAX_DEFAULT = 1 << 30


def _whole_pages(size_bytes: int) -> int:
    return size_bytes // 4096 * 4096


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


class SlabConfig(_Section):
    """Where clients of this node get the arena itself, and read and write blocks without a copy in between."""

    socket_path: Path | Literal["auto"] | None = "auto"
    """Unix socket; `auto` is beside the one of gRPC, with `.slab` at its end. An empty string means none."""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_none(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("socket_path") == "":
            return {**data, "socket_path": None}
        return data


class BulkConfig(_Section):
    """The data port, for clients on other nodes: as fast as TCP."""

    enabled: bool = True
    """Without it they take gRPC streams."""
    host: LoopbackHost = "127.0.0.1"
    """Loopback only."""
    port: Port | Literal["auto"] = "auto"
    """TCP port, which clients are told; 0 takes a free one; `auto` is 7454, or a free one when `grpc.port` is 0."""
    transfer_workers: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = "auto"
    """Processes that move blocks beside the daemon itself; `auto` is none below six cores."""


class NixlConfig(_Section):
    """NIXL, for fabrics with RDMA."""

    enabled: bool = False
    """Who knows the daemon can then read and write all of its arena: for trusted networks, and never with tenants."""


class LimitsConfig(_Section):
    """What may be on its way at once, over streams and the data port together. Loads wait, stores are refused."""

    in_flight_bytes_max: Size = ByteSize(256 << 20)
    """Of all clients; at least 1MiB."""
    in_flight_bytes_per_client_max: Size = ByteSize(64 << 20)
    """Of one client, so that one that has stopped leaves the others room: two batches of 32 MiB."""

    @model_validator(mode="after")
    def _check(self) -> LimitsConfig:
        if self.in_flight_bytes_per_client_max < 1 << 20:
            raise ValueError(
                f"in_flight_bytes_per_client_max {int(self.in_flight_bytes_per_client_max)} is too small; "
                "allowed: at least 1MiB"
            )
        if self.in_flight_bytes_per_client_max > self.in_flight_bytes_max:
            raise ValueError(
                f"in_flight_bytes_per_client_max {int(self.in_flight_bytes_per_client_max)} must not be above "
                f"in_flight_bytes_max {int(self.in_flight_bytes_max)}"
            )
        return self


_TENANT_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _check_tenant_name(name: str) -> str:
    if not _TENANT_NAME.fullmatch(name):
        raise ValueError("lower case letters, digits and dashes in between, 1 to 63 of them")
    return name


class TenantConfig(_Section):
    """Local users that share blocks with each other and with nobody else."""

    name: Annotated[str, AfterValidator(_check_tenant_name)]
    """Lower case letters, digits and dashes, at most 63."""
    uids: tuple[Annotated[int, Field(ge=0, le=(1 << 32) - 2)], ...] = Field(min_length=1)
    """User ids of the processes, as this machine knows them."""
    access: Literal["read", "write"] = "write"
    """Whether they may store blocks over the slab socket."""


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
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)
    """The NVMe tier, on a disk of this node: off until it has a path. See [nvme](nvme.md)."""
    grpc: GrpcConfig = Field(default_factory=GrpcConfig)
    """Where the store service listens."""
    slab: SlabConfig = Field(default_factory=SlabConfig)
    """Where clients of this node get the arena itself, and read and write blocks without a copy in between."""
    bulk: BulkConfig = Field(default_factory=BulkConfig)
    """The data port, for clients on other nodes: as fast as TCP."""
    nixl: NixlConfig = Field(default_factory=NixlConfig)
    """NIXL, for fabrics with RDMA."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """What may be on its way at once, over streams and the data port together. Loads wait, stores are refused."""
    tenants: tuple[TenantConfig, ...] = ()
    """Who may open the slab socket, and who shares blocks with whom; none: only the daemon's own user, all together.
    What comes over gRPC and the data port, where nobody can be told apart yet, is a tenant of its own."""
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Where Prometheus scrapes."""
    log: LogConfig = Field(default_factory=LogConfig)
    """What is logged, on stderr."""
    shutdown: ShutdownConfig = Field(default_factory=ShutdownConfig)
    """What SIGTERM does."""

    @property
    def slab_socket_path(self) -> Path | None:
        """Where the slab socket is, if there is to be one."""
        if self.slab.socket_path != "auto":
            return self.slab.socket_path
        path = self.grpc.socket_path
        return None if path is None else path.with_name(path.name + SLAB_SOCKET_SUFFIX)

    @property
    def bulk_port(self) -> int:
        if self.bulk.port != "auto":
            return self.bulk.port
        return BULK_PORT if self.grpc.port else 0

    @property
    def demotion_queue_bytes(self) -> int:
        """Memory that blocks on their way to the disk may take."""
        if self.nvme.demotion_queue is not None:
            return int(self.nvme.demotion_queue)
        capacity_bytes = int(self.memory.capacity)
        return min(max(capacity_bytes // 16, 64 << 20), capacity_bytes // 2)

    @property
    def prefetch_in_flight_bytes(self) -> int:
        """What prefetches may have under way at once, so that most of the memory is left to what is in use."""
        return min(int(self.nvme.prefetch_in_flight), int(self.memory.capacity) // 4)

    @model_validator(mode="after")
    def _check_demotion_queue(self) -> Config:
        half_bytes = int(self.memory.capacity) // 2
        if self.nvme.demotion_queue is not None and self.nvme.demotion_queue > half_bytes:
            raise ValueError(
                f"nvme.demotion_queue is {int(self.nvme.demotion_queue)}; "
                f"allowed: at most half of memory.capacity, {half_bytes}"
            )
        return self

    @model_validator(mode="after")
    def _check_tenants(self) -> Config:
        names = [tenant.name for tenant in self.tenants]
        uids = [uid for tenant in self.tenants for uid in tenant.uids]
        for field, values in (("name", names), ("uid", uids)):
            repeated = sorted(str(value) for value, count in Counter(values).items() if count > 1)
            if repeated:
                raise ValueError(f"tenants: {field} {repeated[0]} is there twice; allowed: each once")
        if self.tenants and self.nixl.enabled:
            raise ValueError("nixl.enabled is true; allowed with tenants: false, as it opens all arenas to everybody")
        slab_count = self.memory.capacity // self.memory.slab_bytes
        if self.tenants and slab_count <= len(self.tenants):
            raise ValueError(
                f"{len(self.tenants)} tenants and everybody else share {slab_count} slabs; each needs one: "
                "raise memory.capacity or lower memory.slab_size"
            )
        return self


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
        raise InvalidArgumentError(
            f"{error}; set single fields, such as KVSTORE_MEMORY__CAPACITY=8GiB, and tenants as JSON"
        ) from error
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


_KIND_OF_VALUE = re.compile(r"constrained-int$|literal\[")
"""What pydantic adds to the name of a field of several kinds."""

_ALLOWED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "text, in quotes if it looks like a number",
    "tuple_type": "a list",
    "too_short": "at least one",
    "model_type": "a section, with its settings indented below it",
    "model_attributes_type": "a section, with its settings indented below it",
}
"""By the kind of error, where pydantic's own words would not help who writes a file."""


def _explain(error: ValidationError) -> list[str]:
    lines = []
    allowed_in: dict[tuple[str, str], list[str]] = {}  # one message for each kind of value that a field may have
    for detail in error.errors():
        parts = [str(part) for part in detail["loc"] if not _KIND_OF_VALUE.match(str(part))]
        field = ".".join(parts) or "configuration"
        message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        message = _ALLOWED.get(detail["type"], message)
        if detail["type"] == "missing":
            lines.append(f"{field} is missing")
        elif detail["type"] == "extra_forbidden":
            lines.append(f"{field} is not a setting; see `kvstore config` for all of them")
        elif isinstance(detail["input"], dict | BaseModel):
            lines.append(f"{field}: {message}")
        else:
            allowed_in.setdefault((field, repr(detail["input"])), []).append(message)
    return lines + [f"{field} is {value}; allowed: {', or '.join(all_)}" for (field, value), all_ in allowed_in.items()]
