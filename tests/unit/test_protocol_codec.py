"""The codec, fed with every split of the stream, every malformed frame, and sizes at the limits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infervisor.protocol.codec import (
    LENGTH_BYTES,
    MAX_FROM_WORKER_BYTES,
    MAX_TO_WORKER_BYTES,
    Decoder,
    encode,
)
from infervisor.protocol.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError
from infervisor.protocol.messages import (
    ENDED_WHY,
    FROM_WORKER,
    TO_WORKER,
    Answered,
    Beat,
    Cancel,
    Credit,
    Drain,
    Ended,
    Failed,
    Hello,
    Load,
    Log,
    Message,
    Progress,
    Query,
    Ready,
    Released,
    Shutdown,
    Started,
    Submit,
    Tokens,
    Vectors,
)

U64 = st.integers(0, (1 << 64) - 1)
TEXT = st.text(max_size=12)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | FLOAT | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MAP = st.dictionaries(TEXT, PLAIN, max_size=3)
COUNTS = st.dictionaries(TEXT, U64, max_size=3)
TOKEN = st.tuples(U64, TEXT, st.none() | st.lists(PLAIN, max_size=2)).map(list)
VECTOR = st.integers(1, 4).flatmap(lambda length: st.binary(min_size=4 * length, max_size=4 * length))

TO_WORKER_MESSAGES: dict[type[Message], st.SearchStrategy[Message]] = {
    Load: st.builds(Load, TEXT, st.none() | TEXT, MAP, st.none() | st.floats(0, 1), st.none() | FLOAT, U64),
    Submit: st.builds(
        Submit,
        U64,
        st.none() | TEXT,
        st.none() | st.lists(MAP, max_size=2),
        MAP,
        U64,
        st.none() | FLOAT,
        st.booleans(),
        MAP,
        U64,
        st.lists(U64, max_size=5),
        st.none() | st.lists(U64, min_size=2, max_size=2),
        st.none() | st.lists(TEXT, max_size=3),
        MAP,
        st.none() | st.lists(MAP, max_size=2),
        st.integers(-100, 100),
    ),
    Credit: st.builds(Credit, U64, U64),
    Cancel: st.builds(Cancel, U64),
    Query: st.builds(Query, U64, TEXT, MAP),
    Drain: st.builds(Drain),
    Shutdown: st.builds(Shutdown),
}
FROM_WORKER_MESSAGES: dict[type[Message], st.SearchStrategy[Message]] = {
    Hello: st.builds(Hello, U64, U64, U64, MAP),
    Progress: st.builds(Progress, U64, TEXT, st.floats(0, 1)),
    Ready: st.builds(Ready, U64, TEXT, MAP),
    Failed: st.builds(Failed, U64, TEXT, TEXT, TEXT, st.booleans()),
    Started: st.builds(Started, U64, U64, U64, U64, U64),
    Tokens: st.builds(Tokens, U64, U64, U64, st.lists(TOKEN, min_size=1, max_size=3)),
    Vectors: st.builds(Vectors, U64, U64, U64, st.lists(VECTOR, min_size=1, max_size=3)),
    Answered: st.builds(Answered, U64, U64, st.none() | U64 | st.binary(max_size=8), st.none() | MAP),
    Ended: st.builds(Ended, U64, U64, st.sampled_from(sorted(ENDED_WHY)), TEXT, COUNTS, st.none() | MAP),
    Released: st.builds(Released, U64, U64, st.none() | U64, U64),
    Beat: st.builds(Beat, U64, U64, COUNTS, U64, U64),
    Log: st.builds(Log, U64, TEXT, TEXT, U64),
}
ANY_TO_WORKER = st.one_of(*TO_WORKER_MESSAGES.values())
ANY_FROM_WORKER = st.one_of(*FROM_WORKER_MESSAGES.values())
DIRECTIONS = [
    pytest.param(Decoder.to_worker, ANY_TO_WORKER, id="to_worker"),
    pytest.param(Decoder.from_worker, ANY_FROM_WORKER, id="from_worker"),
]
NewDecoder = Callable[[], Decoder]


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def packed(*values: Any) -> bytes:
    payload: bytes = msgpack.packb(list(values))
    return payload


def refuse(decoder: Decoder, data: bytes) -> RemoteProtocolError:
    """Feed `data`, which must break the stream, and prove that it stays broken and keeps nothing."""
    with pytest.raises(RemoteProtocolError) as caught:
        decoder.feed(data)
    assert decoder.buffered_bytes == 0
    with pytest.raises(RemoteProtocolError, match="broke before") as again:
        decoder.feed(encode(Cancel(1)))
    assert not again.value.before
    assert len(str(caught.value)) < 250
    return caught.value


# --- round trips and splits ----------------------------------------------------------------------


def test_every_message_has_a_strategy_here() -> None:
    assert set(TO_WORKER_MESSAGES) == set(TO_WORKER.values())
    assert set(FROM_WORKER_MESSAGES) == set(FROM_WORKER.values())


@pytest.mark.parametrize("cls", [*TO_WORKER_MESSAGES, *FROM_WORKER_MESSAGES])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_what_is_encoded_is_decoded(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw({**TO_WORKER_MESSAGES, **FROM_WORKER_MESSAGES}[cls])
    decoder = Decoder.to_worker() if cls in TO_WORKER_MESSAGES else Decoder.from_worker()
    assert decoder.feed(encode(message)) == [message]
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize(("new", "messages"), DIRECTIONS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_split_of_the_stream_gives_the_same_messages(
    new: NewDecoder, messages: st.SearchStrategy[Message], data: st.DataObject
) -> None:
    sent = data.draw(st.lists(messages, max_size=5))
    frames = [encode(message) for message in sent]
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder, got, fed = new(), [], 0
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
        fed = end
        # Nothing whole is held back, nothing torn is given out.
        whole, size = 0, 0
        while whole < len(frames) and size + len(frames[whole]) <= fed:
            size += len(frames[whole])
            whole += 1
        assert got == sent[:whole]
        assert decoder.buffered_bytes == fed - size
    assert got == sent


def test_a_stream_byte_by_byte() -> None:
    sent = [Hello(1, 1, 2, {}), Tokens(2, 7, 0, [[5, "é", None]]), Log(3, "info", "", 0)]
    decoder = Decoder.from_worker()
    got = [message for byte in b"".join(map(encode, sent)) for message in decoder.feed(bytes([byte]))]
    assert got == sent


def test_the_two_directions_do_not_know_each_others_messages() -> None:
    assert "unknown message 'hello'" in str(refuse(Decoder.to_worker(), encode(Hello(1, 1, 2, {}))))
    assert "unknown message 'cancel'" in str(refuse(Decoder.from_worker(), encode(Cancel(1))))


# --- malformed frames ----------------------------------------------------------------------------

NEST = 1000
MALFORMED = {
    "empty payload": b"",
    "reserved byte": b"\xc1",
    "nil": b"\xc0",
    "number": b"\x01",
    "name alone": b"\xa6cancel",
    "map": b"\x81\xa6cancel\x01",
    "binary": b"\xc4\x01a",
    "extension": b"\xd4\x01\x01",
    "extension as array": b"\xc7\x06\x05cancel",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "empty array": b"\x90",
    "name is a number": b"\x92\x01\x01",
    "name is nil": b"\x92\xc0\x01",
    "name is binary": b"\x92\xc4\x06cancel\x01",
    "name is an array": b"\x92\x91\xa6cancel\x01",
    "name is a map": b"\x92\x80\x01",
    "unknown name": packed("cancels", 1),
    "name of a class": packed("Cancel", 1),
    "huge unknown name": packed("x" * 100_000),
    "too few fields": packed("cancel"),
    "too many fields": packed("cancel", 1, 1),
    "trailing byte": packed("cancel", 1) + b"\x01",
    "trailing message": packed("cancel", 1) * 2,
    "trailing nest": packed("cancel", 1) + b"\x91" * NEST + b"\xc0",
    "trailing byte after a nest": b"\x91" * NEST + b"\xc0\xc0",
    "cut array": packed("cancel", 1)[:-1],
    "cut text": b"\x92\xa7cancel",
    "cut number": b"\x92\xa6cancel\xcf\x00",
    "invalid UTF-8 name": b"\x92\xa2\xc3\x28\x01",
    "invalid UTF-8 text": b"\x94\xa4load\xa1\xff\xc0\x80",
    "UTF-8 of a surrogate": b"\x94\xa4load\xa3\xed\xa0\x80\xc0\x80",
    "negative id": packed("cancel", -1),
    "true as id": packed("cancel", True),
    "float as id": packed("cancel", 1.0),
    "NaN as id": packed("cancel", math.nan),
    "nil as id": packed("cancel", None),
    "text as id": packed("cancel", "1"),
    "array as id": packed("cancel", []),
    "map as id": packed("cancel", {}),
    "extension as id": b"\x92\xa6cancel\xd4\x01\x01",
    "timestamp as id": b"\x92\xa6cancel\xd6\xff\x00\x00\x00\x01",
    "broken timestamp as id": b"\x92\xa6cancel\xc7\x0c\xff" + b"\xff" * 12,
    "nest as id": b"\x92\xa6cancel" + b"\x91" * NEST + b"\xc0",
    "nest of maps as id": b"\x92\xa6cancel" + b"\x81\xa1a" * NEST + b"\xc0",
    "nest as frame": b"\x91" * NEST + b"\xc0",
    "nest beyond msgpack's stack": b"\x91" * 100_000 + b"\xc0",
    "array as map key": b"\x94\xa4load\xa1a\xc0\x81\x90\x01",
    "map as map key": b"\x94\xa4load\xa1a\xc0\x81\x80\x01",
    "number as map key": b"\x94\xa4load\xa1a\xc0\x81\x01\x01",
    "nil as map key": b"\x94\xa4load\xa1a\xc0\x81\xc0\x01",
    "binary as map key": b"\x94\xa4load\xa1a\xc0\x81\xc4\x01a\x01",
    "array declares 4 Gi entries": b"\xdd\xff\xff\xff\xff",
    "map declares 4 Gi entries": b"\xdf\xff\xff\xff\xff",
    "text declares 4 GiB": b"\x92\xdb\xff\xff\xff\xff",
    "binary declares 4 GiB": b"\xc6\xff\xff\xff\xff",
    "extension declares 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "nest of arrays that each declare the frame": b"\xdd\x00\x00\x10\x00" * NEST,
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_frame_is_a_named_error(payload: bytes) -> None:
    good = [Cancel(1), Credit(2, 3)]
    stream = b"".join(map(encode, good)) + frame(payload) + encode(Cancel(4))
    error = refuse(Decoder.to_worker(), stream)
    assert type(error) is RemoteProtocolError
    # What was said before is still heard; what came after the bad frame is not.
    assert error.before == good


def test_a_map_that_repeats_a_key_has_its_last_value() -> None:
    [message] = Decoder.to_worker().feed(frame(b"\x97\xa4load\xa1a\xc0\x82\xa1k\x01\xa1k\x02\xc0\xc0\x01"))
    assert message == Load("a", None, {"k": 2})


@pytest.mark.parametrize("new", [Decoder.to_worker, Decoder.from_worker])
@settings(max_examples=80, deadline=None)
@given(payload=st.binary(max_size=40) | PLAIN.map(msgpack.packb) | st.lists(PLAIN).map(msgpack.packb))
def test_no_payload_raises_anything_else(new: NewDecoder, payload: bytes) -> None:
    decoder = new()
    # By chance a payload may be a message, such as ["drain"].
    with contextlib.suppress(RemoteProtocolError):
        [message] = decoder.feed(frame(payload))
        assert isinstance(message, Message)
    assert decoder.buffered_bytes == 0


@pytest.mark.parametrize(("new", "messages"), DIRECTIONS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_damaged_stream_gives_messages_or_the_named_error(
    new: NewDecoder, messages: st.SearchStrategy[Message], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(encode(data.draw(messages)) for _ in range(2)))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    decoder = new()
    try:
        got = decoder.feed(bytes(stream))
    except RemoteProtocolError:
        assert decoder.buffered_bytes == 0
    else:
        assert all(isinstance(message, Message) for message in got)
        assert decoder.buffered_bytes <= len(stream)


# --- sizes ---------------------------------------------------------------------------------------

SIZES = [
    pytest.param(Decoder.to_worker, lambda text: Load(text, None, {}), MAX_TO_WORKER_BYTES, id="to_worker"),
    pytest.param(
        Decoder.from_worker, lambda text: Log(1, "", text, 0), MAX_FROM_WORKER_BYTES, id="from_worker"
    ),
]
WithText = Callable[[str], Message]


def of_size(with_text: WithText, payload_bytes: int) -> Message:
    """Return a message whose payload takes exactly that many bytes."""
    probe = 1 << 17  # a text this long has the same header as one of the limit
    overhead = len(encode(with_text("x" * probe))) - LENGTH_BYTES - probe
    return with_text("x" * (payload_bytes - overhead))


def test_the_limits_are_those_of_the_contract() -> None:
    assert (MAX_TO_WORKER_BYTES, MAX_FROM_WORKER_BYTES) == (16 * 1024 * 1024, 1024 * 1024)


@pytest.mark.parametrize(("new", "with_text", "limit"), SIZES)
def test_frames_up_to_the_limit_travel(new: NewDecoder, with_text: WithText, limit: int) -> None:
    for size in (limit - 1, limit):
        message = of_size(with_text, size)
        data = encode(message)
        assert len(data) == LENGTH_BYTES + size
        decoder = new()
        assert decoder.feed(data[:-1]) == []
        assert decoder.buffered_bytes == LENGTH_BYTES + size - 1
        assert decoder.feed(data[-1:]) == [message]


@pytest.mark.parametrize(("new", "with_text", "limit"), SIZES)
def test_a_frame_beyond_the_limit_is_refused_at_both_ends(
    new: NewDecoder, with_text: WithText, limit: int
) -> None:
    with pytest.raises(LocalProtocolError, match=f"takes {limit + 1} bytes; a frame holds at most {limit}"):
        encode(of_size(with_text, limit + 1))
    for declared in (limit + 1, (1 << 32) - 1):
        # The length alone is enough: not a byte of the payload is waited for.
        error = refuse(new(), declared.to_bytes(LENGTH_BYTES, "big"))
        assert type(error) is FrameTooLarge
        assert str(declared) in str(error)


@pytest.mark.parametrize("new", [Decoder.to_worker, Decoder.from_worker])
def test_a_length_is_judged_only_when_it_is_whole(new: NewDecoder) -> None:
    decoder = new()
    assert decoder.feed(b"\xff\xff\xff") == []
    assert decoder.buffered_bytes == 3
    with pytest.raises(FrameTooLarge):
        decoder.feed(b"\xff")


def test_messages_before_a_frame_that_is_too_large_are_kept() -> None:
    error = refuse(Decoder.from_worker(), encode(Log(1, "", "", 0)) + b"\xff\xff\xff\xff" + b"x" * 1000)
    assert isinstance(error, FrameTooLarge)
    assert error.before == [Log(1, "", "", 0)]


# --- what can't be sent --------------------------------------------------------------------------


def deep(levels: int) -> list[Any]:
    nest: list[Any] = []
    for _ in range(levels):
        nest = [nest]
    return nest


@pytest.mark.parametrize(
    "value",
    [1 << 64, -(1 << 63) - 1, 10**5000, "\ud83d", object(), {1, 2}, deep(3000), 1j, Exception("x")],
    ids=["2**64", "-2**63-1", "10**5000", "surrogate", "object", "set", "nest", "complex", "exception"],
)
def test_what_cannot_be_packed_is_a_local_error_that_names_the_message(value: Any) -> None:
    with pytest.raises(LocalProtocolError, match=r"^load can't be packed: "):
        encode(Load("engine", None, {"option": value}))
