"""The weights side of a replica: how weights reach it; an engine that takes them in another way brings its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xrl_lite.errors import ActorError, ConfigError
from xrl_lite.registry import Registry
from xrl_lite.rollout.link import LinkState, ReplicaLink

if TYPE_CHECKING:
    from xrl_lite.algorithms.weights import WeightBucket, WeightManifest


class ServerAdapter:
    """Brings weights to one replica. Every method has `sync_timeout_s`, and raises what the replica raises.

    Args:
        link: The replica.
        timeout_s: Limit of each call.
    """

    transports: tuple[str, ...] = ("shared_memory", "cuda_ipc", "process_group", "folder")
    """Transports that the engine can take weights from."""

    def __init__(self, link: ReplicaLink, *, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self.name = link.name

    @property
    def is_live(self) -> bool:
        """Whether there is a process to give weights to; one that is being replaced gets them when it is up."""
        return self._link.is_live

    @property
    def is_down(self) -> bool:
        """Whether it will never serve again."""
        return self._link.state is LinkState.DOWN

    async def wait_live(self) -> None:
        """Return once there is a process, or never will be one; each start has a deadline, and they are limited."""
        while not (self.is_live or self.is_down):
            await self._link.state_changed()

    async def prepare(self, manifest: WeightManifest) -> int:
        """Let it check that the weights fit, and stop computing; return how many of its processes will take them."""
        return await self._call("prepare_weights", manifest)

    async def load(self, bucket: WeightBucket) -> dict[str, str]:
        """Let it take a bucket; return the checksums of what it holds."""
        return await self._call("load_weights", bucket)

    async def finish(self) -> int:
        """Let it use the new weights; return their version as it knows it."""
        version = await self._call("finish_weights")
        self._link.whole()
        return version

    async def abandon(self, error: Exception) -> None:
        """Let it give up a transfer. If it had begun to load, it gets no requests until the next one succeeds."""
        try:
            if not await self._call("abandon_weights"):
                self._link.torn(error)
        except ActorError:
            self.replace(error)

    def replace(self, error: Exception) -> None:
        """Have the process replaced by one that gets the present weights when it is up."""
        self._link.fail(error)

    async def _call(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._link.replica, method).options(timeout_s=self._timeout_s)
        return await call.remote(*arguments)


class FixedWeightsAdapter(ServerAdapter):
    """For a server whose weights are not ours to change."""

    transports = ()

    async def prepare(self, manifest: WeightManifest) -> int:
        raise ConfigError(
            f"{self.name}: the server that the openai engine speaks to keeps its own weights, so a model cannot be "
            f"trained with it. Use it for evaluation, or set rollout.engine to vllm or torch."
        )


SERVER_ADAPTERS: Registry[type[ServerAdapter]] = Registry(
    "server adapter",
    {
        "torch": "xrl_lite.rollout.adapter:ServerAdapter",
        "vllm": "xrl_lite.rollout.adapter:ServerAdapter",
        "fake": "xrl_lite.rollout.adapter:ServerAdapter",
        "openai": "xrl_lite.rollout.adapter:FixedWeightsAdapter",
    },
)
"""How weights reach the replicas of an engine, by its name; one that is not listed here gets `ServerAdapter`."""


def make_adapter(engine: str, link: ReplicaLink, *, timeout_s: float) -> ServerAdapter:
    """Return the adapter of a replica."""
    kind = SERVER_ADAPTERS.resolve(engine) if engine in SERVER_ADAPTERS else ServerAdapter
    return kind(link, timeout_s=timeout_s)
