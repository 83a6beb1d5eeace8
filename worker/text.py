"""Token bytes to text that is safe to show.

Owns the unfinished UTF-8 character and the hold-back: the longest end of the text that could still become
a stop string. Nothing of a stop string is ever returned, and nothing held back is ever lost. Pure; used by
the work loop only.
"""

from __future__ import annotations

import codecs


class StopString:
    """One stop string as an automaton (Knuth, Morris, Pratt): how much of it the text ends with."""

    __slots__ = ("_fallback", "_text", "matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self.matched = 0
        # _fallback[n]: the longest proper prefix of the stop string that its first n characters end with.
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for position in range(1, len(text)):
            while length and text[position] != text[length]:
                length = self._fallback[length]
            if text[position] == text[length]:
                length += 1
            self._fallback[position + 1] = length

    def advance(self, character: str) -> bool:
        """Take one character; return whether the text now ends with the whole stop string."""
        matched = self.matched
        while matched and self._text[matched] != character:
            matched = self._fallback[matched]
        if self._text[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(self._text)


class TextAssembler:
    """The text of one answer. After `stopped` it returns nothing more."""

    __slots__ = ("_decoder", "_held", "_stops", "stopped")

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [StopString(text) for text in stop]
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        """Take the bytes of a token; return the text that can be shown now, perhaps none.

        Of several stop strings the one that is complete first ends the text, the longest of those that are
        complete at the same character. Costs O(len(data) × number of stop strings).
        """
        return self._match(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what is held back at the end; an unfinished character becomes one U+FFFD.

        That character may complete a stop string: look at `stopped` afterwards.
        """
        shown = self._match(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return shown + held

    def _match(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        for position in range(len(self._held), len(seen)):
            character = seen[position]
            complete = [stop.matched for stop in self._stops if stop.advance(character)]
            if complete:
                self.stopped = True
                self._held = ""
                return seen[: position + 1 - max(complete)]
        held = max(stop.matched for stop in self._stops)
        self._held = seen[len(seen) - held :]
        return seen[: len(seen) - held]
