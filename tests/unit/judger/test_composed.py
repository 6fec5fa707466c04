"""Routing, merging and nesting of composed judgers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.judger.states import exact, make_state
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import ConfigError
from xrl_lite.judger import (
    ComposedJudger,
    ComposedJudgerConfig,
    ExactMatchJudgerConfig,
    Judger,
    JudgerConfig,
    NativeJudger,
    SkipSampleError,
    weighted_merge,
)

BOTH = {"a": 1.0, "b": 1.0}


def scoring(name: str, score: Any, **options: Any) -> NativeJudger:
    def handler(**_: Any) -> dict[str, Any]:
        if isinstance(score, Exception):
            raise score
        return {"score": score}

    return NativeJudger(name, handler, **options)


class Scores(Judger):
    """Scores a list by one call, by the label of each."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._factor = factor

    async def judge_payload(self, payload: Any) -> Any:
        self.calls.append(payload)
        return [{"score": one["label"] * self._factor} for one in payload]


async def test_merge_sees_outputs_in_the_order_of_the_data_source() -> None:
    seen: list[list[str]] = []

    def merge(state: RolloutState, judged: dict[str, Any]) -> RolloutState:
        seen.append(list(judged))
        state.reward = {"score": 1.0}
        return state

    judger = ComposedJudger({"a": scoring("a", 1.0), "b": scoring("b", 0.5)}, merge)
    await judger.judge(make_state(data_source={"b": 1, "a": 1}))
    assert seen == [["b", "a"]]


async def test_a_merge_function_may_return_a_copy() -> None:
    def merge(state: RolloutState, outputs: Any) -> RolloutState:
        merged = state.model_copy(deep=True)
        merged.reward = {"score": outputs["a"]["score"] + outputs["b"]["score"]}
        return merged

    judger = ComposedJudger({"a": scoring("a", 1.0), "b": scoring("b", 0.5)}, merge)
    state = await judger.judge(make_state(data_source=BOTH))
    assert state.reward == {"score": 1.5}
    assert state.extra_fields["judgement"]["outcome"] == "ok"


async def test_a_postprocess_may_return_a_copy() -> None:
    class Copies(NativeJudger):
        def postprocess(self, rollout_state: RolloutState, output: Any) -> RolloutState:
            return super().postprocess(rollout_state.model_copy(deep=True), output)

    state = await Copies("copies", exact).judge(make_state())
    assert state.extra_fields["judgement"]["outcome"] == "ok"


async def test_an_async_merge_function_is_awaited() -> None:
    async def merge(state: RolloutState, judged: dict[str, Any]) -> RolloutState:
        await asyncio.sleep(0)
        state.reward = {"score": judged["a"]["score"] + judged["b"]["score"]}
        return state

    state = await ComposedJudger({"a": scoring("a", 1.0), "b": scoring("b", 0.5)}, merge).judge(
        make_state(data_source=BOTH)
    )
    assert state.reward == {"score": 1.5}
    assert state.extra_fields["judgement"]["outcome"] == "ok"


@pytest.mark.parametrize(
    ("error", "outcome"), [(ValueError("bad unit"), "raised"), (SkipSampleError("not mine"), "skipped")]
)
async def test_a_failing_branch_fails_the_sample_and_names_the_branch(error: Exception, outcome: str) -> None:
    judger = ComposedJudger({"a": scoring("first", 1.0), "b": scoring("second", error)}, weighted_merge(BOTH))
    state = await judger.judge(make_state(data_source=BOTH, rollout_id=5))
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert state.extra_fields["judgement"]["outcome"] == outcome
    assert "judger 'second', sample 5" in str(state.error_msg)
    statistics = judger.statistics()
    assert statistics["first"]["ok"] == 1
    assert statistics["second"][outcome] == 1
    assert statistics["composed"][outcome] == 1


async def test_a_branch_that_may_count_as_zero_does_so_in_the_merge() -> None:
    branches = {"a": scoring("a", 1.0), "b": scoring("b", ValueError("bad"), on_error="zero")}
    state = await ComposedJudger(branches, weighted_merge({"a": 0.5, "b": 0.5})).judge(make_state(data_source=BOTH))
    assert state.reward == {"score": 0.5, "a": 1.0, "b": 0.0}


async def test_a_zero_inside_of_a_composed_branch_counts_outside() -> None:
    inner = ComposedJudger({"x": scoring("x", ValueError("bad"), on_error="zero")}, judger_name="inner")
    judger = ComposedJudger({"a": scoring("a", 1.0), "n": inner}, weighted_merge({"a": 0.5, "n": 0.5}))
    state = await judger.judge(make_state(data_source={"a": 1, "n": {"x": 1}}))
    assert state.reward == {"score": 0.5, "a": 1.0, "n": 0.0}, state.error_msg
    assert judger.statistics()["x"]["raised"] == 1


async def test_a_branch_that_raises_by_policy_raises_out_of_the_composed_judger() -> None:
    branches = {"a": scoring("a", 1.0), "b": scoring("b", ValueError("bad"), on_error="raise")}
    with pytest.raises(ValueError, match="bad"):
        await ComposedJudger(branches, weighted_merge(BOTH)).judge(make_state(data_source=BOTH))


async def test_a_raising_merge_function_fails_the_sample() -> None:
    def merge(state: RolloutState, judged: dict[str, Any]) -> RolloutState:
        raise KeyError("weight")

    state = await ComposedJudger({"a": scoring("a", 1.0), "b": scoring("b", 1.0)}, merge).judge(
        make_state(data_source=BOTH)
    )
    assert state.status is Status.FAILED
    assert "KeyError: 'weight'" in str(state.error_msg)


async def test_a_merged_nan_fails_the_sample() -> None:
    judger = ComposedJudger(
        {"a": scoring("a", 1.0), "b": scoring("b", 1.0)}, weighted_merge({"a": 1, "b": float("nan")})
    )
    state = await judger.judge(make_state(data_source=BOTH))
    assert state.status is Status.FAILED
    assert "finite number as 'score', got nan" in str(state.error_msg)


async def test_a_merge_function_that_returns_a_list_is_misuse() -> None:
    judger = ComposedJudger({"a": scoring("a", 1.0), "b": scoring("b", 1.0)}, lambda state, judged: [state])
    with pytest.raises(TypeError, match="merge_fn returned a list for judge"):
        await judger.judge(make_state(data_source=BOTH))


@pytest.mark.parametrize(
    ("data_source", "error", "message"),
    [
        ({3: 1.0}, TypeError, "keys must be strings"),
        (["a"], TypeError, "must be a branch name string or a dict of branch names"),
        ({"a": 1.0, "c": 1.0}, KeyError, "Unknown judger branch"),
    ],
)
async def test_bad_routing_raises_before_any_branch_runs(
    data_source: Any, error: type[Exception], message: str
) -> None:
    branches = {"a": scoring("a", 1.0), "b": scoring("b", 1.0)}
    state = make_state()
    state.data_source = data_source
    with pytest.raises(error, match=message):
        await ComposedJudger(branches, weighted_merge(BOTH)).judge(state)
    assert branches["a"].statistics()["a"]["ok"] == 0


async def test_misuse_in_a_branch_is_raised_as_it_is() -> None:
    judger = ComposedJudger({"a": scoring("a", 1.0), "b": scoring("b", 1.0)}, weighted_merge(BOTH))
    with pytest.raises(AssertionError, match="must have a response"):
        await judger.judge(make_state(None, data_source=BOTH))


def test_a_composed_judger_needs_branches_that_are_judgers() -> None:
    with pytest.raises(ValueError, match="requires at least one branch"):
        ComposedJudger({})
    with pytest.raises(TypeError, match="branch must be a Judger instance"):
        ComposedJudger({"a": exact})  # pyright: ignore[reportArgumentType]


async def test_a_list_of_one_branch_is_misuse() -> None:
    class Lists(Judger):
        async def judge_payload(self, payload: Any) -> Any:
            return [{"score": 1.0}]

    with pytest.raises(TypeError, match="Branch 'a' returned a list output for one RolloutState"):
        await ComposedJudger({"a": Lists()}).judge(make_state(data_source="a"))
    with pytest.raises(TypeError, match="Judger returned a list output for a single rollout state"):
        await Lists().judge(make_state())


class TestBatch:
    async def test_each_state_goes_where_its_own_data_source_says(self) -> None:
        a, b = Scores(1.0), Scores(10.0)
        judger = ComposedJudger({"a": a, "b": b})
        states = [make_state(label=index, data_source="ab"[index % 2]) for index in range(4)]
        judged = await judger.batch_judge(states)
        assert [state.reward for state in judged] == [{"score": 0.0}, {"score": 10.0}, {"score": 2.0}, {"score": 30.0}]
        assert judged == states
        assert [len(branch.calls) for branch in (a, b)] == [1, 1]

    async def test_states_of_several_branches_are_merged_as_lists(self) -> None:
        sizes: list[int] = []

        def merge(states: Any, judged: Any) -> Any:
            sizes.append(len(states))
            return weighted_merge({"a": 0.5, "b": 0.5})(states, judged)

        judger = ComposedJudger({"a": Scores(1.0), "b": Scores(3.0)}, merge)
        sources: list[Any] = [BOTH, "a", {"b": 1, "a": 1}, BOTH]
        states = [make_state(label=index, data_source=source) for index, source in enumerate(sources)]
        judged = await judger.batch_judge(states)
        assert [state.reward["score"] for state in judged if state.reward] == [0.0, 1.0, 4.0, 6.0]
        assert sorted(sizes) == [1, 2]

    @pytest.mark.parametrize(
        ("result", "error", "message"),
        [
            ({"score": 1.0}, TypeError, "Branch 'a' returned a single output for a rollout state list"),
            ([{"score": 1.0}], ValueError, "Branch 'a' returned 1 outputs for 2 states"),
        ],
    )
    async def test_wrong_number_of_outputs(self, result: Any, error: type[Exception], message: str) -> None:
        class Wrong(Judger):
            async def judge_payload(self, payload: Any) -> Any:
                return result

        with pytest.raises(error, match=message):
            await ComposedJudger({"a": Wrong()}).batch_judge([make_state(data_source="a"), make_state(data_source="a")])
        what = "a single output" if error is TypeError else "1 outputs"
        with pytest.raises(error, match=f"Judger returned {what} for 2 rollout states"):
            await Wrong().batch_judge([make_state(), make_state()])

    @pytest.mark.parametrize(
        ("merged", "error", "message"),
        [
            (lambda states: states[0], TypeError, "returned a single RolloutState"),
            (lambda states: states[:1], ValueError, "1 states for 2"),
        ],
    )
    async def test_wrong_number_of_merged_states(self, merged: Any, error: type[Exception], message: str) -> None:
        judger = ComposedJudger({"a": Scores(), "b": Scores()}, lambda states, judged: merged(states))
        states = [make_state(label=1, data_source=BOTH) for _ in range(2)]
        with pytest.raises(error, match=message):
            await judger.batch_judge(states)

    async def test_no_states_is_misuse(self) -> None:
        with pytest.raises(ValueError, match="requires at least one RolloutState"):
            await ComposedJudger({"a": Scores()}).batch_judge([])

    async def test_a_branch_without_batches_is_misuse(self) -> None:
        with pytest.raises(AssertionError, match="NativeJudger does not support batch payloads"):
            await ComposedJudger({"a": scoring("a", 1.0)}).batch_judge([make_state(data_source="a")])


class TestNested:
    def judger(self) -> ComposedJudger:
        inner = ComposedJudger(
            {"right": scoring("right", 1.0), "form": scoring("form", 0.5)},
            weighted_merge({"right": 0.5, "form": 0.5}),
            "math",
        )
        return ComposedJudger({"math": inner, "tone": scoring("tone", 0.2)}, weighted_merge({"math": 1.0, "tone": 1.0}))

    @pytest.mark.parametrize(
        ("data_source", "reward"),
        [
            ("math", {"score": 0.75, "right": 1.0, "form": 0.5}),
            ({"math": "right"}, {"score": 1.0}),
            ({"math": {"form": 1}, "tone": 1}, {"score": 0.7, "math": 0.5, "tone": 0.2}),
            ({"math": 1.0, "tone": 1.0}, {"score": 0.95, "math": 0.75, "tone": 0.2}),
        ],
    )
    async def test_branches_inside_branches(self, data_source: Any, reward: dict[str, float]) -> None:
        state = make_state(data_source=data_source)
        assert await self.judger().judge(state) is state
        assert state.reward == pytest.approx(reward)

    async def test_an_unknown_inner_branch_raises_before_any_runs(self) -> None:
        judger = self.judger()
        with pytest.raises(KeyError, match="Unknown judger branch from data_source: 'wrong'"):
            await judger.judge(make_state(data_source={"math": "wrong", "tone": 1}))
        assert judger.statistics()["tone"]["ok"] == 0


class TestConfig:
    def test_weights_make_the_merge_function(self) -> None:
        config = ComposedJudgerConfig(
            branches={"a": ExactMatchJudgerConfig(judger_name="a"), "b": ExactMatchJudgerConfig(judger_name="b")},
            weights={"a": 0.75, "b": 0.25},
        )
        state = asyncio.run(config.build().judge(make_state("72", data_source=BOTH)))
        assert state.reward == {"score": 1.0, "a": 1.0, "b": 1.0}

    def test_two_different_judgers_of_one_name_are_refused(self) -> None:
        with pytest.raises(ValueError, match="two different branches have the judger_name 'same'"):
            ComposedJudgerConfig(
                branches={
                    "a": JudgerConfig(judger_name="same", reward_handler=exact),
                    "b": JudgerConfig(judger_name="same", reward_handler=exact, request_timeout=1.0),
                }
            )

    def test_weights_of_a_branch_that_is_not_there_are_refused(self) -> None:
        with pytest.raises(ValueError, match="weights names the branch 'c'"):
            ComposedJudgerConfig(branches={"a": ExactMatchJudgerConfig()}, weights={"c": 1.0})

    def test_merge_fn_must_exist(self) -> None:
        with pytest.raises(ValueError, match="no_such"):
            ComposedJudgerConfig(branches={"a": ExactMatchJudgerConfig()}, merge_fn="tests.unit.judger.states:no_such")

    def test_an_unweighted_branch_is_named(self) -> None:
        judger = ComposedJudger({"a": scoring("a", 1.0), "b": scoring("b", 1.0)}, weighted_merge({"a": 1.0}))
        state = asyncio.run(judger.judge(make_state(data_source=BOTH)))
        assert "branch 'b' has no weight" in str(state.error_msg)

    def test_branches_in_yaml_form(self) -> None:
        config = ComposedJudgerConfig.model_validate(
            {"branches": {"m": {"type": "gsm8k"}, "deep": {"branches": {"e": {"type": "exact_match"}}}}}
        )
        again = ComposedJudgerConfig.model_validate(config.model_dump(mode="json"))
        assert again == config
        assert isinstance(again.branches["deep"], ComposedJudgerConfig)

    def test_missing_handler_is_a_config_error(self) -> None:
        with pytest.raises(ConfigError, match="judger 'x' has no reward_handler"):
            JudgerConfig(judger_name="x").build()
