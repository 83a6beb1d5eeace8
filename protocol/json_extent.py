"""Where a JSON object or list in a stream of text ends. Pure; keeps only how far it has looked."""

from __future__ import annotations

import re

_MATTERS = re.compile(r'["{}\[\]]')
_STRING_MATTERS = re.compile(r'["\\]')


class JsonExtent:
    """Looks for the end of the object or list that begins at `start`; never looks at a character twice."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """Return the index after the closing bracket, or None if `text` ends before it.

        text: what it was given before, and more. Whether it is valid JSON is for a parser to say.
        """
        while found := (_STRING_MATTERS if self._in_string else _MATTERS).search(text, self._at):
            character = found.group()
            if character == "\\":
                if found.end() == len(text):
                    self._at = found.start()
                    return None
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        self._at = len(text)
        return None
