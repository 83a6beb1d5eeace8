"""Whatever the package imports at once comes with it: an extra must not hide that something is missing."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.docs.markdown import ROOT


def imported_at_once() -> set[str]:
    found: set[str] = set()
    for folder in ("protocol", "worker", "supervisor"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"infervisor"}


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    from_where = packages_distributions()
    imported = {distribution for name in imported_at_once() for distribution in from_where[name]}
    assert "msgpack" in imported, "nothing was looked at"
    assert imported <= declared
