from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore_server.nvme.ownership import LOCK_NAME, FolderOwnedError, Ownership, read_owner

_OWN = """
import sys
from pathlib import Path
from kvstore_server.nvme.ownership import Ownership
ownership = Ownership.take(Path(sys.argv[1]), epoch_hex="0e0e")
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def _other_owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _OWN, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_folder_that_another_process_owns_is_refused_by_name(tmp_path: Path) -> None:
    with _other_owner(tmp_path) as other:
        with pytest.raises(FolderOwnedError) as refused:
            Ownership.take(tmp_path, epoch_hex="0f0f")
        for part in (str(tmp_path), f"process {other.pid} ", "epoch 0e0e", "stop that daemon"):
            assert part in str(refused.value)
        owner = read_owner(tmp_path)
        assert owner is not None
        assert (owner.pid, owner.epoch_hex, owner.is_running) == (other.pid, "0e0e", True)


def test_the_lock_of_a_killed_process_is_free_and_its_record_replaced(tmp_path: Path) -> None:
    with _other_owner(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
    owner = read_owner(tmp_path)
    assert owner is not None
    assert (owner.pid, owner.is_running) == (other.pid, False)
    with Ownership.take(tmp_path, epoch_hex="0f"):
        owner = read_owner(tmp_path)
        assert owner is not None
        assert (owner.pid, owner.epoch_hex, owner.is_running) == (os.getpid(), "0f", True)


def test_a_second_taker_in_the_same_process_is_refused_until_the_first_releases(tmp_path: Path) -> None:
    first = Ownership.take(tmp_path, epoch_hex="1")
    with pytest.raises(FolderOwnedError):
        Ownership.take(tmp_path, epoch_hex="2")
    first.release()
    first.release()
    Ownership.take(tmp_path, epoch_hex="3").release()


def test_a_child_process_does_not_keep_the_folder(tmp_path: Path) -> None:
    first = Ownership.take(tmp_path, epoch_hex="1")
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False
    ) as child:
        first.release()
        try:
            Ownership.take(tmp_path, epoch_hex="2").release()
        finally:
            child.kill()


def test_refusals_leave_no_descriptor_behind(tmp_path: Path) -> None:
    with Ownership.take(tmp_path, epoch_hex="1"):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(FolderOwnedError):
            Ownership.take(tmp_path, epoch_hex="2")
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_longer_record_of_an_earlier_owner_leaves_nothing_behind_a_shorter_one(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("x" * 3000)
    with Ownership.take(tmp_path, epoch_hex="1"):
        owner = read_owner(tmp_path)
        assert owner is not None
        assert owner.epoch_hex == "1"


@pytest.mark.parametrize("record", [b"", b"\xff\xfe", b"[]", b'{"pid": null}', b'{"pid": 1, "epoch": "1"}'])
def test_a_record_that_cannot_be_read_is_nobodys(tmp_path: Path, record: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(record)
    assert read_owner(tmp_path) is None


def test_a_folder_whose_lock_file_was_deleted_still_has_one_owner(tmp_path: Path) -> None:
    with Ownership.take(tmp_path, epoch_hex="1"):
        (tmp_path / LOCK_NAME).unlink()
        with pytest.raises(FolderOwnedError, match=str(tmp_path)):
            Ownership.take(tmp_path, epoch_hex="2")
    Ownership.take(tmp_path, epoch_hex="3").release()


def test_a_folder_that_nobody_ever_owned_has_no_owner(tmp_path: Path) -> None:
    assert read_owner(tmp_path) is None


def test_a_missing_folder_is_named_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nvme\.path is '.*nowhere'; allowed: an existing folder"):
        Ownership.take(tmp_path / "nowhere", epoch_hex="1")


def test_a_lock_that_cannot_be_opened_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).symlink_to("/dev/null")
    with pytest.raises(UnavailableError, match=r"cannot be owned: .*owner\.lock: .*not a link"):
        Ownership.take(tmp_path, epoch_hex="1")
    (tmp_path / LOCK_NAME).unlink()
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(UnavailableError, match="must be a file"):
        Ownership.take(tmp_path, epoch_hex="1")


def test_a_folder_that_may_not_be_written_to_says_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    # As root, one becomes nobody once all modules are there; the folders above must let nobody through.
    become_nobody = "if not os.geteuid(): os.setresuid(65534, 65534, 65534)\n"
    code = _OWN.replace("ownership = ", f"import encodings.idna, os\n{become_nobody}ownership = ")
    if not os.geteuid():
        for folder in tmp_path.parents:
            if folder.owner() == "root" and folder.stat().st_mode & 0o077 == 0:
                folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Permission denied; give the folder to the user that the daemon runs as" in done.stderr
