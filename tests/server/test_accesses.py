from __future__ import annotations

from kvstore.keys import BlockHash
from kvstore.messages import ACCESS_BLOCKS_MAX, ACCESS_NUMBER_BYTES, AccessKind
from kvstore_server.core.accesses import WATCH_S, AccessLog
from kvstore_server.core.tenants import ScopedId

SPACE, OTHER = ScopedId(b"one"), ScopedId(b"other")


def log() -> AccessLog:
    return AccessLog(secret=bytes(32))


def hashes(count: int, *, first: int = 0) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "little")) for number in range(first, first + count)]


def note(accesses: AccessLog, count: int, *, at_s: float = 0.0, space: ScopedId = SPACE) -> None:
    accesses.note(space, AccessKind.LOOKUP, hashes(count), matched_count=0, hint=None, uptime_s=at_s)


def test_nothing_is_remembered_of_what_nobody_watches() -> None:
    accesses = log()
    note(accesses, 3)
    assert not accesses.is_watched(SPACE)
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0)
    assert (start.accesses, start.dropped_count) == ((), 0)
    note(accesses, 3, space=OTHER)
    assert accesses.take(SPACE, after_number=start.last_number, uptime_s=0.0).accesses == ()


def test_each_reader_gets_what_came_since_its_last_answer() -> None:
    accesses = log()
    early = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    note(accesses, 1)
    late = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    note(accesses, 2)
    for after_number, counts in ((early, [1, 2]), (late, [2])):
        taken = accesses.take(SPACE, after_number=after_number, uptime_s=0.0)
        assert [len(one.block_numbers) // ACCESS_NUMBER_BYTES for one in taken.accesses] == counts
        assert accesses.take(SPACE, after_number=taken.last_number, uptime_s=0.0).accesses == ()


def test_equal_blocks_have_equal_numbers_that_depend_on_the_secret() -> None:
    numbers = []
    for secret in (bytes(32), bytes(32), b"x" * 32):
        accesses = AccessLog(secret=secret)
        start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
        note(accesses, 2)
        numbers.append(accesses.take(SPACE, after_number=start, uptime_s=0.0).accesses[0].block_numbers)
    assert numbers[0] == numbers[1] != numbers[2]
    assert hashes(2)[0][:ACCESS_NUMBER_BYTES] not in numbers[0]


def test_what_a_slow_reader_does_not_take_is_dropped_and_counted() -> None:
    accesses = log()
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    for _ in range(10):
        note(accesses, ACCESS_BLOCKS_MAX)
    taken = accesses.take(SPACE, after_number=start, uptime_s=0.0)
    kept = 0
    while taken.accesses:
        assert len(taken.accesses) == 1, "an answer has no more than its most blocks"
        kept += 1
        assert taken.dropped_count == (6 if kept == 1 else 0)
        taken = accesses.take(SPACE, after_number=taken.last_number, uptime_s=0.0)
    assert kept == 4


def test_a_watch_ends_when_nobody_takes_anything_and_the_reader_is_told() -> None:
    accesses = log()
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    note(accesses, 1, at_s=WATCH_S + 1)
    assert not accesses.is_watched(SPACE)
    again = accesses.take(SPACE, after_number=start, uptime_s=WATCH_S + 2)
    assert (again.accesses, again.dropped_count) == ((), 1)


def test_so_many_namespaces_are_watched_and_the_one_longest_untaken_gives_way() -> None:
    accesses = log()
    spaces = [ScopedId(bytes([number])) for number in range(17)]
    for at_s, space in enumerate(spaces):
        accesses.take(space, after_number=0, uptime_s=float(at_s))
    assert [accesses.is_watched(space) for space in spaces] == [False] + [True] * 16
