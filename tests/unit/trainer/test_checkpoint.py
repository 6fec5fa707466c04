"""Checkpoints are complete or not there."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from xrl_lite.errors import CheckpointError, ConfigError
from xrl_lite.run import model_of_checkpoint
from xrl_lite.trainer.checkpoint import (
    HUGGINGFACE,
    MARKER,
    CheckpointStore,
    complete_checkpoints,
    find_checkpoint,
    is_complete,
    read_state,
    require_complete,
)


async def write_engines(folder: Path) -> None:
    (folder / "engine").mkdir()
    (folder / "engine" / "weights").write_bytes(b"w" * 4096)


def make_store(folder: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep=keep)


async def save(folder: Path, step: int, keep: int = 2) -> Path:
    return await make_store(folder, keep).save(step, {"global_step": step}, write_engines)


async def test_a_saved_checkpoint_is_complete_and_found(tmp_path: Path) -> None:
    path = await save(tmp_path, 3)
    assert is_complete(path)
    assert read_state(path) == {"global_step": 3}
    assert find_checkpoint("auto", path.parent) == path
    assert find_checkpoint("never", path.parent) is None
    assert find_checkpoint(str(path), tmp_path) == path


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        await save(tmp_path, step)
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step_000002", "step_000003"]


async def test_a_failed_save_leaves_the_old_one_and_nothing_aside(tmp_path: Path) -> None:
    old = await save(tmp_path, 1)

    async def fail(folder: Path) -> None:
        await write_engines(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left.*Older checkpoints are"):
        await make_store(tmp_path).save(2, {}, fail)
    assert list((tmp_path / "checkpoints").iterdir()) == [old]
    assert is_complete(old)


async def test_a_full_disk_while_writing_leaves_the_old_one(tmp_path: Path) -> None:
    old = await save(tmp_path, 1)
    with files_no_larger_than(1024), pytest.raises(CheckpointError, match="File too large"):
        await save(tmp_path, 2)
    assert complete_checkpoints(tmp_path / "checkpoints") == [old]
    assert is_complete(await save(tmp_path, 2))


@contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    """Really make writes fail: beyond this size the kernel refuses them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("damage", ["marker", "file", "size"])
async def test_a_torn_checkpoint_is_never_used_and_is_named(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, torn = await save(tmp_path, 1), await save(tmp_path, 2)
    match damage:
        case "marker":
            (torn / MARKER).unlink()
        case "file":
            (torn / "engine" / "weights").unlink()
        case _:
            (torn / "engine" / "weights").write_bytes(b"w")
    assert find_checkpoint("auto", good.parent) == good
    assert "step_000002 is torn" in caplog.text
    with pytest.raises(CheckpointError, match="Complete ones beside it: step_000001"):
        require_complete(torn)


async def test_auto_refuses_to_start_over_when_all_are_torn(tmp_path: Path) -> None:
    torn = await save(tmp_path, 1)
    (torn / MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is complete"):
        find_checkpoint("auto", torn.parent)


async def test_a_copy_under_a_name_of_its_own_is_left_alone(tmp_path: Path) -> None:
    path = await save(tmp_path, 50, keep=1)
    copy = path.with_name("step_000050_backup")
    shutil.copytree(path, copy)
    assert find_checkpoint("auto", path.parent) == path
    assert make_store(tmp_path).oldest_step() == 50
    await save(tmp_path, 60, keep=1)
    make_store(tmp_path).forget_after(0)
    assert [left.name for left in path.parent.iterdir()] == [copy.name]
    assert find_checkpoint(str(copy), path.parent) == copy
    with pytest.raises(CheckpointError, match="step_000050_backup: it is not named after its step alone"):
        find_checkpoint("auto", path.parent)


async def test_a_torn_one_is_written_anew(tmp_path: Path) -> None:
    torn = await save(tmp_path, 1)
    (torn / MARKER).unlink()
    assert is_complete(await save(tmp_path, 1))


async def test_left_overs_of_a_killed_save_are_swept(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".writing-step_000001"
    left.mkdir(parents=True)
    await save(tmp_path, 1)
    assert not left.exists()


async def test_the_marker_holds_the_size_of_every_file(tmp_path: Path) -> None:
    path = await save(tmp_path, 1)
    assert json.loads((path / MARKER).read_text()) == {"engine/weights": 4096, "state.json": 18}


async def test_an_evaluation_takes_a_checkpoint_or_a_hugging_face_folder(tmp_path: Path) -> None:
    def make_model(folder: Path) -> None:
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
            (folder / name).touch()

    async def write_both(folder: Path) -> None:
        await write_engines(folder)
        make_model(folder / HUGGINGFACE)

    make_model(tmp_path / "model")
    assert model_of_checkpoint(tmp_path / "model") == str(tmp_path / "model")
    checkpoint = await make_store(tmp_path).save(2, {"global_step": 2}, write_both)
    assert model_of_checkpoint(checkpoint) == str(checkpoint / HUGGINGFACE)
    with pytest.raises(ConfigError, match="export_hf=false"):
        model_of_checkpoint(await save(tmp_path, 3))
    (checkpoint / MARKER).unlink()
    with pytest.raises(CheckpointError):
        model_of_checkpoint(checkpoint)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        model_of_checkpoint(tmp_path / "model")


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be never, auto or the folder .* Did you mean 'auto'\?"):
        find_checkpoint("atuo", tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        require_complete(tmp_path / "nowhere")
