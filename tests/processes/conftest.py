"""One actor system for each module of tests with real children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import bodies
from xrl_lite.actors import ActorSystem

LIMIT_S = 30.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def system(log_dir: Path) -> Iterator[ActorSystem]:
    system = ActorSystem(num_cpus=64, log_dir=log_dir)
    # the fork server belongs to the module, so it has to be there before the first test counts processes
    first = system.spawn(bodies.Victim)
    first.ready().result(LIMIT_S)
    first.stop().result(LIMIT_S)
    yield system
    system.shutdown_now()
