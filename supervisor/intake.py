"""From a call to a request: what the caller left out is filled in, everything is checked, and nothing starts yet.

Owns the defaults of one supervisor. Runs in the loop's thread, synchronously.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from infervisor.protocol.errors import ConfigurationError, InvalidRequest
from infervisor.protocol.quoting import quoted
from infervisor.supervisor.dispatcher import Dispatcher
from infervisor.supervisor.embedding_request import EmbeddingRequest
from infervisor.supervisor.lookout import Lookout, warning_of
from infervisor.supervisor.mailbox import Mailbox
from infervisor.supervisor.request_input import REQUEST_OPTIONS, RequestInput, check_request
from infervisor.supervisor.resume import OnCrash, check_on_crash
from infervisor.supervisor.settings import Deadlines
from infervisor.supervisor.stream import Stream

S = TypeVar("S", bound=Stream)


class Intake:
    """Makes the streams of one supervisor. window, window_s, deadlines, on_crash: what they have by default."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        mailbox: Mailbox,
        lookout: Lookout,
        *,
        window: int,
        window_s: float | None,
        deadlines: Deadlines,
        on_crash: OnCrash,
    ) -> None:
        self._dispatcher = dispatcher
        self._mailbox = mailbox
        self._lookout = lookout
        self._window = window
        self._window_s = window_s
        self._deadlines = deadlines
        self._on_crash = on_crash

    def streams(
        self, prompt: object, messages: object, options: Mapping[str, Any], n: object = 1
    ) -> list[Stream]:
        """Return n streams, each with its own seed. options: by name, those of sampling among them.

        Raises `InvalidRequest` naming the field.
        """
        named = {name: value for name, value in options.items() if name in REQUEST_OPTIONS}
        sampling = {name: value for name, value in options.items() if name not in REQUEST_OPTIONS}
        deadlines, on_crash = named.pop("deadlines", None), named.pop("on_crash", None)
        if named.get("window") is None:
            named["window"] = self._default_window()
        return self.of(
            check_request(prompt, messages, sampling=sampling, choices=n, **named),
            deadlines,
            on_crash,
            Stream,
        )

    def embedding(
        self, given: RequestInput, deadlines: object = None, on_crash: object = None
    ) -> EmbeddingRequest:
        """Return the request that embeds checked texts. Raises as `of`."""
        (made,) = self.of(given, deadlines, on_crash, EmbeddingRequest)
        return made

    def of(self, given: RequestInput, deadlines: object, on_crash: object, kind: type[S]) -> list[S]:
        """Return a stream for each choice of a checked request. Raises `InvalidRequest` for the other two."""
        if deadlines is not None and not isinstance(deadlines, Deadlines):
            raise InvalidRequest(
                f"deadlines must be made with Deadlines(…), not {quoted(deadlines)}", "deadlines"
            )
        try:
            survival = self._on_crash if on_crash is None else check_on_crash(on_crash)
        except ConfigurationError as error:
            raise InvalidRequest(str(error), "on_crash") from None
        # A short answer is whole before the next look at the file.
        self._lookout.look_at_model()
        change = self._lookout.change()
        made: list[S] = []
        group: int | None = None
        for index in range(given.choices):
            choice = given.choice(index)
            request = self._dispatcher.create(choice, deadlines or self._deadlines, survival, group)
            if given.choices > 1:
                group = request.group = group or request.id
            if change is not None:
                request.warnings.append(warning_of(change))
            made.append(kind(self._dispatcher, self._mailbox, request))
        return made

    def _default_window(self) -> int:
        if self._window_s is None:
            return self._window
        return self._dispatcher.rates.window_tokens(self._window_s, self._window)
