"""The worker runs in another interpreter: the application's own needs no llama-cpp-python.

For an application that can't or won't have a compiled model library in its environment. The other one needs
infervisor, msgpack and the engine's library:

    python3 -m venv /opt/model && /opt/model/bin/pip install infervisor     # has llama-cpp-python

    python examples/other_interpreter.py --python /opt/model/bin/python
    python examples/other_interpreter.py --python /opt/model/bin/python --engine scripted   # no model
"""

from __future__ import annotations

import argparse
import sys

from infervisor import BlockingSupervisor, InfervisorError, default_model


def main() -> int:
    """Ask once, and tell who answered."""
    parser = argparse.ArgumentParser(description="Run the worker in another interpreter.")
    parser.add_argument("--python", required=True, help="path of the other environment's interpreter")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    arguments = parser.parse_args()
    model = default_model() if arguments.engine == "llama" else None
    try:
        with BlockingSupervisor(model, engine=arguments.engine, python=arguments.python) as supervisor:
            status = supervisor.status()
            print(f"this process: {sys.executable}, Python {sys.version.split()[0]}")
            print(f"the worker: {arguments.python}, {dict(status.versions)}")
            print(supervisor.generate("The capital of France is", max_tokens=12, temperature=0))
            print(f"the model library is loaded here: {'llama_cpp' in sys.modules}")
    except InfervisorError as error:
        # The interpreter isn't there, or lacks infervisor, msgpack or the engine's library.
        print(f"{arguments.python} can't serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
