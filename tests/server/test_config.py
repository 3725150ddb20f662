"""Where settings come from, what they may be, and what a wrong one is answered with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash
from kvstore_server.cli import config as config_command
from kvstore_server.cli import serve
from kvstore_server.config import Config, MemoryConfig, NvmeConfig, load_config, unknown_environment
from kvstore_server.machine import memory_limit_bytes
from kvstore_server.nvme.index import Index, IndexRecord

MIB = 1 << 20
Load = Callable[..., Config]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith("KVSTORE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a configuration from a file's text, environment variables and flags."""

    def load(
        text: str | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, Mapping[str, object]] | None = None,
    ) -> Config:
        file = None
        if text is not None:
            file = tmp_path / "kvstore.yaml"
            file.write_text(text)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        return load_config(file=file, flags=flags or {})

    return load


def test_flags_win_over_environment_over_file_over_defaults(load: Load) -> None:
    text = "memory: {capacity: 64MiB, high_watermark: 0.8, low_watermark: 0.6}\ngrpc: {port: 1}\n"
    environment = {"KVSTORE_MEMORY__CAPACITY": "65MiB", "KVSTORE_MEMORY__HIGH_WATERMARK": "0.7"}
    config = load(text, environment, {"memory": {"capacity": "66MiB"}})
    assert config.memory.capacity == 66 * MIB
    assert config.memory.high_watermark == 0.7
    assert config.memory.low_watermark == 0.6
    assert config.grpc.port == 1
    assert config.metrics.port == 7451


def test_it_needs_no_configuration(load: Load) -> None:
    config = load()
    assert config.memory.capacity == max(memory_limit_bytes() // 4, 16 * MIB)
    assert (config.grpc.host, config.grpc.port) == ("127.0.0.1", 7450)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * MIB),
        ("1GiB", 1 << 30),
        ("1.5GiB", 3 << 29),
        ("64 MiB", 64 * MIB),
        ("64mib", 64 * MIB),
        ("64Mi", 64 * MIB),
        ("64MB", 64_000_000),
        ("64M", 64_000_000),
        ("67108864", 64 * MIB),
        (" 64MiB ", 64 * MIB),
        (67108864, 64 * MIB),
    ],
)
def test_sizes_have_units(load: Load, text: object, size_bytes: int) -> None:
    assert load(flags={"memory": {"capacity": text}}).memory.capacity == size_bytes


@pytest.mark.parametrize(
    "text", ["", "eight", "-5GiB", "8GiBs", "1e9", "NaN", "inf", "8 G B", "GiB", "٨GiB", True, -1, float("nan"), [1]]
)
def test_what_is_no_size_is_refused_with_examples(load: Load, text: object) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        load(flags={"memory": {"capacity": text}})
    assert str(refused.value) == f"memory.capacity is {text!r}; allowed: a size such as 512MiB, 8GiB, 8Gi or 1000000"


def test_unknown_keys_of_the_file_are_named_all_at_once(load: Load) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        load("memory: {capacty: 1GiB}\nredis: {}\n")
    assert "memory.capacty is not a setting" in str(refused.value)
    assert "redis is not a setting" in str(refused.value)


def test_an_unknown_field_of_a_section_in_the_environment_is_named(load: Load) -> None:
    with pytest.raises(InvalidArgumentError, match=r"memory\.capacty is not a setting"):
        load(environment={"KVSTORE_MEMORY__CAPACTY": "1GiB"})


def test_an_unknown_section_in_the_environment_is_listed() -> None:
    environment = {"KVSTORE_MEMROY__CAPACITY": "1GiB", "KVSTORE_MEMORY__CAPACITY": "1GiB", "HOME": "/"}
    assert unknown_environment(environment) == ["KVSTORE_MEMROY__CAPACITY"]


def test_a_setting_spelt_with_single_underscores_is_listed() -> None:
    assert unknown_environment({"KVSTORE_MEMORY_CAPACITY": "8GiB"}) == ["KVSTORE_MEMORY_CAPACITY"]


def test_service_links_of_kubernetes_do_not_disturb(load: Load) -> None:
    """A service named kvstore, or kvstore-grpc, puts such variables into every pod of its Kubernetes namespace."""
    links = {
        "KVSTORE_PORT": "tcp://10.0.0.7:7450",
        "KVSTORE_SERVICE_HOST": "10.0.0.7",
        "KVSTORE_SERVICE_PORT": "7450",
        "KVSTORE_PORT_7450_TCP": "tcp://10.0.0.7:7450",
        "KVSTORE_PORT_7450_TCP_ADDR": "10.0.0.7",
        "KVSTORE_GRPC_PORT": "tcp://10.0.0.7:7450",
        "KVSTORE_GRPC_SERVICE_HOST": "10.0.0.7",
        "KVSTORE_METRICS_PORT": "tcp://10.0.0.7:7451",
        "KVSTORE_ADDRESS": "127.0.0.1:7450",  # the client's
    }
    config = load(environment=links)
    assert (config.grpc.port, config.metrics.port) == (7450, 7451)
    assert unknown_environment(links) == []


def test_a_whole_section_in_one_variable_that_is_no_json_says_what_to_set_instead(load: Load) -> None:
    with pytest.raises(InvalidArgumentError, match=r'field "memory".*KVSTORE_MEMORY__CAPACITY=8GiB'):
        load(environment={"KVSTORE_MEMORY": "8GiB"})


@pytest.mark.parametrize("text", ["", "# nothing\n", "memory:\n", "memory:\n  # capacity: 8GiB\ngrpc: {}\n"])
def test_a_file_that_says_nothing_changes_nothing(load: Load, text: str) -> None:
    assert load(text).model_dump() == load().model_dump()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "holds no sections"),
        ("hello\n", "holds no sections"),
        ("a: [b\n", r"kvstore\.yaml is not YAML.*line 1"),
        ("\0", r"kvstore\.yaml is not YAML"),
        ("memory: 5\n", "memory is 5; allowed: a section"),
        ("memroy:\n", "memroy is not a setting"),
        ("grpc: {port: 70000}\n", "grpc.port is 70000; allowed: less than or equal to 65535"),
        ("1: 2\n", "1 is not a setting"),
        ("!!python/object/apply:os.system ['true']\n", "is not YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(load: Load, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}"):
        load(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(InvalidArgumentError, match=f"--config is '{path}'; allowed: a readable YAML file"):
            load_config(file=path, flags={})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("memory: {capacity: 512KiB}", "capacity 524288 is too small; allowed: at least 1MiB"),
        (
            "memory: {capacity: 900TiB}",
            r"capacity 900\.0TiB and .* are more than this machine or container may use \(.*iB\)",
        ),
        ("memory: {low_watermark: 0.99}", r"low_watermark 0\.99 must not be above high_watermark 0\.95"),
        ("memory: {high_watermark: 1.1}", r"memory\.high_watermark is 1\.1"),
        ("memory: {low_watermark: 0}", r"memory\.low_watermark is 0"),
        ("memory: {high_watermark: .nan}", r"memory\.high_watermark is nan"),
        ("memory: {capacity: 64MiB, slab_size: 1GiB}", "slab_size 1073741824 is out of range.*67108864"),
        ("memory: {slab_size: 0}", "slab_size 0 is out of range"),
        ("grpc: {port: 65536}", r"grpc\.port is 65536"),
        ("grpc: {port: -1}", r"grpc\.port is -1"),
        ("grpc: {host: 0.0.0.0}", r"grpc\.host is '0\.0\.0\.0'; allowed: a loopback address .*no authentication yet"),
        ("grpc: {host: '::'}", r"grpc\.host is '::'"),
        ("grpc: {host: example.com}", r"grpc\.host is 'example\.com'"),
        ("metrics: {host: 192.168.0.1}", r"metrics\.host is '192\.168\.0\.1'; allowed: a loopback"),
        ("grpc: {stream_timeout_s: 0}", r"grpc\.stream_timeout_s is 0"),
        ("grpc: {copy_threads: 0}", r"grpc\.copy_threads is 0"),
        ("memory: {pages: small}", r"memory\.pages is 'small'; allowed: 'auto', 'hugetlb', 'huge-tmpfs' or 'plain'"),
        ("bulk: {host: 0.0.0.0}", r"bulk\.host is '0\.0\.0\.0'; allowed: a loopback"),
        ("bulk: {transfer_workers: 65}", r"bulk\.transfer_workers is 65; allowed: less than or equal to 64, or 'auto'"),
        ("bulk: {port: here}", r"bulk\.port is 'here'; allowed: a whole number, or 'auto'"),
        (
            "limits: {in_flight_bytes_max: 32MiB}",
            "in_flight_bytes_per_client_max 67108864 must not be above in_flight_bytes_max 33554432",
        ),
        ("limits: {in_flight_bytes_per_client_max: 1KiB}", "1024 is too small; allowed: at least 1MiB"),
        (
            "tenants: [{name: Acme, uids: [1]}]",
            r"tenants\.0\.name is 'Acme'; allowed: lower case letters, digits and dashes",
        ),
        ("tenants: [{name: 7, uids: [1]}]", r"tenants\.0\.name is 7; allowed: text"),
        ("tenants: [{uids: [1]}]", r"tenants\.0\.name is missing$"),
        ("tenants: [{name: a}]", r"tenants\.0\.uids is missing$"),
        ("tenants: [{name: a, uids: 5}]", r"tenants\.0\.uids is 5; allowed: a list$"),
        ("tenants: [{name: a, uids: [root, 1.5]}]", r"tenants\.0\.uids\.0 is 'root'; allowed: a whole number\n"),
        ("tenants: {name: a, uids: [1]}", r"tenants: a list$"),
        ("tenants: [acme]", r"tenants\.0 is 'acme'; allowed: a section"),
        ("tenants: [{name: a, uids: []}]", r"tenants\.0\.uids is \[\]; allowed: at least one$"),
        ("tenants: [{name: a, uids: [-1]}]", r"tenants\.0\.uids\.0 is -1"),
        ("tenants: [{name: a, uids: [1], access: all}]", r"tenants\.0\.access is 'all'; allowed: 'read' or 'write'"),
        ("tenants: [{name: a, uids: [1]}, {name: b, uids: [1]}]", "tenants: uid 1 is there twice; allowed: each once"),
        ("tenants: [{name: a, uids: [1]}, {name: a, uids: [2]}]", "tenants: name a is there twice"),
        ("tenants: [{name: a, uids: [1]}]\nnixl: {enabled: true}", "nixl.enabled is true; allowed with tenants: false"),
        (
            "tenants: [{name: a, uids: [1]}]\nmemory: {capacity: 8MiB, slab_size: 8MiB}",
            r"1 tenants and everybody else share 1 slabs; each needs one: raise memory\.capacity",
        ),
        (
            "nvme: {path: /d}",
            r"nvme: capacity is missing; allowed with path /d: a size such as 200GiB, a hard cap on what the whole",
        ),
        ("nvme: {capacity: 1GiB}", "nvme: capacity 1073741824 is set and path is not; allowed: both, or neither"),
        (
            "nvme: {path: /d, capacity: 32MiB}",
            "nvme: capacity 33554432 is too small; allowed: at least 51380224, for 2 segments of 16777216 and 16777216",
        ),
        (
            "nvme: {path: /d, capacity: 1GiB, segment_size: 1GiB}",
            r"capacity 1073741824 is too small; allowed: at least \d+, for 2 segments of 1073741824",
        ),
        (
            "nvme: {path: /d, capacity: 1GiB, segment_size: 1000KiB}",
            "segment_size 1024000 is too small; .*at least 1MiB",
        ),
        ("nvme: {path: /d, capacity: lots}", r"nvme\.capacity is 'lots'; allowed: a size such as"),
        ("nvme: {path: /d, capacity: 1GiB, write_budget_per_day: 1}", "write_budget_per_day 1 is too small; .*1MiB"),
        ("nvme: {sync: always}", r"nvme\.sync is 'always'; allowed: 'data' or 'none'"),
        ("nvme: {admission: some}", r"nvme\.admission is 'some'; allowed: 'worth', 'all', 'second-hit' or 'adaptive'"),
        ("nvme: {compression: gzip}", r"nvme\.compression is 'gzip'; allowed: 'auto', 'none', 'zstd' or 'lz4'"),
        ("nvme: {io_threads: 0}", r"nvme\.io_threads is 0; allowed: greater than or equal to 1"),
        ("nvme: {io_threads: 65}", r"nvme\.io_threads is 65; allowed: less than or equal to 64"),
        ("nvme: {demote_batch: 0}", r"nvme\.demote_batch is 0"),
        ("nvme: {load_timeout_s: 0}", r"nvme\.load_timeout_s is 0; allowed: greater than 0"),
        (
            "memory: {capacity: 64MiB}\nnvme: {demotion_queue: 33MiB}",
            r"nvme\.demotion_queue is 34603008; allowed: at most half of memory\.capacity, 33554432",
        ),
        ("log: {level: loud}", r"log\.level is 'loud'; allowed: .*'debug'"),
        ("shutdown: {grace_s: -1}", r"shutdown\.grace_s is -1"),
    ],
)
def test_values_out_of_range_are_refused_with_what_is_allowed(load: Load, section: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load(section)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_hosts_are_allowed(load: Load, host: str) -> None:
    assert load(f"grpc: {{host: '{host}'}}").grpc.host == host


def test_an_empty_socket_path_means_none(load: Load) -> None:
    assert load(flags={"grpc": {"socket_path": ""}}).grpc.socket_path is None
    assert load(environment={"KVSTORE_GRPC__SOCKET_PATH": ""}).grpc.socket_path is None


def test_the_slab_socket_is_beside_the_other_one_unless_told_otherwise(load: Load) -> None:
    assert load("grpc: {socket_path: /run/x.sock}").slab_socket_path == Path("/run/x.sock.slab")
    assert load("grpc: {socket_path: ''}").slab_socket_path is None
    assert load("slab: {socket_path: ''}").slab_socket_path is None
    assert load("slab: {socket_path: null}").slab_socket_path is None
    assert load("slab: {socket_path: /run/y}\ngrpc: {socket_path: ''}").slab_socket_path == Path("/run/y")
    assert load(environment={"KVSTORE_SLAB__SOCKET_PATH": ""}).slab_socket_path is None


def test_the_data_port_is_a_free_one_when_the_other_port_is(load: Load) -> None:
    assert load().bulk_port == 7454
    assert load("grpc: {port: 0}").bulk_port == 0
    assert load("grpc: {port: 0}\nbulk: {port: 9}").bulk_port == 9
    assert load("bulk: {port: 0}").bulk_port == 0
    assert load(flags={"bulk": {"port": "7500"}}).bulk_port == 7500


def test_tenants_come_from_the_file_or_as_json_from_the_environment(load: Load) -> None:
    from_file = load("tenants:\n- {name: acme, uids: [1000, 1001]}\n- {name: audit, uids: [1002], access: read}\n")
    assert [(one.name, one.uids, one.access) for one in from_file.tenants] == [
        ("acme", (1000, 1001), "write"),
        ("audit", (1002,), "read"),
    ]
    in_json = '[{"name": "acme", "uids": [1000, 1001]}, {"name": "audit", "uids": [1002], "access": "read"}]'
    assert load(environment={"KVSTORE_TENANTS": in_json}).tenants == from_file.tenants
    assert unknown_environment({"KVSTORE_TENANTS": in_json}) == []


def test_tenants_that_are_no_json_are_refused_with_what_they_must_be(load: Load) -> None:
    with pytest.raises(InvalidArgumentError, match=r'field "tenants".*tenants as JSON'):
        load(environment={"KVSTORE_TENANTS": "acme"})


def test_default_slabs_are_made_of_whole_huge_pages(load: Load) -> None:
    for capacity in ("64MiB", "100MiB", "1000MiB"):
        assert load(flags={"memory": {"capacity": capacity}}).memory.slab_bytes % (2 * MIB) == 0


@pytest.mark.parametrize("capacity_bytes", [1 * MIB, 3 * MIB + 5, 64 * MIB, 1 << 30])
def test_slabs_are_whole_pages_and_fit(capacity_bytes: int) -> None:
    slab_bytes = MemoryConfig(capacity=capacity_bytes).slab_bytes
    assert slab_bytes % 4096 == 0
    assert 4096 <= slab_bytes <= capacity_bytes


# --- the NVMe tier


def test_without_a_path_there_is_no_nvme_tier(load: Load) -> None:
    assert not load().nvme.is_enabled
    assert load(flags={"nvme": {"path": "/d", "capacity": "1GiB"}}).nvme.is_enabled


def test_an_empty_path_turns_the_nvme_tier_of_a_file_off(load: Load) -> None:
    in_file = "nvme: {path: /d, capacity: 1GiB}"
    assert not load(in_file, flags={"nvme": {"path": ""}}).nvme.is_enabled
    assert not load(in_file, environment={"KVSTORE_NVME__PATH": ""}).nvme.is_enabled


@pytest.mark.parametrize(
    "capacity_bytes", [49 * MIB, 50 * MIB + 4095, 300 * MIB, 1 << 30, 8 << 30, 10 << 30, 10**12, 1 << 44]
)
@pytest.mark.parametrize("segment_size", [None, MIB, 5_000_000])
def test_segments_and_a_full_index_are_within_the_capacity_and_use_most_of_it(
    capacity_bytes: int, segment_size: int | None
) -> None:
    nvme = NvmeConfig(path=Path("/d"), capacity=capacity_bytes, segment_size=segment_size)
    most_bytes = nvme.segment_count * nvme.segment_bytes + nvme.index_map_bytes
    assert nvme.segment_bytes % 4096 == nvme.index_map_bytes % 4096 == 0
    assert nvme.segment_count >= 2
    # A MiB is for the folders and small files beside them; what is left over is less than a segment.
    assert 0 <= capacity_bytes - MIB - most_bytes < nvme.segment_bytes


@pytest.mark.parametrize(
    ("capacity_bytes", "segment_bytes"),
    [(49 * MIB, 16 * MIB), (1 << 30, 125 * MIB), (16 << 30, 1 << 30), (1 << 44, 1 << 30)],
)
def test_segments_are_an_eighth_of_the_capacity_within_bounds(capacity_bytes: int, segment_bytes: int) -> None:
    assert NvmeConfig(path=Path("/d"), capacity=capacity_bytes).segment_bytes == segment_bytes


def test_the_index_has_room_for_a_record_for_each_block_of_256_kib(tmp_path: Path) -> None:
    capacity_bytes = 4 << 30
    nvme = NvmeConfig(path=tmp_path, capacity=capacity_bytes)
    index = Index(tmp_path / "index", map_bytes=nvme.index_map_bytes)
    for turn in range(2):  # the second time over, as blocks that come and go do
        for start in range(0, capacity_bytes // (256 << 10), 1024):
            index.apply([record(number, sequence=turn) for number in range(start, start + 1024)], ())
    assert index.count == capacity_bytes // (256 << 10)
    index.close()


def record(number: int, *, sequence: int) -> IndexRecord:
    block_hash = BlockHash(hashlib.sha256(number.to_bytes(8)).digest())
    return IndexRecord(bytes(32), block_hash, number << 18, sequence, 256 << 10, block_hash)


def test_a_part_of_the_file_system_stays_free_for_others() -> None:
    nvme = NvmeConfig(path=Path("/d"), capacity=1 << 30)
    assert nvme.free_reserve_bytes(filesystem_bytes=100 << 30) == 5 << 30
    assert nvme.free_reserve_bytes(filesystem_bytes=10 << 40) == 10 << 30
    told = NvmeConfig(path=Path("/d"), capacity=1 << 30, free_reserve=0)
    assert told.free_reserve_bytes(filesystem_bytes=100 << 30) == 0


@pytest.mark.parametrize(
    ("capacity", "queue_bytes"), [("64MiB", 32 * MIB), ("512MiB", 64 * MIB), ("1GiB", 64 * MIB), ("1.5GiB", 96 * MIB)]
)
def test_blocks_on_their_way_to_the_disk_take_a_bounded_part_of_the_memory(
    load: Load, capacity: str, queue_bytes: int
) -> None:
    flags = {"memory": {"capacity": capacity}}
    assert load(flags=flags).demotion_queue_bytes == queue_bytes
    assert load(flags=flags | {"nvme": {"demotion_queue": "1MiB"}}).demotion_queue_bytes == MIB


def test_prefetches_leave_most_of_the_memory_to_what_is_in_use(load: Load) -> None:
    assert load(flags={"memory": {"capacity": "64MiB"}}).prefetch_in_flight_bytes == 16 * MIB
    assert load(flags={"memory": {"capacity": "1.5GiB"}}).prefetch_in_flight_bytes == 256 * MIB
    assert load("memory: {capacity: 1GiB}\nnvme: {prefetch_in_flight: 8MiB}").prefetch_in_flight_bytes == 8 * MIB


# --- `kvstore config`


def test_the_printed_configuration_is_a_valid_one_that_means_the_same(load: Load) -> None:
    arguments = ["--memory-capacity", "1.5GiB", "--grpc-port", "0", "--log-format", "json"]
    arguments += ["--nvme-path", "/d", "--nvme-capacity", "1GiB"]
    printed = CliRunner().invoke(config_command, arguments)
    assert printed.exit_code == 0, printed.output
    again = load(printed.output)
    assert again.memory.capacity == 3 << 29
    assert (again.nvme.path, again.nvme.capacity) == (Path("/d"), 1 << 30)
    assert yaml.safe_load(printed.output) == again.model_dump(mode="json")


def test_the_printed_configuration_without_a_socket_round_trips(load: Load) -> None:
    printed = CliRunner().invoke(config_command, ["--socket-path", ""])
    assert load(printed.output).grpc.socket_path is None


def test_the_configuration_can_be_had_as_json() -> None:
    arguments = ["--memory-capacity", "64MiB"]
    as_json = CliRunner().invoke(config_command, [*arguments, "--json"])
    as_yaml = CliRunner().invoke(config_command, arguments)
    assert json.loads(as_json.output) == yaml.safe_load(as_yaml.output)
    assert json.loads(as_json.output)["memory"]["capacity"] == 64 * MIB


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("grpc: {port: 1234}\n")
    printed = CliRunner().invoke(config_command, ["--json"], env={"KVSTORE_CONFIG": str(file)})
    assert json.loads(printed.output)["grpc"]["port"] == 1234


@pytest.mark.parametrize("command", [config_command, serve])
def test_a_wrong_setting_is_a_usage_error_without_a_traceback(command: object) -> None:
    result = CliRunner().invoke(command, ["--memory-capacity", "lots"])  # type: ignore[arg-type]
    assert result.exit_code == 2
    assert "memory.capacity is 'lots'; allowed: a size such as 512MiB" in result.output
    assert "Traceback" not in result.output


def test_a_host_that_others_can_reach_is_refused_by_serve(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("grpc: {host: 0.0.0.0}\n")
    result = CliRunner().invoke(serve, ["--config", str(file)])
    assert result.exit_code == 2
    assert "grpc.host is '0.0.0.0'; allowed: a loopback address" in result.output


# --- this machine's memory

HUGE = 9223372036854771712  # what cgroup v1 says for "no limit"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit_bytes"),
    [
        pytest.param({}, None, id="no cgroups"),
        pytest.param({"sys/fs/cgroup/memory.max": f"{64 * MIB}\n"}, 64 * MIB, id="v2 root, as in a container"),
        pytest.param({"sys/fs/cgroup/memory.max": "max\n"}, None, id="v2 without a limit"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/kubepods/pod1/app\n",
                "sys/fs/cgroup/kubepods/pod1/app/memory.max": f"{70 * MIB}\n",
                "sys/fs/cgroup/kubepods/pod1/memory.max": f"{60 * MIB}\n",
                "sys/fs/cgroup/kubepods/memory.max": "max\n",
            },
            60 * MIB,
            id="v2 nested: the tightest ancestor counts",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": f"{50 * MIB}\n",
            },
            50 * MIB,
            id="v2 nested: own is max, parent's is not",
        ),
        pytest.param(
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{80 * MIB}\n"}, 80 * MIB, id="v1 root, as in a container"
        ),
        pytest.param({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{HUGE}\n"}, None, id="v1 without a limit"),
        pytest.param(
            {
                "proc/self/cgroup": "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{40 * MIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{HUGE}\n",
            },
            40 * MIB,
            id="v1 nested",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/gone\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{90 * MIB}\n",
            },
            90 * MIB,
            id="v1: own group is not mounted here",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/other/memory\n",
                "sys/fs/cgroup/mine/memory.max": f"{1 * MIB}\n",
            },
            None,
            id="another group's limit does not count",
        ),
        pytest.param({"sys/fs/cgroup/memory.max": "garbage\n"}, None, id="nonsense"),
    ],
)
def test_the_limit_is_the_tightest_of_machine_and_cgroup(
    tmp_path: Path, files: Mapping[str, str], limit_bytes: int | None
) -> None:
    physical_bytes = memory_limit_bytes(tmp_path / "nowhere")
    assert memory_limit_bytes(tree(tmp_path, files)) == (physical_bytes if limit_bytes is None else limit_bytes)


def test_a_capacity_above_the_limit_of_the_container_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """faults.md, operations: "cgroup limit ignored"."""
    monkeypatch.setattr("kvstore_server.config.memory_limit_bytes", lambda: 128 * MIB)
    with pytest.raises(InvalidArgumentError, match=r"capacity 33\.0MiB and 96\.0MiB .* may use \(128\.0MiB\)"):
        load_config(file=None, flags={"memory": {"capacity": "33MiB"}})  # with the daemon itself, one too many
    assert load_config(file=None, flags={}).memory.capacity == 32 * MIB
