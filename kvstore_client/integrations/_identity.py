"""What a model's files are, by content: equal models agree on every node, and others never do.

Weights are read once per file and machine, by one process while the others wait; the digests are kept in the user's
cache folder, under what the file system says of the file. Snapshots of a model hub are known by their commit, and
nothing is read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from blake3 import blake3

from kvstore.errors import InvalidArgumentError
from kvstore.namespace import STRING_MAX_BYTES

_LOG = logging.getLogger("kvstore.integrations")

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_WAIT_S_MAX = 600.0
"""For a process that reads weights, or has been stopped while it did."""
_POLL_S = 0.1

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_IDENTITY = frozenset(
    # Where it came from, how results are returned, or said elsewhere in the namespace.
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict", "id2label"}
    | {"label2id", "problem_type", "output_hidden_states", "output_attentions"}
    | {"attn_implementation", "_attn_implementation"}
)


def weights_revision(model: str, *, revision: str | None = None) -> str:
    """`commit:…` of a hub's snapshot, else `blake3:…` over the weight files of a folder, or of one file.

    `model` is a path, or a name that is in the hub's local cache. Reads at the disk's speed what was not read before.
    Raises `InvalidArgumentError` for what is neither, and `OSError` where files cannot be read.
    """
    path = Path(model)
    if not path.exists():
        path = _hub_snapshot(model, revision)
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return f"commit:{path.name}"
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _WEIGHTS)
    if not files:
        raise InvalidArgumentError.of("model", model, f"a folder with weights ({', '.join(_WEIGHTS)})")
    return files_digest(files, root=path if path.is_dir() else path.parent)


def model_revision(model: str, *, revision: str | None = None) -> str:
    """As `weights_revision`, and of a folder what its `config.json` says, too: for engines that show no config."""
    found = weights_revision(model, revision=revision)
    config = Path(model) / "config.json"
    if found.startswith("commit:") or not config.is_file():
        return found
    both = canonical_json([found, settings_digest(json.loads(config.read_text()))])
    return f"blake3:{blake3(both.encode()).hexdigest()}"


def adapter_revision(folder: str) -> str:
    """Digest over the content of a LoRA adapter's folder: its weights and its settings, not its name.

    Raises `InvalidArgumentError` for a folder that has no adapter, and `OSError` where it cannot be read.
    """
    root = Path(folder)
    files = [root / name for name in _ADAPTER if (root / name).is_file()]
    if not files:
        raise InvalidArgumentError.of("lora_path", folder, f"a folder with {' or '.join(_ADAPTER[1:])}")
    return files_digest(files, root=root)


def settings_digest(config: Mapping[str, object]) -> str:
    """Of all in a model's config that can shape K and V: what is not known to be harmless counts."""
    rest = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    return blake3(canonical_json(rest).encode()).hexdigest()


def position_settings(settings: Mapping[str, object]) -> str:
    """Settings as a namespace's `rope` tells them: canonical JSON, or its digest where that is too long."""
    text = canonical_json(settings)
    if len(text.encode()) > STRING_MAX_BYTES:
        return canonical_json({"blake3": blake3(text.encode()).hexdigest()})
    return text


def canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def model_label(model: str) -> str:
    """The hub's name, or the last part of a local path: paths differ between machines that may share blocks."""
    return Path(model).resolve().name if Path(model).exists() else model


def files_digest(files: Iterable[Path], *, root: Path) -> str:
    """BLAKE3 over the names below `root` and the content of files; what was read before is not read again."""
    known = _read_known()
    hasher = blake3()
    for file in sorted(files):
        digest = known.get(_stamp(file)) or _read_once(file)
        hasher.update(canonical_json([str(file.relative_to(root)), digest]).encode())
    return f"blake3:{hasher.hexdigest()}"


def _hub_snapshot(model: str, revision: str | None) -> Path:
    allowed = "a path, or a model in the hub's local cache; else name the weights yourself: weights_revision"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        raise InvalidArgumentError.of("model", model, allowed) from None
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:
        found = None  # no hub has such a name
    if not isinstance(found, str):
        raise InvalidArgumentError.of("model", model, allowed)
    return Path(found).parent


def _read_once(file: Path) -> str:
    """The digest of a file, read by one of the processes that want it: an engine has as many as ranks."""
    with _alone():
        known, stamp = _read_known(), _stamp(file)
        if stamp not in known:
            known[stamp] = _content_digest(file)
            _write_known(known)
        return known[stamp]


@contextmanager
def _alone() -> Iterator[None]:
    """While no other process of this user reads; after a while, or where nothing can be locked, all the same."""
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError):
            path = _known_path().with_suffix(".lock")
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.open("w"))
            deadline_s = time.monotonic() + _WAIT_S_MAX
            while not _try_lock(lock.fileno()) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when the file is closed, or its holder dies
    except BlockingIOError:
        return False
    return True


def _content_digest(file: Path) -> str:
    started_s = time.monotonic()
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(file)
    took_s = time.monotonic() - started_s
    if took_s > 1:
        _LOG.info("read %s for its digest in %.1f s; it is kept for the next start", file, took_s)
    return hasher.hexdigest()


def _stamp(file: Path) -> str:
    seen = file.stat()
    return f"{file.resolve()}|{seen.st_size}|{seen.st_mtime_ns}|{seen.st_ctime_ns}|{seen.st_dev}:{seen.st_ino}"


def _known_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore" / "digests.json"


def _read_known() -> dict[str, str]:
    try:
        found = json.loads(_known_path().read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str) and len(value) == 64}


def _write_known(known: Mapping[str, str]) -> None:
    """Whole, or not at all; a cache folder that cannot be written to costs reading again."""
    with suppress(OSError, RuntimeError):
        path = _known_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(known, file)
        Path(file.name).replace(path)
