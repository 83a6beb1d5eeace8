"""A life cycle as a table: `step(state, event, now) → (state, effects)`. A missing row is the error.

A row names the phases that it may lead to, so that diagrams can be drawn from the tables and a rule that
strays is caught. Effects are frozen values; a thin shell carries them out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from infervisor.protocol.errors import LocalProtocolError


class HasPhase(Protocol):
    """A state: a frozen value with a phase."""

    @property
    def phase(self) -> enum.StrEnum:
        """The row group in the table."""
        ...


S = TypeVar("S", bound=HasPhase)


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """What an event does in a phase: the phases it may lead to, and the rule."""

    to: tuple[enum.StrEnum, ...]
    rule: Callable[[S, Any, int], tuple[S, tuple[Any, ...]]]


class NoSuchRow(LocalProtocolError):
    """The event can't happen in this phase. Who sent it decides whose fault that is."""

    code = "no_such_row"


@dataclass(frozen=True, slots=True)
class Table(Generic[S]):
    """All rows of one life cycle."""

    name: str
    rows: Mapping[tuple[enum.StrEnum, type[Any]], Row[S]]

    def allows(self, state: S, event: object) -> bool:
        """Whether the event has a row in this phase."""
        return (state.phase, type(event)) in self.rows

    def step(self, state: S, event: object, now: int) -> tuple[S, tuple[Any, ...]]:
        """Return the state after `event` and the effects to carry out.

        Raises `NoSuchRow` if the event has no row in this phase; the state is then unchanged.
        """
        row = self.rows.get((state.phase, type(event)))
        if row is None:
            raise NoSuchRow(f"{self.name}: {type(event).__name__} can't happen while {state.phase}")
        after, effects = row.rule(state, event, now)
        if after.phase not in row.to:
            raise NoSuchRow(
                f"{self.name}: {type(event).__name__} leads from {state.phase} to {after.phase}, "
                "which its row doesn't name"
            )
        return after, effects
