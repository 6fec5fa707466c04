"""Every backend of the actor layer, each started once for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorSystem

LIMIT_S = 20.0


@pytest.fixture(scope="module", params=[pytest.param("process", marks=pytest.mark.process), "inline"])
def system(request: pytest.FixtureRequest) -> Iterator[ActorSystem]:
    system = ActorSystem(num_cpus=64, backend=request.param)
    # the fork server belongs to the module, so it has to be there before the first test counts processes
    first = system.spawn(bodies.Stateful)
    first.ready().result(LIMIT_S)
    first.kill()
    yield system
    system.shutdown_now()
