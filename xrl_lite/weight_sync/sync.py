"""Weight sync in phases: nobody generates between the first replica that changes and the last.

::

    export --> gate closed --> prepare, all --> transfer, checksums equal --> finish, version acknowledged --> gate open
               |                    '--> does not fit: nothing has changed anywhere
               '--> a replica dies or hangs: it is replaced, and its successor gets these weights before it serves

Waits for    the trainer, and every replica in each phase, all with deadlines of their own
Is woken by  the actors; the gate opens again whatever happens

A failure names replica, phase and tensor, and `sync` may be called again: a replica that holds a mixture serves nobody
until that succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from xrl_lite.errors import ActorError, WeightSyncError, XrlLiteError, errors_as_themselves
from xrl_lite.log import get_logger
from xrl_lite.weight_sync.transports import Transport

if TYPE_CHECKING:
    from xrl_lite.algorithms.weights import WeightBucket, WeightManifest, WeightOffer, WeightSender

logger = get_logger(__name__)

MAX_ATTEMPTS = 3
"""A transfer that all replicas take part in is begun anew so often when one of them died in it."""


class WeightSource(Protocol):
    """Has the weights."""

    async def attach_weights(self, sender: WeightSender) -> None:
        """Take the trainer's end of the transport; replaces the one from before."""
        ...

    async def open_weights(self, version: int, *, adapters_only: bool = False) -> WeightOffer:
        """Begin a transfer of the present weights, or of those of the LoRA adapter alone."""
        ...

    async def send_weights(self, number: int, num_receivers: int) -> WeightBucket:
        """Send a bucket to so many processes."""
        ...

    async def interrupt_weights(self) -> None:
        """Have a `send_weights` that waits for receivers raise."""
        ...

    async def close_weights(self) -> None:
        """End the transfer."""
        ...


class WeightTarget(Protocol):
    """Takes weights."""

    name: str

    @property
    def is_live(self) -> bool:
        """Whether there is a process now."""
        ...

    @property
    def is_down(self) -> bool:
        """Whether there never will be one again."""
        ...

    async def wait_live(self) -> None:
        """Return once there is a process, or never will be one."""
        ...

    async def prepare(self, manifest: WeightManifest) -> int:
        """Check that weights fit, and stop computing; return how many processes will take them."""
        ...

    async def load(self, bucket: WeightBucket) -> dict[str, str]:
        """Take a bucket; return the checksums of what is held."""
        ...

    async def finish(self) -> int:
        """Use the new weights; return their version."""
        ...

    async def abandon(self, error: Exception) -> None:
        """Give up a transfer."""
        ...

    def replace(self, error: Exception) -> None:
        """Have the process replaced."""
        ...


class GenerationGate(Protocol):
    """Can hold generation."""

    async def pause_generation(self) -> None:
        """Let no request start."""
        ...

    async def continue_generation(self) -> None:
        """Let requests start again."""
        ...

    def restore_with(self, restore: Callable[[Any], Awaitable[None]]) -> None:
        """Have `restore` give the present weights to every replica that is started anew."""
        ...


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What a sync cost."""

    version: int
    size_bytes: int
    export_s: float
    """Before the gate was closed."""
    paused_s: float
    """While it was closed."""
    num_replaced: int
    """Replicas that were lost on the way."""
    unchanged: int
    """Syncs in a row, this one included, that changed nothing although the optimizer made updates."""


class _Lost(Exception):  # noqa: N818 - not an error of the whole
    """Replicas were lost, and the transfer must begin anew with those that are left."""


class _AllLostError(WeightSyncError):
    """No replica is left to give weights to; some may be started anew."""


class WeightSync:
    """Brings weights from one source to all targets.

    Args:
        source: Has them.
        targets: Take them.
        gate: Holds generation meanwhile.
        transport: The way.
        adapters_only: Bring the LoRA adapter alone; the targets have the model that it was made for.
        max_unchanged: After so many syncs in a row that changed nothing although the optimizer moved, it warns.
        on_synced: Is told the version that every target holds, before generation goes on.
    """

    def __init__(
        self,
        *,
        source: WeightSource,
        targets: Sequence[WeightTarget],
        gate: GenerationGate,
        transport: Transport,
        adapters_only: bool = False,
        max_unchanged: int = 3,
        on_synced: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._source = source
        self._targets = targets
        self._gate = gate
        self._transport = transport
        self._adapters_only = adapters_only
        self._max_unchanged = max_unchanged
        self._on_synced = on_synced
        self._attached = False
        self._lock = anyio.Lock()
        self._offer: WeightOffer | None = None
        self._buckets: list[WeightBucket] = []
        self._kept = False
        """Whether the buckets are those of the offer: a transfer that failed has overwritten them."""
        self._unchanged = 0
        self._num_lost = 0
        self.policy_version = -1
        """Version that every target holds; -1 before the first sync."""
        self.last_report: SyncReport | None = None
        gate.restore_with(self.restore)

    async def sync(self, version: int) -> SyncReport:
        """Give every target the source's present weights, as `version`.

        A target that dies or hangs is replaced, and gets them when its successor is up. Where all did, the first
        successor is waited for.

        Raises:
            WeightSyncError: a target would hold something else, or none is left; names replica, phase and tensor.
        """
        for attempt in range(MAX_ATTEMPTS):
            await self._wait_for_one()
            try:
                return await self._sync(version)
            except _AllLostError as lost:
                if attempt + 1 == MAX_ATTEMPTS or all(target.is_down for target in self._targets):
                    raise
                logger.warning("%s\nIt is tried again with the first successor.", lost)
        raise AssertionError("the last attempt returns or raises")

    async def _sync(self, version: int) -> SyncReport:
        async with self._lock:
            started = time.perf_counter()
            self._num_lost = 0
            offer = await self._open(version)
            exported = time.perf_counter()
            await self._gate.pause_generation()
            try:
                for attempt in range(MAX_ATTEMPTS):
                    try:
                        await self._transfer(offer)
                        break
                    except _Lost as lost:
                        if attempt + 1 == MAX_ATTEMPTS:
                            raise WeightSyncError(str(lost)) from lost
                        offer = await self._open(version)
                self._note(offer)
                self._on_synced(version)
            finally:
                with anyio.CancelScope(shield=True):  # both have deadlines
                    await self._gate.continue_generation()
                    await self._source.close_weights()
            self.last_report = SyncReport(
                version=version,
                size_bytes=offer.manifest.size_bytes,
                export_s=exported - started,
                paused_s=time.perf_counter() - exported,
                num_replaced=self._num_lost,
                unchanged=self._unchanged,
            )
            return self.last_report

    async def restore(self, target: WeightTarget) -> None:
        """Give a replica that was started anew the weights that the others hold; waits for a sync that is under way.

        Raises:
            WeightSyncError: it does not hold them afterwards, or the trainer has moved on and they are gone.
        """
        async with self._lock:
            if self._offer is None:
                return  # nothing has been synced yet: it loaded what the others have
            offer = self._offer
            if not (self._transport.keeps and self._kept):
                offer = await self._open(self.policy_version)
                if offer.checksums != self._offer.checksums:
                    raise WeightSyncError(
                        f"{target.name} was started anew, but the weights of version {self.policy_version} are gone: "
                        f"the trainer has moved on. It can serve after the next sync."
                    )
            receivers = {target.name: await target.prepare(offer.manifest)}
            held: dict[str, str] = {}
            for number in range(offer.num_buckets):
                held |= (await self._send(offer, number, [target], receivers))[target.name]
            _compare(target.name, offer, held)
            await target.finish()

    def close(self) -> None:
        """Give the transport's memory back."""
        self._transport.close()

    async def _wait_for_one(self) -> None:
        """Wait for a target to be there; not inside the lock, since successors want their weights first."""
        if any(target.is_live for target in self._targets):
            return
        async with anyio.create_task_group() as waiting:

            async def wait(target: WeightTarget) -> None:
                await target.wait_live()
                if target.is_live or all(other.is_down for other in self._targets):
                    waiting.cancel_scope.cancel()

            for target in self._targets:
                waiting.start_soon(wait, target)

    # --- the phases

    async def _open(self, version: int) -> WeightOffer:
        if not self._attached:
            await self._source.attach_weights(self._transport.sender())
            self._attached = True
        self._buckets, self._kept = [], False
        return await self._source.open_weights(version, adapters_only=self._adapters_only)

    async def _transfer(self, offer: WeightOffer) -> None:
        targets = [target for target in self._targets if target.is_live]
        if not targets:
            raise _AllLostError(_failure_text(offer, "prepare", "no rollout replica", "none is up"))
        prepared: list[WeightTarget] = []
        receivers: dict[str, int] = {}

        async def prepare(target: WeightTarget) -> None:
            receivers[target.name] = await target.prepare(offer.manifest)

        try:
            targets = await self._phase(offer, "prepare", targets, prepare)
            prepared = targets
            held: dict[str, dict[str, str]] = {target.name: {} for target in targets}
            for number in range(offer.num_buckets):
                sent = await self._send(offer, number, targets, receivers)
                for name, checksums in sent.items():
                    held[name] |= checksums
                targets = [target for target in targets if target.name in sent]
            for target in targets:
                _compare(target.name, offer, held[target.name])
            versions: dict[str, int] = {}

            async def finish(target: WeightTarget) -> None:
                versions[target.name] = await target.finish()

            targets = await self._phase(offer, "finish", targets, finish)
            for name, version in versions.items():
                if version != offer.manifest.version:
                    raise _failure(offer, "finish", name, WeightSyncError(f"it acknowledged version {version}"))
        except BaseException as error:
            with anyio.CancelScope(shield=True):  # each call has a deadline
                await self._abandon(prepared or targets, error)
            raise

    async def _send(
        self, offer: WeightOffer, number: int, targets: Sequence[WeightTarget], receivers: Mapping[str, int]
    ) -> dict[str, dict[str, str]]:
        """Bring a bucket to the targets; return what each that is left holds of it."""
        if self._transport.simultaneous:
            return await self._send_at_once(offer, number, targets, receivers)
        held: dict[str, dict[str, str]] = {}
        if number >= len(self._buckets):
            num_receivers = sum(receivers[target.name] for target in targets)
            self._buckets.append(await self._source.send_weights(number, num_receivers))
        bucket = self._buckets[number]

        async def load(target: WeightTarget) -> None:
            held[target.name] = await target.load(bucket)

        await self._phase(offer, "transfer", targets, load)
        return held

    async def _send_at_once(
        self, offer: WeightOffer, number: int, targets: Sequence[WeightTarget], receivers: Mapping[str, int]
    ) -> dict[str, dict[str, str]]:
        group: Any = offer.buckets[number]
        *before, num_receivers = accumulate((receivers[target.name] for target in targets), initial=0)
        num_before = {target.name: num for target, num in zip(targets, before, strict=True)}
        held: dict[str, dict[str, str]] = {}
        lost = False

        async def load(target: WeightTarget) -> None:
            nonlocal lost
            try:
                held[target.name] = await target.load(group.for_replica(num_before[target.name], num_receivers))
            except Exception as error:
                lost = lost or isinstance(error, ActorError)
                with suppress(ActorError):  # a trainer that is gone raises in `send_weights`
                    await self._source.interrupt_weights()
                raise

        failure: Exception | None = None
        try:
            with errors_as_themselves():
                async with anyio.create_task_group() as sending:
                    sending.start_soon(self._source.send_weights, number, num_receivers)
                    try:
                        await self._phase(offer, "transfer", targets, load)
                    except Exception as error:  # noqa: BLE001 - raised below
                        # not here: the sender would be cancelled, and a trainer that is cut off loses its weights
                        failure = error
        except RuntimeError as error:
            failure = failure or error
        if isinstance(failure, _AllLostError):
            raise failure
        if lost or isinstance(failure, RuntimeError):  # torch's: the connection to somebody broke
            raise _Lost(_broken_group(offer, failure or RuntimeError("a replica was lost"))) from failure
        if failure is not None:
            raise failure
        return held

    async def _phase(
        self,
        offer: WeightOffer,
        phase: str,
        targets: Sequence[WeightTarget],
        act: Callable[[WeightTarget], Awaitable[None]],
    ) -> list[WeightTarget]:
        """Let all targets act at once; return those that did. One that dies or hangs is replaced."""
        left: list[WeightTarget] = []
        lost: list[str] = []

        async def one(target: WeightTarget) -> None:
            try:
                await act(target)
            except ActorError as error:
                lost.append(f"{target.name}: {error}")
                logger.warning("%s was lost in phase %s of a weight sync: %s", target.name, phase, error)
                target.replace(error)
                self._num_lost += 1
            except XrlLiteError as error:
                raise _failure(offer, phase, target.name, error) from error
            else:
                left.append(target)

        with errors_as_themselves():
            async with anyio.create_task_group() as acting:
                for target in targets:
                    acting.start_soon(one, target)
        if not left:
            raise _AllLostError(_failure_text(offer, phase, "all replicas", "\n".join(lost)))
        return [target for target in targets if target in left]

    async def _abandon(self, targets: Sequence[WeightTarget], error: BaseException) -> None:
        reason = error if isinstance(error, Exception) else WeightSyncError("the sync was cancelled")
        async with anyio.create_task_group() as tasks:
            for target in targets:
                if target.is_live:
                    tasks.start_soon(target.abandon, reason)

    def _note(self, offer: WeightOffer) -> None:
        """Remember what all hold now; report pushes that change nothing while the optimizer moves."""
        before, self._offer = self._offer, offer
        self._kept = True
        self.policy_version = offer.manifest.version
        if before is None:
            return
        moved = offer.manifest.num_updates > before.manifest.num_updates
        same = offer.checksums == before.checksums
        self._unchanged = (self._unchanged + 1 if moved else self._unchanged) if same else 0
        if same and moved and self._unchanged >= self._max_unchanged:
            logger.warning(
                "%d weight syncs in a row brought the same weights although the optimizer made updates in between "
                "(version %d): is the learning rate 0, is the wrong copy of the model exported, or are updates smaller "
                "than the precision of %s?",
                self._unchanged,
                self.policy_version,
                offer.manifest.tensors[0].dtype,
            )


def _broken_group(offer: WeightOffer, error: Exception) -> str:
    return (
        f"Weight sync of version {offer.manifest.version} failed in phase transfer: the group in which all replicas "
        f"receive broke: {error}"
    )


def _compare(name: str, offer: WeightOffer, held: dict[str, str]) -> None:
    for tensor, expected in offer.checksums.items():
        if held.get(tensor) != expected:
            raise _failure(
                offer,
                "transfer",
                name,
                WeightSyncError(
                    f"tensor {tensor!r} is other than it was sent (checksum {held.get(tensor)}, sent {expected}). "
                    f"Same dtype on both sides?"
                ),
            )


def _failure(offer: WeightOffer, phase: str, name: str, error: Exception) -> WeightSyncError:
    return WeightSyncError(_failure_text(offer, phase, name, str(error)))


def _failure_text(offer: WeightOffer, phase: str, name: str, error: str) -> str:
    return (
        f"Weight sync of version {offer.manifest.version} failed in phase {phase}: {name}: {error}\n"
        f"Going on would train on samples of another policy; the sync may be tried again."
    )
