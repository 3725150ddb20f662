from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.envelope import ENVELOPE_BYTES, Codec, Envelope, PayloadChecksum, checksum, verify_block
from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash, NamespaceId
from tests.contract.strategies import hashes, namespace_ids, u32, u64

NAMESPACE = NamespaceId(bytes(range(32)))
BLOCK = BlockHash(bytes(range(32, 64)))
PAYLOAD = bytes(range(256)) * 16


def enveloped(payload: bytes = PAYLOAD) -> bytes:
    half = len(payload) // 2
    envelope = Envelope(
        namespace_id=NAMESPACE,
        block_hash=BLOCK,
        k_codec=Codec.EXACT,
        v_codec=Codec.EXACT,
        tokens=16,
        k_bytes=half,
        v_bytes=len(payload) - half,
        decoded_bytes=len(payload),
        payload_checksum=checksum(payload),
    )
    return envelope.encode() + payload


def verify(block: bytes | bytearray | memoryview, *, payload_bytes: int = len(PAYLOAD)) -> memoryview:
    return verify_block(block, namespace_id=NAMESPACE, block_hash=BLOCK, payload_bytes=payload_bytes)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    k_bytes = draw(st.integers(0, 2**40))
    v_bytes = draw(st.integers(0, 2**40))
    return Envelope(
        namespace_id=draw(namespace_ids),
        block_hash=draw(hashes),
        k_codec=Codec.EXACT if k_bytes else draw(st.sampled_from(Codec)),
        v_codec=Codec.EXACT if v_bytes else draw(st.sampled_from(Codec)),
        tokens=draw(u32),
        k_bytes=k_bytes,
        v_bytes=v_bytes,
        decoded_bytes=k_bytes + v_bytes,
        payload_checksum=draw(u64),
    )


@given(envelopes())
def test_an_envelope_survives_its_encoding(envelope: Envelope) -> None:
    encoded = envelope.encode()
    assert len(encoded) == ENVELOPE_BYTES
    assert Envelope.decode(encoded) == envelope


def test_a_sound_block_gives_its_payload_without_a_copy() -> None:
    block = bytearray(enveloped())
    payload = verify(block)
    assert payload == PAYLOAD
    block[-1] ^= 1
    assert payload != PAYLOAD


def test_bytes_behind_the_payload_do_not_matter() -> None:
    assert verify(enveloped() + b"rest of the slot") == PAYLOAD


def test_every_flipped_bit_of_the_envelope_is_noticed() -> None:
    block = bytearray(enveloped())
    for bit in range(ENVELOPE_BYTES * 8):
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBlockError):
            verify(block)
        block[bit // 8] ^= 1 << bit % 8
    assert verify(block) == PAYLOAD


@given(st.integers(0, len(PAYLOAD) * 8 - 1))
def test_a_flipped_bit_of_the_payload_is_noticed(bit: int) -> None:
    block = bytearray(enveloped())
    block[ENVELOPE_BYTES + bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlockError, match="payload checksum"):
        verify(block)


@given(st.integers(0, len(enveloped()) - 1))
def test_a_block_cut_off_anywhere_is_noticed(size: int) -> None:
    with pytest.raises(CorruptBlockError):
        verify(enveloped()[:size])


@given(st.binary(max_size=300))
def test_garbage_is_a_corrupt_block_and_nothing_else(garbage: bytes) -> None:
    with pytest.raises(CorruptBlockError):
        Envelope.decode(garbage)


def test_zeros_are_no_block() -> None:
    with pytest.raises(CorruptBlockError):
        verify(bytes(len(enveloped())))


@given(namespace_ids, hashes)
def test_a_sound_block_under_another_key_is_refused(namespace_id: NamespaceId, block_hash: BlockHash) -> None:
    with pytest.raises(CorruptBlockError, match="asked for"):
        verify_block(enveloped(), namespace_id=namespace_id, block_hash=BLOCK, payload_bytes=len(PAYLOAD))
    with pytest.raises(CorruptBlockError, match="asked for"):
        verify_block(enveloped(), namespace_id=NAMESPACE, block_hash=block_hash, payload_bytes=len(PAYLOAD))


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(CorruptBlockError, match="namespace stores"):
        verify(enveloped(), payload_bytes=len(PAYLOAD) * 2)


def test_exact_planes_that_do_not_fill_the_layout_are_refused() -> None:
    """Checksum, key and decoded length all agree here; only the planes fall short."""
    short = PAYLOAD[:64]
    envelope = replace(
        Envelope.decode(enveloped()), k_bytes=32, v_bytes=32, payload_checksum=checksum(short), tokens=16
    )
    with pytest.raises(CorruptBlockError, match="cannot decode"):
        verify(envelope.encode() + short)


def test_an_absent_plane_with_bytes_is_refused() -> None:
    envelope = replace(Envelope.decode(enveloped()), v_codec=Codec.NONE)
    with pytest.raises(CorruptBlockError, match="absent plane"):
        verify(envelope.encode() + PAYLOAD)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"KVB2"), (4, b"\2"), (6, b"\x7f"), (72, b"\x63"), (73, b"\x63"), (74, b"\1"), (112, b"\1")],
)
def test_what_this_version_does_not_know_is_refused_even_under_a_right_checksum(offset: int, value: bytes) -> None:
    head = bytearray(enveloped()[: ENVELOPE_BYTES - 8])
    head[offset : offset + len(value)] = value
    with pytest.raises(CorruptBlockError):
        verify(bytes(head) + checksum(bytes(head)).to_bytes(8, "little") + PAYLOAD)


def test_a_verified_block_may_be_empty() -> None:
    assert bytes(verify(enveloped(b""), payload_bytes=0)) == b""


@given(st.lists(st.integers(0, len(enveloped())), max_size=6).map(sorted))
def test_a_checksum_taken_piece_by_piece_is_that_of_the_whole_payload(cuts: list[int]) -> None:
    block = enveloped()
    taken = PayloadChecksum()
    for start, end in itertools.pairwise([0, *cuts, len(block)]):
        taken.update(memoryview(block)[start:end])
    assert taken.block_bytes == len(block)
    assert taken.value == checksum(PAYLOAD)


def test_a_known_checksum_is_compared_like_one_that_is_taken_now() -> None:
    key = {"namespace_id": NAMESPACE, "block_hash": BLOCK, "payload_bytes": len(PAYLOAD)}
    assert verify_block(enveloped(), payload_checksum=checksum(PAYLOAD), **key) == PAYLOAD  # type: ignore[arg-type]
    with pytest.raises(CorruptBlockError, match="checksum"):
        verify_block(enveloped(), payload_checksum=checksum(PAYLOAD) ^ 1, **key)  # type: ignore[arg-type]
