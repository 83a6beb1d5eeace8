"""Which supervisor serves which name of a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from infervisor import ConfigurationError, Supervisor
from infervisor.supervisor.http_api.errors import HttpRefused


class Models:
    """Names and their supervisors, in order; the first is taken where a client names none.

    aliases: further names, each of one that is there.
    """

    def __init__(
        self, supervisors: Mapping[str, Supervisor], aliases: Mapping[str, str] | None = None
    ) -> None:
        if not supervisors:
            raise ConfigurationError("there is no model to serve: name one")
        self._supervisors = dict(supervisors)
        self._aliases = dict(aliases or {})
        for alias, name in self._aliases.items():
            if alias in self._supervisors:
                raise ConfigurationError(f"the alias {alias!r} is the name of a model: choose another one")
            if name not in self._supervisors:
                raise ConfigurationError(
                    f"the alias {alias!r} is for {name!r}, which isn't served; there are {', '.join(supervisors)}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models, without aliases."""
        return tuple(self._supervisors)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names, and whose they are."""
        return dict(self._aliases)

    def items(self) -> Iterable[tuple[str, Supervisor]]:
        """Each name with its supervisor."""
        return self._supervisors.items()

    def find(self, name: str | None) -> tuple[str, Supervisor]:
        """Return the model's own name and its supervisor. Raises `HttpRefused` for a name that isn't there."""
        if name is None:
            return next(iter(self._supervisors.items()))
        own = self._aliases.get(name, name)
        if own not in self._supervisors:
            known = (*self._supervisors, *self._aliases)
            close = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise HttpRefused(
                "model_not_found",
                f"There is no model {name[:80]!r}: {meant}Served here: {', '.join(known)}.",
                "model",
            )
        return own, self._supervisors[own]


def name_of(supervisor: Supervisor) -> str:
    """Return the name of a model that was given without one: its file's, without the ending."""
    path = supervisor.model
    return "default" if path is None else PurePath(path).stem
