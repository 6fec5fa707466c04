"""Statistics, names, loggers by name, and the lag of the loop."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from xrl_lite.errors import ConfigError, UnknownNameError
from xrl_lite.metrics import (
    LOGGERS,
    LoopLag,
    MetricLoggers,
    actor_metrics,
    bootstrap_interval,
    check_loggers,
    majority_score,
    open_loggers,
    pass_at_k,
    shares,
    with_verl_names,
)


@pytest.mark.parametrize(("n", "c", "k"), list(itertools.product([1, 4, 6], [0, 1, 3], [1, 2, 4])))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, c: int, k: int) -> None:
    if c > n or k > n:
        return
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_majority_decides_and_the_first_of_equals() -> None:
    assert majority_score(["a", "b", "b"], [1.0, 0.0, 0.0]) == 0.0
    assert majority_score(["a", "b"], [1.0, 0.0]) == 1.0


def test_the_bootstrap_interval_holds_the_mean_and_repeats() -> None:
    values = [0.0, 1.0] * 50
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    # the normal interval of a share of 0.5 over 100 rows is 0.402 .. 0.598
    assert low == pytest.approx(0.402, abs=0.03)
    assert high == pytest.approx(0.598, abs=0.03)
    assert bootstrap_interval([0.25] * 8) == (0.25, 0.25)
    assert bootstrap_interval([1.0]) == (1.0, 1.0)


def test_shares_of_stop_reasons() -> None:
    assert shares(["stop", "length", "stop", None], "x") == {"x/length": 0.25, "x/none": 0.25, "x/stop": 0.5}


def test_verl_names_stand_beside_ours() -> None:
    assert with_verl_names({"reward": 0.5, "mine": 1.0}) == {"reward": 0.5, "mine": 1.0, "critic/score/mean": 0.5}


@pytest.mark.parametrize(
    ("ours", "verls"),
    [
        ("eval/sampled/mean@8", {"val-core/sampled/acc/mean@8"}),
        ("eval/sampled/gsm8k/pass@4", {"val-core/sampled/gsm8k/acc/best@4/mean"}),
        ("eval/sampled/maj@8", {"val-core/sampled/acc/maj@8/mean"}),
        ("eval/sampled/maj@8/low", set[str]()),
        ("time/train", {"timing_s/update_actor"}),
    ],
)
def test_what_verl_calls_a_metric(ours: str, verls: set[str]) -> None:
    assert set(with_verl_names({ours: 1.0})) == {ours} | verls


# --- loggers


class Kept:
    """A logger that keeps what it gets, and breaks when told to."""

    def __init__(self) -> None:
        self.numbers: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[Any, ...]] = []
        self.closed = self.breaks = False

    def log(self, step: int, metrics: Any) -> None:
        if self.breaks:
            raise OSError("no network")
        self.numbers.append((step, dict(metrics)))

    def log_table(self, step: int, name: str, columns: Any, rows: Any) -> None:
        self.tables.append((step, name, tuple(columns), [tuple(row) for row in rows]))

    def close(self) -> None:
        self.closed = True


def test_numbers_go_to_every_logger_and_counts_become_tables() -> None:
    one, other = Kept(), Kept()
    loggers = MetricLoggers({"one": one, "other": other})
    loggers.log(3, {"reward": 1, "name": "x", "nan": float("nan"), "flag": True, "_counts": {0.5: 2}})
    loggers.close()
    for logger in (one, other):
        assert logger.numbers == [(3, {"reward": 1.0})]
        assert logger.tables == [(3, "_counts", ("value", "count"), [(0.5, 2)])]
        assert logger.closed


def test_a_logger_that_fails_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Kept(), Kept()
    bad.breaks = True
    loggers = MetricLoggers({"bad": bad, "good": good})
    for step in (1, 2):
        loggers.log(step, {"reward": 1.0})
    assert len(loggers) == 1
    assert [step for step, _ in good.numbers] == [1, 2]
    assert caplog.messages == ["the logger bad failed and is left out from now on: OSError('no network')"]


def test_an_unknown_logger_names_the_closest() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown logger 'tensorbord'. Did you mean 'tensorboard'\?"):
        check_loggers(["console", "tensorbord"])


def test_a_logger_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrl_lite.metrics.loggers.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"wandb needs wandb. Install it with: pip install 'xrl-lite\[wandb\]'"):
        check_loggers(["wandb"])
    check_loggers(["console", "jsonl"])


def test_a_logger_that_cannot_be_opened_is_an_error_of_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with pytest.raises(ConfigError, match="tensorboard cannot be opened: TypeError"):
        open_named(tmp_path, "tensorboard", no_such_option=1)


def open_named(folder: Path, name: str, **options: Any) -> MetricLoggers:
    return open_loggers(
        [name, "console"],
        name="run",
        project="p",
        folder=folder,
        settings={"trainer": {"num_steps": 3}},
        options={name: options},
    )


# MLflow loads relations in a way that SQLAlchemy deprecates
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
@pytest.mark.parametrize("name", LOGGERS)
def test_every_logger_takes_numbers_and_tables_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(LOGGERS[name].module)
    options = {"mode": "offline"} if name == "wandb" else {}
    loggers = open_named(tmp_path, name, **options)
    for step in (1, 2, 1):  # a resumed run goes back
        loggers.log(step, {"reward": 0.5, "eval/greedy/pass@4": 1.0})
    loggers.log_table(2, "completions", ("prompt", "score"), [("a|b\nc", 1.0)])
    assert len(loggers) == 1, "it was left out"
    loggers.close()
    assert any(path.is_file() for path in tmp_path.rglob("*"))


# --- health


async def test_a_blocked_loop_is_measured_and_its_stack_named(caplog: pytest.LogCaptureFixture) -> None:
    lag = LoopLag(interval_s=0.01, blocked_s=0.1)
    async with lag.measured():
        block_until(lambda: lag.num_blocked > 0)
    assert lag.num_blocked == 1
    assert "the event loop has been blocked for" in caplog.text
    assert "block_until" in caplog.text


async def test_the_lag_is_that_since_the_last_look() -> None:
    lag = LoopLag(interval_s=0.0)
    lag._worst_s = 0.5
    assert lag.metrics() == {"loop_lag_ms": 500.0}
    assert lag.metrics() == {"loop_lag_ms": 0.0}


async def test_errors_come_out_of_the_measured_block_as_themselves() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with LoopLag().measured():
            raise KeyError("mine")


def block_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        pass


def test_memory_and_restarts_of_actors() -> None:
    statistics = {"actors": {"judger/a/0": {"pid": os.getpid(), "restarts": 2}, "gone": {"pid": None, "restarts": 0}}}
    metrics = actor_metrics(statistics)
    assert metrics["actor/judger/a/0/rss_mb"] > 10
    assert metrics["actor/driver/rss_mb"] > 10
    assert metrics["actor/judger/a/0/restarts"] == 2.0
    assert "actor/gone/rss_mb" not in metrics
