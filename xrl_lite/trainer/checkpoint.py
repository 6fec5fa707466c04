"""Checkpoints that are either complete or not there.

A checkpoint is written aside, flushed to the disk, renamed, and marked complete with the size of each of its files.
Anything without a valid marker is torn: never loaded, and named in a warning.

::

    checkpoints/step_000050/
        engine/          state of the training ranks (torch.distributed.checkpoint)
        critic/          that of the critic's, where there is one
        huggingface/     the model as a Hugging Face folder
        state.json       step, sampler, counters
        COMPLETE         marker: sizes of the files above
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from xrl_lite.errors import CheckpointError, ConfigError, did_you_mean
from xrl_lite.log import get_logger
from xrl_lite.registry import load_object
from xrl_lite.trainer.run_folder import paths_by_step

logger = get_logger(__name__)

MARKER = "COMPLETE"
ENGINE = "engine"
CRITIC = "critic"
HUGGINGFACE = "huggingface"
STATE = "state.json"
_ASIDE = ".writing-"

WriteEngines = Callable[[Path], Awaitable[None]]
"""Writes the ranks' state, and the model, into folders of their own in the one that is given."""


class CheckpointCallback:
    """Runs after each checkpoint; subclass it and name it in `CheckpointConfig.callback`.

    Args:
        config: The run's settings.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Called once the checkpoint is complete on the disk. An exception stops the run.

        Args:
            trainer: The trainer.
            global_step: Step the checkpoint was made after.
            checkpoint_dir: Its folder.
            async_save: Always False here: nothing is being written any more.
            **kwargs: For future use; accept it.
        """


def load_callback_class(path: str | None) -> type[CheckpointCallback]:
    """Return the class that a setting names; one that does nothing for None.

    Raises:
        PluginError: it cannot be loaded.
        ConfigError: it has no `on_save`.
    """
    found: Any = load_object(path) if path else CheckpointCallback
    if not isinstance(found, type) or not callable(getattr(found, "on_save", None)):
        raise ConfigError(
            f"checkpoint.callback: {path} must be a class with on_save, as xrl_lite.trainer.CheckpointCallback has it, "
            f"got {found!r}."
        )
    return found


class CheckpointStore:
    """The checkpoints of a run.

    Args:
        folder: Where they lie.
        keep: Newest ones to keep.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def save(self, step: int, state: dict[str, Any], write_engines: WriteEngines) -> Path:
        """Write a checkpoint, then drop the oldest beyond `keep`. Saving a step twice keeps the first.

        Raises:
            CheckpointError: it could not be written, for example because the disk is full; older ones are untouched.
        """
        final = self._folder / f"step_{step:06d}"
        if is_complete(final):
            return final
        aside = self._folder / f"{_ASIDE}step_{step:06d}"
        try:
            self._sweep()
            aside.mkdir(parents=True)
            await write_engines(aside)
            (aside / STATE).write_text(json.dumps(state), encoding="utf-8")
            sizes = _flush(aside)
            if final.exists():  # torn: complete ones were returned above
                shutil.rmtree(final)
            aside.rename(final)
            _mark(final, sizes)
            for old in complete_checkpoints(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self._folder).free if self._folder.exists() else 0
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written to {final}: {error} "
                f"({free / 1e6:.0f} MB free). Older checkpoints are untouched. "
                f"Free some space, then go on with checkpoint.resume=auto."
            ) from error
        return final

    def oldest_step(self) -> int:
        """Return the step of the oldest complete checkpoint; 0 if there is none."""
        return next((step for step, path in paths_by_step(self._folder).items() if is_complete(path)), 0)

    def forget_after(self, step: int) -> list[Path]:
        """Drop the checkpoints of later steps, which belong to what is about to be run again, and return them."""
        later = [path for saved, path in paths_by_step(self._folder).items() if saved > step]
        for path in reversed(later):
            shutil.rmtree(path)
        return later

    def _sweep(self) -> None:
        for left in self._folder.glob(f"{_ASIDE}*"):
            shutil.rmtree(left)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first; torn ones are named in a warning.

    Copies under names of their own ("step_000050_backup") are left alone.
    """
    found = list(paths_by_step(folder).values())
    for path in found:
        if not is_complete(path):
            logger.warning("checkpoint %s is torn and will not be used: %s", path, _what_is_wrong(path))
    return [path for path in found if is_complete(path)]


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has its marker and every file in its full size."""
    return _what_is_wrong(path) is None


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint to start from, or None to start anew.

    Args:
        resume: never, auto, or the path of a checkpoint.
        folder: Checkpoints of this run.

    Raises:
        CheckpointError: the named one is missing or torn, or auto finds only torn ones and copies: starting over
            silently would throw the run away.
    """
    if resume == "never":
        return None
    if resume != "auto":
        if not Path(resume).exists():
            raise CheckpointError(
                f"checkpoint.resume must be never, auto or the folder of a checkpoint, got {resume!r}."
                f"{did_you_mean(resume, ('never', 'auto'))}"
            )
        return require_complete(Path(resume))
    complete = complete_checkpoints(folder)
    if complete:
        return complete[-1]
    unusable = sorted(folder.glob("step_*"))
    if unusable:
        why = {path.name: _what_is_wrong(path) or "it is not named after its step alone" for path in unusable}
        raise CheckpointError(
            f"No checkpoint in {folder} is complete, so resume=auto has nothing to go on from. "
            + "; ".join(f"{name}: {problem}" for name, problem in why.items())
            + ". Name one with checkpoint.resume=FOLDER, remove them to start over, or use another name."
        )
    return None


def require_complete(path: Path) -> Path:
    """Return the path if it is a complete checkpoint.

    Raises:
        CheckpointError: it is not; says what is wrong, and which complete ones lie beside it.
    """
    problem = _what_is_wrong(path)
    if problem is None:
        return path
    beside = [other.name for other in sorted(path.parent.glob("step_*")) if is_complete(other)]
    hint = f" Complete ones beside it: {', '.join(beside)}." if beside else ""
    raise CheckpointError(f"{path} cannot be used: {problem}.{hint}")


def read_state(path: Path) -> dict[str, Any]:
    """Return the driver's part of a checkpoint."""
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def _what_is_wrong(path: Path) -> str | None:
    if not path.is_dir():
        return "there is no such folder"
    try:
        sizes: dict[str, int] = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"it has no {MARKER} marker, so writing it did not end"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
    return None


def _flush(folder: Path) -> dict[str, int]:
    """Flush every file to the disk and return their sizes."""
    sizes: dict[str, int] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        _fsync(file)
        sizes[str(file.relative_to(folder))] = file.stat().st_size
    return sizes


def _mark(folder: Path, sizes: dict[str, int]) -> None:
    aside = folder / f"{MARKER}.tmp"
    aside.write_text(json.dumps(sizes), encoding="utf-8")
    _fsync(aside)
    aside.rename(folder / MARKER)
    _fsync(folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
