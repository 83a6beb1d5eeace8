"""What holds for every table: a missing row is the error, a stray rule is caught, states are values."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest

from infervisor.protocol.errors import LocalProtocolError
from infervisor.protocol.machines import attempt, process, request, slot
from infervisor.protocol.machines.table import NoSuchRow, Row, Table


class Light(enum.StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True, slots=True)
class State:
    phase: Light = Light.RED


class Switch:
    pass


class SwitchHarder(Switch):
    pass


def test_a_step_returns_the_state_after_and_the_effects() -> None:
    def turn(state: State, event: Switch, now: int) -> tuple[State, tuple[object, ...]]:
        return replace(state, phase=Light.GREEN), ("effect", event, now)

    table: Table[State] = Table("light", {(Light.RED, Switch): Row((Light.GREEN,), turn)})
    event, state = Switch(), State()
    assert table.step(state, event, 7) == (State(Light.GREEN), ("effect", event, 7))
    assert state == State(Light.RED)
    with pytest.raises(NoSuchRow, match="light: Switch can't happen while green"):
        table.step(State(Light.GREEN), event, 7)
    # A subclass is another event: it needs a row of its own.
    with pytest.raises(NoSuchRow, match="SwitchHarder"):
        table.step(state, SwitchHarder(), 7)


def test_a_rule_that_strays_from_its_row_is_caught() -> None:
    table: Table[State] = Table(
        "light", {(Light.RED, Switch): Row((Light.RED,), lambda state, event, now: (State(Light.GREEN), ()))}
    )
    with pytest.raises(NoSuchRow, match="leads from red to green"):
        table.step(State(), Switch(), 0)


def test_a_missing_row_is_a_protocol_error_with_a_code_of_its_own() -> None:
    assert issubclass(NoSuchRow, LocalProtocolError)
    assert NoSuchRow.code == "no_such_row"


MACHINES = [
    pytest.param(request, request.REQUEST, {"ended"}, id="request"),
    pytest.param(attempt, attempt.ATTEMPT, {"released"}, id="attempt"),
    pytest.param(process, process.PROCESS, {"exited"}, id="process"),
    pytest.param(slot, slot.SLOT, {"stopped"}, id="slot"),
]


@pytest.mark.parametrize(("module", "table", "terminal"), MACHINES)
def test_exactly_the_terminal_phases_are_never_left(
    module: Any, table: Table[Any], terminal: set[str]
) -> None:
    phases = {phase for phase, _ in table.rows} | {to for row in table.rows.values() for to in row.to}
    [enumeration] = {type(phase) for phase in phases}
    assert phases | terminal == set(enumeration)
    left = {phase for (phase, _), row in table.rows.items() if set(row.to) != {phase}}
    assert left == phases - terminal


@pytest.mark.parametrize(("module", "table", "terminal"), MACHINES)
def test_every_phase_is_reached_and_reaches_the_end(
    module: Any, table: Table[Any], terminal: set[str]
) -> None:
    edges = {(phase, to) for (phase, _), row in table.rows.items() for to in row.to}
    first = next(iter(type(next(iter(table.rows))[0])))
    reached = {first}
    for _ in edges:
        reached |= {to for phase, to in edges if phase in reached}
    assert reached == set(type(first))
    ends = set(terminal)
    for _ in edges:
        ends |= {phase for phase, to in edges if to in ends}
    assert ends == set(type(first))


@pytest.mark.parametrize(("module", "table", "terminal"), MACHINES)
def test_states_events_and_effects_are_frozen(module: Any, table: Table[Any], terminal: set[str]) -> None:
    values: list[Any] = [
        member
        for member in vars(module).values()
        if inspect.isclass(member)
        and member.__module__ == module.__name__
        and dataclasses.is_dataclass(member)
    ]
    assert len(values) >= 6
    for cls in values:
        assert cls.__dataclass_params__.frozen, cls
        assert "__slots__" in vars(cls), cls
    assert {kind for _, kind in table.rows} <= set(values)
