import random
import struct
import zlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_core.carrier import CarrierStatus
from lens_core.carrier_size import MAX_CARRIER_BYTES, carrier_size
from lens_core.errors import CarrierError, FrameError
from lens_core.frame import (
    BROADCAST_CAPACITY,
    HEADER_BYTES,
    MAX_CAPACITY,
    P2P_CAPACITY,
    decode_frame,
    encode_frame,
)
from lens_core.frame_content import FrameFlags
from lens_core.propagation import extract_context
from lens_core.testing import damage_bytes

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

nonzero_hex = lambda digits: st.integers(1, 16**digits - 1).map(lambda n: f"{n:0{digits}x}")  # noqa: E731
traceparents = st.builds(
    lambda trace_id, span_id, flags: f"00-{trace_id}-{span_id}-{flags:02x}",
    nonzero_hex(32),
    nonzero_hex(16),
    st.integers(0, 255),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
carriers = st.builds(
    lambda headers, traceparent: {**headers, **traceparent},
    st.dictionaries(texts.filter(lambda key: key != "traceparent"), texts, max_size=6),
    st.one_of(st.just({}), traceparents.map(lambda value: {"traceparent": value})),
)


def test_the_layout_is_as_documented():
    raw = encode_frame({"traceparent": TRACEPARENT, "k": "v"}, capacity=64, sequence=7)
    body = msgpack.packb({"k": "v"})
    assert HEADER_BYTES == 45
    assert raw[:8] == b"LNSf" + bytes([1, 0]) + struct.pack("<H", len(body))
    assert struct.unpack_from("<I", raw, 8) == (
        zlib.crc32(raw[12 : 45 + len(body)], zlib.crc32(raw[:8])),
    )
    assert struct.unpack_from("<Q", raw, 12) == (7,)
    assert raw[20:36].hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert raw[36:44].hex() == "00f067aa0ba902b7"
    assert raw[44] == 1
    assert raw[45 : 45 + len(body)] == body
    assert raw[45 + len(body) :] == bytes(64 - 45 - len(body))


def read(raw):
    """What a frame holds: headers as they were written, sequence, whether some are missing."""
    carrier = decode_frame(raw)
    headers = carrier if carrier.ids is not None else carrier._headers
    return dict(headers), carrier.sequence, carrier.truncated


@given(carriers, st.integers(0, 2**64 - 1))
def test_every_carrier_that_fits_comes_back(carrier, sequence):
    raw = encode_frame(carrier, capacity=4096, sequence=sequence)
    assert len(raw) == 4096
    assert read(raw) == (carrier, sequence, False)
    assert FrameFlags(raw[5]) == (FrameFlags(0) if carrier else FrameFlags.NO_CONTEXT)


@given(carriers, st.integers(HEADER_BYTES, 200))
def test_the_size_is_the_capacity_and_the_traceparent_survives(carrier, capacity):
    raw = encode_frame(carrier, capacity=capacity)
    headers, _, truncated = read(raw)
    assert len(raw) == capacity
    assert headers.get("traceparent") == carrier.get("traceparent")
    assert headers.items() <= carrier.items()
    assert truncated == (headers != carrier)


def test_a_buffer_that_nobody_wrote_to_is_no_frame():
    assert read(bytes(P2P_CAPACITY)) == ({}, None, False)
    assert read(b"") == ({}, None, False)


def test_a_sender_without_a_context_sends_a_valid_frame():
    raw = encode_frame({}, capacity=P2P_CAPACITY, sequence=3)
    assert read(raw) == ({}, 3, False)
    assert raw[5] == FrameFlags.NO_CONTEXT
    assert decode_frame(raw).status is CarrierStatus.ABSENT


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview])
def test_any_bytes_like_object_is_read(convert):
    raw = encode_frame({"traceparent": TRACEPARENT}, capacity=P2P_CAPACITY)
    assert decode_frame(convert(raw)) == {"traceparent": TRACEPARENT}


def test_over_capacity_the_flags_say_what_was_left_out():
    room = P2P_CAPACITY - HEADER_BYTES
    carrier = {"traceparent": TRACEPARENT, "tracestate": "s=1", "baggage": "b" * room}
    raw = encode_frame(carrier, capacity=P2P_CAPACITY)
    assert read(raw) == ({"traceparent": TRACEPARENT, "tracestate": "s=1"}, 0, True)
    assert raw[5] == FrameFlags.DROPPED_BAGGAGE
    carrier["tracestate"] = "s" * room
    raw = encode_frame(carrier, capacity=P2P_CAPACITY)
    assert read(raw) == ({"traceparent": TRACEPARENT}, 0, True)
    assert raw[5] == FrameFlags.DROPPED_BAGGAGE | FrameFlags.DROPPED_TRACESTATE
    raw = encode_frame({**carrier, "x": "y" * room}, capacity=P2P_CAPACITY)
    assert read(raw) == ({"traceparent": TRACEPARENT}, 0, True)
    assert raw[5] == (
        FrameFlags.DROPPED_BAGGAGE | FrameFlags.DROPPED_TRACESTATE | FrameFlags.DROPPED_OTHER
    )


def test_a_huge_carrier_keeps_its_traceparent():
    carrier = {"traceparent": TRACEPARENT, "baggage": "b" * 10_000_000}
    raw = encode_frame(carrier, capacity=BROADCAST_CAPACITY)
    assert read(raw) == ({"traceparent": TRACEPARENT}, 0, True)


@pytest.mark.parametrize("name", ["baggage", "tracestate", "x"])
def test_a_carrier_that_no_receiver_accepts_is_too_large_for_a_frame_of_any_size(name):
    fitting = {"traceparent": TRACEPARENT}
    carrier = {**fitting, name: "é" * ((MAX_CARRIER_BYTES - carrier_size(fitting)) // 2)}
    assert read(encode_frame(carrier, capacity=MAX_CAPACITY)) == (fitting, 0, True)
    carrier[name] = carrier[name][: -len(name)]
    assert carrier_size(carrier) <= MAX_CARRIER_BYTES
    raw = encode_frame(carrier, capacity=MAX_CAPACITY)
    assert read(raw) == (carrier, 0, False)
    assert extract_context(decode_frame(raw))


def test_more_headers_than_a_frame_may_hold_are_left_out_and_flagged():
    carrier = {"traceparent": TRACEPARENT, **{f"h{n}": "" for n in range(65)}}
    raw = encode_frame(carrier, capacity=4096)
    assert read(raw) == ({"traceparent": TRACEPARENT}, 0, True)
    assert raw[5] == FrameFlags.DROPPED_OTHER


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "garbage",
        TRACEPARENT.upper(),
        TRACEPARENT + "-extra",
        "01" + TRACEPARENT[2:],
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "00-4bf92f3577b34da6a3ce929d0e0e47 6-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
    ],
)
def test_a_malformed_traceparent_is_refused_on_the_way_out(traceparent):
    with pytest.raises(FrameError):
        encode_frame({"traceparent": traceparent}, capacity=P2P_CAPACITY)


@pytest.mark.parametrize("carrier", [{"k": 1}, {1: "v"}, [1], "text", {"k": "\ud800"}])
def test_what_is_no_carrier_is_refused_on_the_way_out(carrier):
    with pytest.raises(CarrierError):
        encode_frame(carrier, capacity=P2P_CAPACITY)


@pytest.mark.parametrize("capacity", [-1, 0, HEADER_BYTES - 1, HEADER_BYTES + 65_536])
def test_an_impossible_capacity_is_refused(capacity):
    with pytest.raises(FrameError, match=f"capacity {capacity}"):
        encode_frame({}, capacity=capacity)


def _forge(body: bytes, *, flags: int = 0, version: int = 1, ids: bytes = bytes(25)) -> bytes:
    """A frame with a right checksum around any content."""
    prefix = struct.pack("<4sBBH", b"LNSf", version, flags, len(body))
    rest = ids[:0] + struct.pack("<Q", 0) + ids
    crc = zlib.crc32(body, zlib.crc32(rest, zlib.crc32(prefix)))
    return prefix + struct.pack("<I", crc) + rest + body


@pytest.mark.parametrize(
    "forged",
    [
        _forge(b"", flags=1, version=2),
        _forge(b"", flags=0x80),
        _forge(b"", flags=0),  # no context, and not marked so
        _forge(msgpack.packb({"k": "v"}), flags=1),  # marked so, with one
        _forge(msgpack.packb([1])),
        _forge(msgpack.packb("text")),
        _forge(msgpack.packb({})),
        _forge(msgpack.packb({"k": 1})),
        _forge(msgpack.packb({"k": {"n": "v"}})),
        _forge(msgpack.packb({"k": [1]})),
        _forge(msgpack.packb({"k": b"v"})),
        _forge(msgpack.packb({1: "v"})),
        _forge(msgpack.packb({"traceparent": TRACEPARENT})),
        _forge(msgpack.packb({"k": "v"}) + b"\xc0"),
        _forge(msgpack.packb({f"h{n}": "" for n in range(65)})),
        _forge(msgpack.packb({"k": msgpack.Timestamp(1)})),
        _forge(b"\x81\xa1k\xa1\xff"),
        _forge(b"\xc1"),
        _forge(b"", ids=b"\x01" * 16 + bytes(9)),  # a trace id without a span id
        _forge(b"", ids=bytes(16) + b"\x01" * 8 + b"\x00"),
    ],
)
def test_a_right_checksum_around_a_wrong_content_is_refused(forged):
    assert decode_frame(forged).problem is not None


def _released():
    view = memoryview(b"bytes")
    view.release()
    return view


@pytest.mark.parametrize("data", ["text", None, 5, -1, object(), [1, 2, 300], 10**12, _released()])
def test_what_is_not_bytes_like_is_refused(data):
    assert "bytes-like" in decode_frame(data).problem


def test_more_bytes_than_any_frame_has_are_refused():
    assert decode_frame(b"LNSf" + bytes(65_577)).problem == "65581 bytes are more than 65580"


def test_every_truncation_is_refused():
    raw = encode_frame({"traceparent": TRACEPARENT, "k": "v"}, capacity=P2P_CAPACITY)
    used = len(raw.rstrip(b"\0"))
    for length in range(1, used):
        assert decode_frame(raw[:length]).problem is not None


def test_every_single_bit_flip_is_refused():
    raw = encode_frame({"traceparent": TRACEPARENT, "k": "v"}, capacity=100, sequence=5)
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_frame(damaged).problem is not None


@given(carriers, st.integers(0, 2**32))
@settings(max_examples=300)
def test_damaged_frames_are_never_accepted(carrier, seed):
    raw = encode_frame(carrier, capacity=P2P_CAPACITY, sequence=1)
    damaged = damage_bytes(raw, random.Random(seed))
    assert damaged != raw
    assert len(damaged) == len(raw)
    problem = decode_frame(damaged).problem
    assert (problem is None) == (damaged == bytes(P2P_CAPACITY))


@given(st.binary(max_size=2048))
def test_random_bytes_are_never_a_frame(data):
    problem = decode_frame(data).problem
    assert (problem is None) == (data == bytes(len(data)))
