"""The slots of one context: what is in memory of which sequence, and what earlier ones left there.

Owns positions and the memory behind them: reading, decoding, rolling back, copying between slots, snapshots. Knows
tokens; knows nothing of text, samplers or requests. Runs in the work loop's thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from infervisor.worker.engine import Prefilled
from infervisor.worker.engines.llama.decoder import Decoder
from infervisor.worker.engines.llama.prefix import Held, choose, common

REPLAY_SECONDS = 0.2
"""How long one step may decode delivered tokens again."""


@dataclass(slots=True, eq=False)
class Tape:
    """The tokens of one sequence: in a slot, or what its slot still holds of it.

    tokens: prompt, then delivered and sampled tokens. prompt_end: how many of them are prefilled in slices:
    all of the prompt but its last token, which is decoded by the first sampling step, because its output is
    wanted then and other sequences' steps may come between. position: tokens in memory. reading: not all
    of `tokens` but the last are in memory, or that hasn't been reported yet. source: the slot from which a
    beginning is to be copied in the first step; copied: how many were, and haven't been told yet. is_sound: no
    step with it has failed. released: when, as a count; −1 before.
    """

    tokens: list[int]
    prompt_end: int
    position: int = 0
    reading: bool = True
    source: int | None = None
    copied: int = 0
    is_sound: bool = True
    released: int = -1

    @property
    def missing(self) -> int:
        """Tokens that must be read before the next one can be sampled."""
        return len(self.tokens) - 1 - self.position


class Sequences:
    """The slots of one decoder.

    slice_tokens: the length that all slices must have where what is computed depends on it, or None; then only
    whole slices are taken over from others. reuses: whether anything is.
    """

    def __init__(self, decoder: Decoder, slots: int, *, slice_tokens: int | None, reuses: bool) -> None:
        self._decoder = decoder
        self._unit = slice_tokens or 1
        self._reuses = reuses
        self._open: list[Tape | None] = [None] * slots
        self._left: list[Tape | None] = [None] * slots
        """Of each free slot: whose memory it still holds."""
        self._releases = itertools.count()

    def __getitem__(self, slot: int) -> Tape:
        tape = self._open[slot]
        if tape is None:
            raise RuntimeError(f"slot {slot} is free: nothing was opened in it")
        return tape

    # --- in and out --------------------------------------------------------------------------------

    def open(
        self, slots: Sequence[int], prompt: Sequence[int], delivered: Sequence[int]
    ) -> tuple[int, Tape, tuple[int, int] | None]:
        """Put a sequence into the best of the free `slots`. Returns slot, tape and `worker.engine.Opened.after`."""
        for slot in slots:
            if self._open[slot] is not None:
                raise RuntimeError(f"slot {slot} is taken")
        tape = Tape([*prompt, *delivered], len(prompt) - 1)
        held = [self._held(slot, slot in slots) for slot in range(len(self._open))]
        choice = choose(held, prompt, tape.prompt_end, self._unit)
        slot = choice.slot
        after: tuple[int, int] | None = None
        if choice.source is None:
            tape.position = self._decoder.keep(slot, choice.keep)
        elif choice.waits:
            self._decoder.forget(slot)
            tape.source = choice.source
            after = (choice.source, choice.copy)
        else:
            tape.position = self._decoder.copy(choice.source, slot, choice.copy)
        self._open[slot], self._left[slot] = tape, None
        return slot, tape, after

    def _held(self, slot: int, is_free: bool) -> Held:
        tape = self._open[slot] or self._left[slot]
        if tape is None or not self._reuses or not tape.is_sound:
            return Held(slot, (), 0, 0, is_free)
        coming = tape.prompt_end if tape.reading else tape.position
        return Held(
            slot, tape.tokens, self._lasting(tape, tape.position), self._lasting(tape, coming), is_free,
            tape.released,
        )  # fmt: skip

    def _lasting(self, tape: Tape, position: int) -> int:
        """Of the tokens before `position`, those that another sequence may take over."""
        # What was decoded one by one isn't to the last bit what a slice would have computed.
        return position if self._unit == 1 else min(position, tape.prompt_end)

    def release(self, slot: int) -> None:
        """Free the slot; what is in its memory stays for a sequence that begins alike."""
        tape = self._open[slot]
        if tape is None:
            return
        self._open[slot] = None
        if not self._reuses or not tape.is_sound or not tape.position:
            self._decoder.forget(slot)
            return
        tape.released = next(self._releases)
        del tape.tokens[tape.position :]
        self._left[slot] = tape

    # --- steps -------------------------------------------------------------------------------------

    def read(self, slot: int, most: int) -> bool:
        """Advance a sequence that isn't all in memory by at most `most` tokens; return whether that was done."""
        tape = self[slot]
        self._copy(slot, tape)
        if tape.position < tape.prompt_end:
            stop = min(tape.prompt_end, tape.position + min(most, self._decoder.batch_tokens))
            tape.position, finished = self._decoder.prefill(slot, tape.tokens, tape.position, stop)
            return finished
        # Delivered tokens go in one by one, as they did when they were first computed: read as a slice,
        # they would leave slightly different numbers in memory, and another answer after them.
        until = time.monotonic() + REPLAY_SECONDS
        while tape.missing and most > 0 and time.monotonic() < until:
            if not self.decode([slot], outputs=False):
                return False
            most -= 1
        return True

    def _copy(self, slot: int, tape: Tape) -> None:
        """Take over from another slot what was being read there when this sequence came."""
        source, tape.source = tape.source, None
        if source is None:
            return
        # Race "it was released meanwhile, and another one came": what is there now decides.
        held = self._held(source, self._open[source] is None)
        reach = min(common(held.tokens, tape.tokens), held.in_memory, tape.prompt_end)
        count = reach // self._unit * self._unit
        if count > tape.position:
            tape.position = tape.copied = self._decoder.copy(source, slot, count)

    def told(self, slot: int) -> Prefilled:
        """Return what to tell of a sequence that `read` has advanced.

        It counts as read once that is told, not before: a step that is cut after its slice tells nothing, and the
        next one must not answer with a token that nobody had asked for.
        """
        tape = self[slot]
        total = len(tape.tokens)
        tape.reading = tape.missing > 0
        copied, tape.copied = tape.copied, 0
        return Prefilled(tape.position if tape.reading else total, total, copied)

    def decode(self, slots: Sequence[int], *, outputs: bool = True) -> bool:
        """Decode the next token of each sequence. If interrupted, put memory right and return False."""
        tapes = [self[slot] for slot in slots]
        tokens = [tape.tokens[tape.position] for tape in tapes]
        finished = self._decoder.decode(slots, tokens, [tape.position for tape in tapes], outputs=outputs)
        for slot, tape in zip(slots, tapes, strict=True):
            if finished:
                tape.position += 1
                continue
            tape.position = self._decoder.roll_back(slot, tape.position)
            tape.reading = tape.reading or tape.missing > 0
        return finished

    def least_held(self, slots: Sequence[int]) -> int:
        """Return the slot of `slots` whose memory will be missed least."""
        left = self._left
        return min(slots, key=lambda slot: -1 if (tape := left[slot]) is None else tape.released)

    def doubt(self, slots: Sequence[int]) -> None:
        """A step with these failed: nobody may take over what they have in memory."""
        for slot in slots:
            tape = self._open[slot]
            if tape is not None:
                tape.is_sound = False

    # --- snapshots ---------------------------------------------------------------------------------

    def restore(self, slot: int, memory: memoryview, tokens: int) -> bool:
        """Copy the KV memory of the first `tokens` tokens back, unless as much is there already."""
        tape = self[slot]
        if not tape.position < tokens < len(tape.tokens):
            return False
        self._decoder.forget(slot)
        tape.position, tape.source = 0, None
        restored = self._decoder.restore(slot, memory, tokens)
        if restored:
            tape.position = tokens
        return restored
