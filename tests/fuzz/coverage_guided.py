"""Look for scripts that break something, guided by the coverage of protocol/ and supervisor/: `make fuzz`.

python -m tests.fuzz.coverage_guided SECONDS [FOLDER]: FOLDER (build/fuzz) keeps what was found interesting for the
next time, and the script of what broke, which tests/fuzz/show.py prints and shortens. Needs atheris.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["infervisor.protocol", "infervisor.supervisor"]):
    from tests.fuzz.parent_side import harness

from tests.fuzz.mutations import mutated
from tests.fuzz.script import steps_of

CORPUS = Path(__file__).parent / "corpus"
MAX_SCRIPT_BYTES = 4096


def main() -> None:
    """Fuzz for so many seconds; ends with an error and a file at the first thing that breaks."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "build/fuzz")
    found = folder / "corpus"
    found.mkdir(parents=True, exist_ok=True)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.15:
            return bytes(atheris.Mutate(data, max_size))
        return mutated(data, rng)[:max_size]

    with harness() as one:

        def try_one(data: bytes) -> None:
            with one() as side:
                side.run(steps_of(data))
                side.conclude()

        options = [
            f"-max_total_time={seconds}", f"-max_len={MAX_SCRIPT_BYTES}", "-timeout=60", "-rss_limit_mb=4096",
            f"-artifact_prefix={folder}/", "-print_final_stats=1", "-len_control=0",
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS)], try_one, custom_mutator=change)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
