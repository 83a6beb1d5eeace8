"""The smallest windows with the longest stop strings and split characters: no lock-up, and the text is exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from infervisor import EndReason, Report, Stream, Supervisor
from tests.helpers.inside import PATIENT, request_of, until
from tests.helpers.leaks import no_leftovers
from tests.helpers.models import TOKEN, build_model, byte_token, chain
from tests.helpers.supervised import QUICK_GRACES, QUICK_RESTART, scripted

pytestmark = pytest.mark.anyio

WINDOWS = (1, 2, 3)
NO_LOCK_UP_S = 30.0
LLAMA, FAMILY, FLAG = "🦙", "👩‍👩‍👧", "🏴\U000e0067\U000e0062\U000e007f"
CYCLE = f"{LLAMA}abc"


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Check children, descriptors and threads around each test."""
    with no_leftovers():
        yield


async def read(stream: Stream, luck: random.Random) -> tuple[str, list[int], Report]:
    """Read to the end at an uneven pace; return text and token ids of the chunks, and the report."""
    texts: list[str] = []
    ids: list[int] = []
    with anyio.fail_after(NO_LOCK_UP_S):
        async for chunk in stream:
            assert chunk.text, "a chunk without text"
            texts.append(chunk.text)
            ids += chunk.token_ids
            for _ in range(luck.choice((0, 0, 1, 3))):
                await anyio.lowlevel.checkpoint()
        return "".join(texts), ids, await stream.released()


def stop_and_before(luck: random.Random) -> tuple[str, str]:
    """Return a stop string of hundreds of characters, and text that is almost it again and again, before it comes.

    The stop string repeats itself, so that its beginnings overlap: the text repeats it once more often.
    """
    period = "".join(luck.choice(("a", "b", "é", LLAMA, FAMILY)) for _ in range(luck.randint(1, 5)))
    stop = (period * 300)[: luck.randint(150, 300)] + luck.choice(("!", FLAG, "ß"))
    pieces: list[str] = []
    for _ in range(3):
        begun = stop[: luck.choice((len(stop) - 1, luck.randint(1, len(stop) - 1)))]
        pieces += [begun, luck.choice(("?", " so ", f" {FAMILY}", begun[:1]))]
    return stop, "".join(pieces) + " " + period


def cut(data: bytes, luck: random.Random) -> list[bytes]:
    """Return the bytes in tokens of one to four, with some tokens that have none."""
    tokens: list[bytes] = []
    while data:
        size = luck.choice((0, 1, 1, 1, 2, 3, 4))
        tokens.append(data[:size])
        data = data[size:]
    return tokens


@pytest.mark.parametrize("seed", range(4))
async def test_text_that_almost_stops_again_and_again_is_exact_at_any_cut_of_its_bytes(seed: int) -> None:
    luck = random.Random(seed)
    stop, before = stop_and_before(luck)
    ends = seed % 3 != 2
    whole = before + (stop + f" never {FLAG} shown" if ends else FLAG)
    tokens = cut(whole.encode(), luck)
    shown = whole.partition(stop)[0]
    # The answer stops at the token with which the text holds the whole stop string, and not one later.
    computed, seen = 0, b""
    while computed < len(tokens) and stop not in seen.decode(errors="ignore"):
        seen += tokens[computed]
        computed += 1
    async with scripted({"tokens": tokens}, escalation=PATIENT) as (supervisor, _):
        for window in WINDOWS:
            async with supervisor.stream("say", window=window, stop=["never comes", stop]) as stream:
                text, ids, report = await read(stream, luck)
            assert text == shown
            assert ids == list(range(len(ids))), "no token of the text is missing or twice"
            assert report.usage.completion_tokens == computed
            assert report.end_reason is (EndReason.STOP_SEQUENCE if ends else EndReason.STOP)


async def test_hundreds_of_tokens_without_a_text_to_read_pass_the_smallest_window_and_one_with_text_fills_it() -> (
    None
):
    # All is held back until a token shows that it was a false start. Nobody reads meanwhile.
    stop = "x" * 500
    tokens = ["x"] * 499 + ["y", "z", "and more"]
    async with scripted({"tokens": tokens}, escalation=PATIENT) as (supervisor, _):
        async with supervisor.stream("say", window=1, stop=stop) as stream:
            window = request_of(stream).window
            await until(lambda: request_of(stream).has_chunk, NO_LOCK_UP_S)
            assert (window.taken, window.received, window.limit) == (499, 500, 500)
            with anyio.fail_after(NO_LOCK_UP_S):
                chunks = [chunk async for chunk in stream]
        assert [chunk.text for chunk in chunks] == ["x" * 499 + "y", "z", "and more"]
        assert chunks[0].token_ids == tuple(range(500))
        assert stream.end_reason is EndReason.STOP


async def test_a_cancel_in_the_middle_of_what_is_held_back_leaves_the_next_answer_exact() -> None:
    # Two bytes of a character have come when it is cancelled, and dozens of characters that were never shown.
    stop = LLAMA * 100
    tokens = [bytes([byte]) for byte in (LLAMA * 99).encode()] + [b"!"]
    async with scripted({"tokens": tokens, "pace_s": 0.0002}, escalation=PATIENT) as (supervisor, _):
        for window in WINDOWS:
            async with supervisor.stream("say", window=window, stop=stop) as stream:
                await until(lambda stream=stream: request_of(stream).window.received >= 50)  # type: ignore[misc]
                stream.cancel()
                report = await stream.released()
            assert report.end_reason is EndReason.CANCELLED
            assert 50 <= report.usage.completion_tokens < len(tokens)
            answer = await supervisor.generate("say", window=window, stop=stop)
            assert answer.text == LLAMA * 99 + "!"


async def test_llama_cpp_with_split_characters_and_stop_strings_that_it_almost_says_for_ever(
    tmp_path: Path,
) -> None:
    # The model says an emoji in four tokens, a, b, c, and again.
    letters = [TOKEN[letter] for letter in "abc"]
    emoji = [byte_token(byte) for byte in LLAMA.encode()]
    model = build_model(tmp_path / "cycle.gguf", chain(*emoji, *letters, then=emoji[0]), context_tokens=1024)
    said = CYCLE * 100
    luck = random.Random(7)
    async with Supervisor(
        model,
        options={"threads": 1},
        escalation=PATIENT,
        restart=QUICK_RESTART,
        graces=QUICK_GRACES,
    ) as supervisor:
        for window, prompt in zip(WINDOWS, "abc", strict=True):
            # It goes on where the last letter of the prompt stands.
            text = said[said.index(prompt) + 1 :]
            start, length = luck.randint(0, 20), luck.randint(100, 200)
            stop = text[start : start + length]
            shown = text.partition(stop)[0]
            async with supervisor.stream(
                prompt, temperature=0, window=window, stop=["X" + stop, stop], max_tokens=600
            ) as stream:
                seen, _, report = await read(stream, luck)
            assert seen == shown
            assert report.end_reason is EndReason.STOP_SEQUENCE
            # One token for each byte of the emoji, and for each letter.
            assert report.usage.completion_tokens == len((shown + stop).encode())
            # And one that it says all of but the last letter, in every cycle anew.
            async with supervisor.stream(
                prompt, temperature=0, window=window, stop=text[:length] + "X", max_tokens=400
            ) as stream:
                seen, _, report = await read(stream, luck)
            assert seen == text.encode()[:400].decode(errors="replace")
            assert report.end_reason is EndReason.LENGTH
            assert report.usage.completion_tokens == 400
