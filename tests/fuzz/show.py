"""Print the steps of a script that breaks something, as short as it can be and still do so.

python -m tests.fuzz.show FILE [NEW FILE]: with a second name the shortened script is written there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.parent_side import KINDS, Broken, harness
from tests.fuzz.script import Do, Step, bytes_of, steps_of


def complaint(steps: Sequence[Step]) -> str | None:
    """Return what a script breaks, or None."""
    with harness() as one, one() as side:
        try:
            side.run(steps)
            side.conclude()
        except Broken as broken:
            return str(broken)
        except Exception as error:
            return repr(error)
    return None


def shortened(steps: list[Step]) -> list[Step]:
    """Leave out every step without which it still breaks something."""
    at = len(steps) - 1
    while at >= 0:
        fewer = steps[:at] + steps[at + 1 :]
        if complaint(fewer):
            steps = fewer
        at -= 1
    return steps


def line_of(each: Step) -> str:
    """Return one step for a reader."""
    if each.do in (Do.PROPER, Do.BUT):
        rest = f" field {each.number(3)} = {each.payload[4:60].hex(' ')}" if each.do is Do.BUT else ""
        return f"{each.do.name} {KINDS[each.number(0) % len(KINDS)]} {each.number(1)} {each.number(2)}{rest}"
    return f"{each.do.name} {each.payload[:60].hex(' ')}"


def main() -> None:
    """Show one."""
    steps = list(steps_of(Path(sys.argv[1]).read_bytes()))
    if complaint(steps):
        steps = shortened(steps)
    print(*(line_of(each) for each in steps), f"→ {complaint(steps) or 'nothing breaks'}", sep="\n")
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_bytes(bytes_of(steps))


if __name__ == "__main__":
    main()
