"""The clients of a soak: patient and hasty ones, slow readers, some that cancel, leave, or forget their stream.

What a client does is drawn from its number alone. Each reads one stream as its kind does, and judges what it got.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from infervisor import Deadlines, EndReason, InfervisorError, Stream, Supervisor
from infervisor.supervisor.report import Report
from tests.chaos.invariants import Asked, Got, History, violations
from tests.chaos.questions import POISON, Question, Speaker, count

RELEASE_S = 180.0
"""How long a release may take at most: a worker that hangs is found out by then."""
CANCELLED = frozenset([EndReason.CANCELLED])
CANCELS = ("cancel", "early", "leave", "drop", "kill")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fail": {"on_crash": "fail"},
    "slow": {"window": 2},
    "hasty": {"deadlines": Deadlines(total_s=0.05)},
    "impatient": {"deadlines": Deadlines(first_token_s=0.02)},
    "idle": {"deadlines": Deadlines(consumer_s=0.05), "window": 4},
}
ALLOWED: Mapping[str, frozenset[EndReason]] = {
    **dict.fromkeys(CANCELS, CANCELLED),
    "hasty": frozenset([EndReason.TOTAL_TIMEOUT]),
    "impatient": frozenset([EndReason.FIRST_TOKEN_TIMEOUT]),
    "idle": frozenset([EndReason.CONSUMER_TIMEOUT]),
}
"""Ends that a client's kind may cause."""
OTHERS = {"whole": 56, "generate": 12, "fail": 10, "slow": 8, "hasty": 4, "impatient": 2, "idle": 2}
KILLS = 0.03
"""The share of cancels that go straight to the last rung: each costs a worker."""


@dataclass(frozen=True)
class Client:
    """One client: what it asks, and what kind it is."""

    asked: Asked
    question: Question
    draw: random.Random

    @classmethod
    def drawn(cls, seed: str, number: int, speaker: Speaker, cancels: float, poison: bool) -> Client:
        """Return client `number`. cancels: the share of those that end early. poison: its prompt kills workers."""
        draw = random.Random(f"{seed} {number}")
        question = speaker.question(draw)
        if poison:
            exact = count(20)
            options = {"max_tokens": 20, "temperature": 0.0}
            asked = Asked(number, "poison", exact, poison=True)
            return cls(asked, Question(f"{POISON} {number}", exact, options), draw)
        if draw.random() < cancels:
            kind = "kill" if draw.random() < KILLS else draw.choice(CANCELS[:-1])
        else:
            kind = draw.choices(list(OTHERS), list(OTHERS.values()))[0]
        asked = Asked(
            number, kind, question.exact, ALLOWED.get(kind, frozenset()),
            resumes=kind != "fail", reads_all=kind not in ("leave", "drop"),
        )  # fmt: skip
        return cls(asked, question, draw)

    async def ask(self, supervisor: Supervisor, history: History, max_resumes: int) -> list[str]:
        """Ask, read as its kind does, wait for the release, and return what is wrong."""
        got = Got()
        stream = supervisor.stream(
            self.question.prompt, **self.question.options, **SETTINGS.get(self.asked.kind, {})
        )
        report: Callable[[], Report] = lambda: stream.report  # noqa: E731 (dropped together with its stream)
        try:
            with anyio.fail_after(RELEASE_S):
                if self.asked.kind == "drop":
                    request = stream._request
                    report = request.report
                    await stream.__aenter__()
                    await self._take(stream, got, self._some())
                    del stream
                    gc.collect()
                    await request.released.wait()
                elif self.asked.kind == "generate":
                    text = await self._whole(stream, got)
                    if text is not None:
                        # Its chunks aren't seen: its text is judged, and what the report says.
                        got.texts.append(text)
                        got.ids.extend(self.asked.exact.ids)
                else:
                    async with stream:
                        await self._read(stream, got)
                    await stream.released()
        except InfervisorError as error:
            got.code = error.code
        except TimeoutError:
            return [f"request {self.asked.number} ({self.asked.kind}) got stuck; {report().to_line()}"]
        return violations(self.asked, got, report(), history, max_resumes)

    def _some(self) -> int:
        return self.draw.choice((0, 1, 3, 8, 20))

    async def _whole(self, stream: Stream, got: Got) -> str | None:
        try:
            async with stream:
                return await stream.text()
        except InfervisorError as error:
            got.code = error.code
            return None

    async def _read(self, stream: Stream, got: Got) -> None:
        match self.asked.kind:
            case "cancel":
                await self._take(stream, got, self._some())
                stream.cancel()
                await self._take(stream, got)
            case "early":
                stream.cancel()
                await self._take(stream, got)
            case "kill":
                await self._take(stream, got, 1 + self._some())
                stream.kill()
                await self._take(stream, got)
            case "leave":
                await self._take(stream, got, self._some())
            case "slow":
                await self._take(stream, got, pause_s=self.draw.uniform(0, 0.006))
            case "idle":
                await self._take(stream, got, 1)
                await anyio.sleep(0.1)
                await self._take(stream, got)
            case _:
                await self._take(stream, got)

    async def _take(self, stream: Stream, got: Got, chunks: int = 1 << 30, pause_s: float = 0) -> None:
        while chunks:
            chunks -= 1
            try:
                got.take(await anext(stream))
            except StopAsyncIteration:
                return
            if pause_s:
                await anyio.sleep(pause_s)
