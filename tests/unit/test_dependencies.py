"""Whatever the package imports at once comes with it: an extra must not hide that something is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.docs.markdown import ROOT

SERVICE = ROOT / "supervisor" / "http_api"


def imported_at_once(*, service: bool) -> set[str]:
    found: set[str] = set()
    for folder in ("protocol", "worker", "supervisor"):
        for file in (ROOT / folder).rglob("*.py"):
            if (SERVICE in file.parents) is not service:
                continue
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"infervisor"}


def declared(extra: str | None = None) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {re.split(r"[^\w-]", line)[0] for line in lines}


def distributions(names: set[str]) -> set[str]:
    from_where = packages_distributions()
    return {distribution for name in names for distribution in from_where[name]}


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    imported = distributions(imported_at_once(service=False))
    assert "msgpack" in imported, "nothing was looked at"
    assert imported <= declared()


def test_what_the_service_imports_is_in_its_extra() -> None:
    imported = distributions(imported_at_once(service=True))
    extra = {name.replace("-", "_") for name in declared("serve")}
    assert {name.replace("-", "_").lower() for name in imported} <= extra | declared()
    assert "starlette" in imported, "nothing was looked at"


def test_the_command_line_starts_without_the_packages_of_the_service() -> None:
    code = (
        (
            "import sys, infervisor.supervisor.cli.app\n"
            f"print(sorted({sorted(n.replace('-', '_') for n in declared('serve'))!r} & sys.modules.keys()))"
        )
        .replace("] &", "} &")
        .replace("sorted([", "sorted({")
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == "[]"
