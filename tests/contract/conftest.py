"""Fixtures of the contract suite: every engine case, loaded and closed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infervisor.worker.engine import Engine, ModelFacts
from tests.helpers.engine_models import CASES, EngineCase
from tests.helpers.models import build_models, smollm2_path


@pytest.fixture(scope="session")
def table_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that holds every table model."""
    return build_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=case.name, marks=[pytest.mark.real_model] if case.model == "smollm2" else [])
        for case in CASES
    ],
)
def case(request: pytest.FixtureRequest) -> EngineCase:
    """Each engine in turn."""
    chosen: EngineCase = request.param
    return chosen


@dataclass
class Loader:
    """Loads engines and closes them at the end."""

    case: EngineCase
    models: Path
    engines: list[Engine]

    def __call__(self, **options: Any) -> tuple[Engine, ModelFacts]:
        """Load this case with more options."""
        engine, facts = self.case.load(self.models, smollm2_path, **options)
        self.engines.append(engine)
        return engine, facts

    def close(self) -> None:
        """Close all."""
        for engine in self.engines:
            engine.close()


@pytest.fixture
def load(case: EngineCase, table_models: Path) -> Iterator[Callable[..., tuple[Engine, ModelFacts]]]:
    """Return a function that loads the case with further options."""
    loader = Loader(case, table_models, [])
    yield loader
    loader.close()


@pytest.fixture(scope="module")
def loaded(case: EngineCase, table_models: Path) -> Iterator[tuple[Engine, ModelFacts]]:
    """Return the case with two slots, shared by the tests of a module: each must leave its slots free."""
    loader = Loader(case, table_models, [])
    yield loader(slots=2)
    loader.close()


@pytest.fixture
def engine(loaded: tuple[Engine, ModelFacts]) -> Engine:
    """Return the shared engine alone."""
    return loaded[0]
