"""Every backend of the actor layer, each started once for a module of tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorSystem
from xrl_lite.actors.ray_actor import load_ray

LIMIT_S = 60.0

BACKENDS = [pytest.param("process", marks=pytest.mark.process), "inline"]
if importlib.util.find_spec("ray"):
    BACKENDS.append(pytest.param("ray", marks=[pytest.mark.process, pytest.mark.ray, pytest.mark.timeout(180)]))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    ray = load_ray()
    ray.init(num_cpus=64, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", params=BACKENDS)
def system(request: pytest.FixtureRequest) -> Iterator[ActorSystem]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    system = ActorSystem(num_cpus=64, backend=request.param)
    # the fork server belongs to the module, so it has to be there before the first test counts processes
    first = system.spawn(bodies.Stateful)
    first.ready().result(LIMIT_S)
    first.kill()
    yield system
    system.shutdown_now()


@pytest.fixture
def too_long_s(system: ActorSystem) -> float:
    """Seconds far beyond any limit. Inline, where a sync method is not ended but judged afterwards, a little beyond."""
    return 0.3 if system.backend == "inline" else 600.0
