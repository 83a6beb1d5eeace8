"""When a sequence's memory is written down, and where: snapshots from which another worker goes on.

Owns the mappings of the shared memory and the areas of the open slots; the descriptor is the parent's. Decides
after a step whether one snapshot is worth its time, and takes at most one, since everybody waits for it.
Whatever goes wrong here costs snapshots and nothing else. Runs in the work loop's thread, between steps.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from infervisor.worker.engine import Engine, KeepsSnapshots, ModelFacts
from infervisor.worker.outbox import Outbox
from infervisor.worker.snapshot_area import Area, hash_of

TOKENS_APART = 8
LONGEST_S = 0.25
"""What is expected to take longer is left: a cancel would have to wait for it."""
SLACK = 1.1
"""How much more than the prompt's pages are made ready, for the answer's first tokens."""
POPULATE_BYTES = 8 << 20
"""How many bytes of new pages are made ready between two steps, at most: about 8 ms."""
MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14
WARM_BYTE_S, COLD_BYTE_S, FIXED_S = 0.2e-9, 1e-9, 50e-6
"""First guesses of what a byte costs, and one whose page hasn't been used yet; and what a snapshot costs anyway."""


@dataclass(slots=True)
class Costs:
    """What snapshots cost on this machine, learned from those taken. Pure."""

    warm_byte_s: float = WARM_BYTE_S
    cold_byte_s: float = COLD_BYTE_S

    def expected_s(self, size_bytes: float, cold_bytes: float) -> float:
        """Return the time for a snapshot of `size_bytes`, of which `cold_bytes` go to pages never used."""
        return FIXED_S + size_bytes * self.warm_byte_s + cold_bytes * self.cold_byte_s

    def learn(self, size_bytes: int, cold_bytes: int, took_s: float) -> None:
        """Take the measured time of one."""
        rest_s = max(0.0, took_s - FIXED_S)
        if cold_bytes * 10 < size_bytes:
            self.warm_byte_s = (self.warm_byte_s + rest_s / size_bytes) / 2
        else:
            cold_s = max(0.0, rest_s - size_bytes * self.warm_byte_s)
            self.cold_byte_s = (self.cold_byte_s + cold_s / cold_bytes) / 2

    def learn_pages(self, size_bytes: int, took_s: float) -> None:
        """Take the measured time of making new pages ready."""
        self.cold_byte_s = (self.cold_byte_s + took_s / size_bytes) / 2


@dataclass(slots=True)
class Pacing:
    """When one sequence's next snapshot is due. Pure: seconds and tokens in, a decision out.

    share: of the sequence's computing time, what snapshots may take. It is saved up until one can be paid for, and
    what one cost more than expected is paid later; no more than one is ever paid for ahead.
    """

    share: float
    saved_tokens: int = 0
    purse_s: float = 0.0
    owed: int = 0
    """How many of the next ones are free: the first in each buffer of a new process that goes on. Its pages are
    new to that process, and until they have been used the next snapshot would be seconds away."""
    is_at_end: bool = False
    """Whether there is one of the whole prompt: the first after the reading isn't waited for, since it saves the
    most."""

    def worked(self, seconds: float) -> None:
        """Count computing time."""
        self.purse_s += seconds * self.share

    def is_due(self, tokens: int, cost_s: float, *, reading: bool) -> bool:
        """Whether to write down `tokens` tokens for `cost_s`.

        reading: the prompt isn't all in memory. Then half is kept for the snapshot at its end, the most useful one.
        """
        if tokens - self.saved_tokens < TOKENS_APART or cost_s > LONGEST_S:
            return False
        if reading:
            return self.purse_s >= 2 * cost_s
        return self.owed > 0 or not self.is_at_end or self.purse_s >= cost_s

    def spent(self, seconds: float) -> None:
        """Count time that was spent for snapshots beside taking them."""
        self.purse_s -= seconds

    def saved(self, tokens: int, took_s: float, *, reading: bool = False) -> None:
        """Count a snapshot that took `took_s`."""
        self.saved_tokens = tokens
        self.is_at_end = self.is_at_end or not reading
        paid_s, self.owed = 0.0 if self.owed else took_s, max(0, self.owed - 1)
        self.purse_s = min(self.purse_s - paid_s, took_s)

    def restored(self, tokens: int) -> None:
        """Count what a snapshot gave back."""
        self.saved_tokens = tokens
        self.owed, self.is_at_end = 2, True


@dataclass(slots=True)
class _Kept:
    """A slot with an area.

    warm_bytes: how much of each buffer this attempt has used. token_bytes: what a token takes, as far as is known.
    """

    place: tuple[int, int]
    view: memoryview
    area: Area
    pacing: Pacing
    warm_bytes: list[int] = field(default_factory=lambda: [0, 0])
    token_bytes: float = 0.0


class Snapshots:
    """The snapshots of one worker."""

    def __init__(
        self, engine: KeepsSnapshots, fingerprint: str, fd: int | None, share: float, outbox: Outbox
    ) -> None:
        self._engine = engine
        self._fingerprint_hash = hash_of(fingerprint.encode())
        self._fd = fd
        self._share = share
        self._outbox = outbox
        self._costs = Costs()
        self._kept: dict[int, _Kept] = {}
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}
        self._complained = False
        self._populates = True

    @classmethod
    def of(
        cls, engine: Engine, facts: ModelFacts, fd: int | None, share: float | None, outbox: Outbox
    ) -> Snapshots | None:
        """Return the snapshots of a loaded engine; None if it keeps none or none are wanted."""
        if not isinstance(engine, KeepsSnapshots) or not share:
            return None
        return cls(engine, facts.fingerprint, fd, share, outbox)

    def open(self, slot: int, place: Sequence[int] | None) -> int:
        """Use the area at `place` (offset, bytes) for a slot that no step has included yet.

        Returns how many tokens the slot then has in memory: from what a worker before this one left there, or what
        it had before, if that is more.
        """
        if place is not None:
            try:
                self._open(slot, (place[0], place[1]))
            except Exception as error:
                self._give_up(slot, f"can't use the memory at offset {place[0]}, {place[1]} bytes", error)
        return self._engine.tokens_in_memory(slot)

    def _open(self, slot: int, place: tuple[int, int]) -> None:
        view = memoryview(self._map(place))
        kept = _Kept(place, view, Area(view, self._fingerprint_hash), Pacing(self._share))
        self._kept[slot] = kept
        engine = self._engine
        restored = kept.area.restore(
            engine.tokens(slot), lambda data, tokens: engine.restore(slot, data, tokens)
        )
        if restored:
            kept.pacing.restored(restored)

    def _map(self, place: tuple[int, int]) -> mmap.mmap:
        mapped = self._mapped.get(place)
        if mapped is None:
            # A mapping stays after its request, for the next one that gets the same area: its pages are warm.
            used = {kept.place for kept in self._kept.values()}
            for other in [other for other in self._mapped if other not in used]:
                del self._mapped[other]
            if self._fd is None:
                raise ValueError("this worker was given no shared memory")
            if not place[1]:
                raise ValueError("an area of no bytes")
            mapped = self._mapped[place] = mmap.mmap(self._fd, place[1], offset=place[0])
        return mapped

    def worked(self, slots: Iterable[tuple[int, bool]], seconds: float) -> None:
        """Count `seconds` of a step for each slot, and perhaps take a snapshot.

        slots: each with whether it is still reading.
        """
        if not self._kept:
            return
        slot = -1
        due: list[tuple[float, int, bool]] = []
        try:
            for slot, reading in slots:
                kept = self._kept.get(slot)
                if kept is not None:
                    kept.pacing.worked(seconds)
                    if self._is_due(slot, kept, reading):
                        due.append((kept.pacing.purse_s, slot, reading))
                    elif reading and self._populates:
                        self._populate(slot, kept)
            if due:
                _, slot, reading = max(due)
                self._save(slot, self._kept[slot], reading)
        except Exception as error:
            self._give_up(slot, "can't be taken", error)

    def _populate(self, slot: int, kept: _Kept) -> None:
        """While reading pays for it, have pages ready for the snapshot at the prompt's end and the one after it.

        A page that has never been used takes eight times as long to write. Half of what is saved up stays for them.
        """
        affordable = int(kept.pacing.purse_s / 2 / max(self._costs.cold_byte_s, 1e-12))
        if affordable < mmap.PAGESIZE or not self._learn_size(slot, kept):
            return
        wanted = min(kept.area.capacity_bytes, int(len(self._engine.tokens(slot)) * kept.token_bytes * SLACK))
        buffer = min((0, 1), key=lambda one: kept.warm_bytes[one])
        start = kept.warm_bytes[buffer] // mmap.PAGESIZE * mmap.PAGESIZE
        count = min(wanted - start, affordable, POPULATE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        if count <= 0:
            return
        began_s = time.monotonic()
        try:
            offset = kept.area.starts[buffer] + start
            self._mapped[kept.place].madvise(MADV_POPULATE_WRITE, offset, count)
        except OSError:
            # An older kernel: pages come when they are written, and the first snapshots take longer.
            self._populates = False
            return
        took_s = time.monotonic() - began_s
        kept.warm_bytes[buffer] = start + count
        kept.pacing.spent(took_s)
        self._costs.learn_pages(count, took_s)

    def _learn_size(self, slot: int, kept: _Kept) -> bool:
        """Learn what a token takes; return whether that is known."""
        if not kept.token_bytes:
            tokens = self._engine.tokens_in_memory(slot)
            kept.token_bytes = self._engine.snapshot_bytes(slot) / tokens if tokens else 0.0
        return kept.token_bytes > 0

    def _is_due(self, slot: int, kept: _Kept, reading: bool) -> bool:
        """Whether a snapshot can be paid for and fits."""
        tokens = self._engine.tokens_in_memory(slot)
        # By what is known of its size first: asking the engine takes longer than all the rest.
        if not self._is_worth(kept, tokens, tokens * kept.token_bytes, reading):
            return False
        size_bytes = self._engine.snapshot_bytes(slot)
        kept.token_bytes = size_bytes / tokens
        return size_bytes > 0 and self._is_worth(kept, tokens, size_bytes, reading)

    def _is_worth(self, kept: _Kept, tokens: int, size_bytes: float, reading: bool) -> bool:
        if size_bytes > kept.area.capacity_bytes:
            return False
        cold_bytes = max(0, size_bytes - kept.warm_bytes[kept.area.next_buffer])
        return kept.pacing.is_due(tokens, self._costs.expected_s(size_bytes, cold_bytes), reading=reading)

    def _save(self, slot: int, kept: _Kept, reading: bool) -> None:
        began_s = time.monotonic()
        tokens = self._engine.tokens_in_memory(slot)
        buffer = kept.area.next_buffer
        written = kept.area.save(
            self._engine.tokens(slot)[:tokens], lambda memory: self._engine.save(slot, memory)
        )
        took_s = time.monotonic() - began_s
        kept.pacing.saved(tokens, took_s, reading=reading)
        if written:
            cold_bytes = max(0, written - kept.warm_bytes[buffer])
            kept.warm_bytes[buffer] = max(kept.warm_bytes[buffer], written)
            self._costs.learn(written, cold_bytes, took_s)

    def close(self, slot: int) -> None:
        """Let go of a slot's area. Does nothing for a slot without one."""
        kept = self._kept.pop(slot, None)
        if kept is not None:
            kept.view.release()

    def _give_up(self, slot: int, what: str, error: Exception) -> None:
        self._kept.pop(slot, None)
        if not self._complained:
            self._complained = True
            self._outbox.log(
                "warning", f"a snapshot {what}: {type(error).__name__}: {error}; going on without"
            )
