"""Sessions: which conversation a request goes on with, what is trained on, retries, limits, ends."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_templates import make_tokenizer
from tests.unit.gateway.rig import (
    END,
    QWEN3,
    TEMPLATE,
    TOOL,
    answering,
    ask,
    digest,
    held,
    open_session,
    said,
    trained,
    until,
    user,
    whole,
)
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, Status
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.errors import ActorUnavailableError, RolloutError
from xrl_lite.gateway import Refusal
from xrl_lite.gateway.session import SessionState
from xrl_lite.gateway.turn import TurnRequest, TurnResult

U1, U2, U3 = user("3+4?"), user("Sure?"), user("Really?")
RESULT = {"role": "tool", "content": "7", "tool_call_id": "call00001"}


# --- which conversation


async def test_a_conversation_that_goes_on_is_one_trajectory_of_sampled_tokens() -> None:
    odd = '<tool_call>{"name":   "calculator", "arguments": {"expression":"3+4"}}</tool_call><|im_end|>'
    rollout = answering(odd, f"It is 7.{END}")
    async with open_session(rollout) as session:
        first = await ask(session, [U1], tools=[TOOL])
        second = await ask(session, [U1, said(first), RESULT], tools=[TOOL])
        result = await session.finalize()
    assert (first.finish_reason, second.finish_reason, second.text) == ("tool_calls", "stop", "It is 7.")
    (trajectory,) = result.trajectories
    assert trained(trajectory) == f"{odd}It is 7.{END}"
    assert trajectory.num_turns == 2
    contexts = [request.prompt_ids or [] for request in rollout.requests]
    assert contexts[0] == trajectory.prompt_ids
    assert whole(trajectory)[: len(contexts[1])] == contexts[1]
    for mask, logprob, version in zip(
        trajectory.response_mask, trajectory.response_logprobs, trajectory.policy_versions, strict=True
    ):
        assert (logprob < 0) == bool(mask)
        assert version == 3


async def test_the_same_prompt_again_is_a_sample_of_its_own() -> None:
    rollout = answering()
    async with open_session(rollout) as session:
        answers = [(await ask(session, [U1])).text for _ in range(3)]
        result = await session.finalize()
    assert answers == ["1", "2", "3"]
    assert [trained(trajectory) for trajectory in result.trajectories] == [f"{n}{END}" for n in "123"]
    ids = [request.rollout_id for request in rollout.requests]
    assert len(set(ids)) == 3, "equal ids have equal seeds"


async def test_a_last_turn_that_is_replaced_is_dropped() -> None:
    async with open_session(answering()) as session:
        first = await ask(session, [U1])
        await ask(session, [U1, said(first), U2])
        await ask(session, [U1, said(first), U2, U3])
        result = await session.finalize()
    (trajectory,) = result.trajectories
    assert trained(trajectory) == f"1{END}3{END}"
    messages = [U1, {"role": "assistant", "content": "1"}, U2, U3]
    assert whole(trajectory)[: -len(QWEN3.encode_text(f"3{END}"))] == TEMPLATE.encode(messages)


async def test_without_rollback_a_replaced_turn_begins_another_trajectory() -> None:
    async with open_session(answering(), enable_last_assistant_rollback=False) as session:
        first = await ask(session, [U1])
        await ask(session, [U1, said(first), U2])
        await ask(session, [U1, said(first), U2, U3])
        result = await session.finalize()
    assert [trained(trajectory) for trajectory in result.trajectories] == [f"1{END}2{END}", f"3{END}"]


async def test_of_two_chains_that_could_be_rolled_back_none_is() -> None:
    async with open_session(answering("Same." + END, "Same." + END)) as session:
        first = await ask(session, [U1])
        await ask(session, [U1])
        await ask(session, [U1, said(first), U2])  # goes on with the later of the equal ones
        await ask(session, [U1, said(first), U2])  # and this one with the other
        await ask(session, [U1, said(first), U2, U3])
        result = await session.finalize()
    assert len(result.trajectories) == 3


async def test_the_deeper_exact_match_wins() -> None:
    async with open_session(answering()) as session:
        first = await ask(session, [U1])
        second = await ask(session, [U1, said(first), U2])
        await ask(session, [U1, said(first), U2, said(second), U3])
        result = await session.finalize()
    (trajectory,) = result.trajectories
    assert trajectory.num_turns == 3


async def test_other_tools_are_another_conversation() -> None:
    other = {**TOOL, "function": {**TOOL["function"], "name": "other"}}
    async with open_session(answering()) as session:
        first = await ask(session, [U1], tools=[TOOL])
        await ask(session, [U1, said(first), U2], tools=[TOOL, other])
        result = await session.finalize()
    assert [len(each.tools or []) for each in result.trajectories] == [1, 2]


async def test_an_edited_turn_is_prompt_of_another_trajectory() -> None:
    async with open_session(answering()) as session:
        first = await ask(session, [U1])
        await ask(session, [U1, {**said(first), "content": "edited"}, U2])
        result = await session.finalize()
    assert [trained(trajectory) for trajectory in result.trajectories] == [f"1{END}", f"2{END}"]
    assert "edited" in QWEN3.decode(result.trajectories[1].prompt_ids, False)


async def test_a_template_that_drops_reasoning_forks() -> None:
    thought = "<think>\nhm\n</think>\n\n7"
    async with open_session(answering(thought + END)) as session:
        first = await ask(session, [U1])
        await ask(session, [U1, said(first), U2])
        result = await session.finalize()
    assert (first.reasoning, first.text) == ("hm", "7")
    one, two = result.trajectories
    assert (trained(one), one.ended_by) == (thought + END, "rewrite")
    assert (trained(two), two.ended_by) == (f"1{END}", "session")
    assert "hm" not in QWEN3.decode(two.prompt_ids, False)


async def test_reasoning_in_a_history_that_is_not_ours_is_kept() -> None:
    rollout = answering()
    history = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": said_call()}
    async with open_session(rollout) as session:
        await ask(session, [U1, history, RESULT], tools=[TOOL])
    assert "<think>\nhm\n</think>" in QWEN3.decode(rollout.requests[0].prompt_ids or [], False)


def said_call() -> list[dict[str, Any]]:
    return [{"id": "x", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}]


async def test_malformed_calls_are_text_and_counted() -> None:
    broken = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"\n</tool_call>'
    async with open_session(answering(f"Hm. {broken}{END}")) as session:
        first = await ask(session, [U1], tools=[TOOL])
        await ask(session, [U1, said(first), U2], tools=[TOOL])
        result = await session.finalize()
    assert first.calls == ()
    assert first.text.startswith("Hm.")
    assert '"expression": "3+4"' in first.text
    assert result.num_malformed_calls == 1
    (trajectory,) = result.trajectories
    assert trained(trajectory) == f"Hm. {broken}{END}1{END}"


async def test_raw_prompts_go_on_as_text_and_as_tokens() -> None:
    async with open_session(answering("b", "d")) as session:

        async def complete(prompt: str | list[int]) -> TurnResult:
            return await session.submit(TurnRequest(prompt=prompt), digest=b"").wait()

        await complete("a")
        await complete("abc")
        first = await complete([5, 6])
        await complete([5, 6, *first.response_ids, 9])
        result = await session.finalize()
    text, tokens = result.trajectories
    assert QWEN3.decode(whole(text), False) == "abcd"
    assert trained(text) == "bd"
    assert tokens.response_mask == [1] * 2 + [0] + [1] * 2
    assert whole(tokens)[:2] == [5, 6]


# --- at the same time


async def test_equal_requests_at_once_are_samples_of_their_own() -> None:
    rollout = held(f"a{END}", f"b{END}", f"c{END}")
    async with open_session(rollout) as session:
        pending = [session.submit(TurnRequest(messages=[U1]), digest=b"same") for _ in range(3)]
        await rollout.begun(3)
        rollout.let_go.set()
        answers = {(await each.wait()).text for each in pending}
        result = await session.finalize()
    assert answers == {"a", "b", "c"}
    assert {trained(trajectory) for trajectory in result.trajectories} == {f"{n}{END}" for n in "abc"}


async def test_a_chain_that_is_being_extended_is_left_alone() -> None:
    rollout = held(f"a{END}", f"b{END}", f"c{END}")
    rollout.let_go.set()
    async with open_session(rollout) as session:
        first = await ask(session, [U1])
        rollout.let_go = anyio.Event()
        following = [U1, said(first), U2]
        pending = [session.submit(TurnRequest(messages=following), digest=b"same") for _ in range(2)]
        await rollout.begun(3)
        rollout.let_go.set()
        for each in pending:
            await each.wait()
        result = await session.finalize()
    assert sorted(trajectory.num_turns for trajectory in result.trajectories) == [1, 2]


# --- retries


async def test_a_retry_gets_the_answer_of_the_first_try() -> None:
    rollout = answering()
    async with open_session(rollout) as session:
        first = await ask(session, [U1])
        again = await session.submit(TurnRequest(messages=[U1]), digest=digest([U1]), is_retry=True).wait()
        result = await session.finalize()
    assert again is first
    assert len(result.trajectories) == len(rollout.requests) == 1


async def test_a_retry_joins_the_request_whose_client_went_away() -> None:
    rollout = held(f"a{END}", f"b{END}")
    async with open_session(rollout) as session:
        left = session.submit(TurnRequest(messages=[U1]), digest=b"same")
        other = session.submit(TurnRequest(messages=[U1]), digest=b"same")
        with anyio.CancelScope() as leaving, other.attended():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(left.wait)
                await rollout.begun(2)
                leaving.cancel()
        with other.attended():
            retried = session.submit(TurnRequest(messages=[U1]), digest=b"same", is_retry=True)
            assert retried is left
            rollout.let_go.set()
            assert (await retried.wait()).text == "a"
        await session.finalize()


async def test_a_turn_that_nobody_waits_for_is_ended_in_the_engine_and_leaves_nothing() -> None:
    rollout = held()
    async with open_session(rollout, retry_grace_s=0) as session:
        pending = session.submit(TurnRequest(messages=[U1]), digest=b"")
        with anyio.CancelScope() as leaving:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pending.wait)
                await rollout.begun(1)
                leaving.cancel()
        await pending.ended.wait()
        assert rollout.num_ended == 1
        assert (await session.finalize()).trajectories == []


async def test_an_idempotency_key_stands_for_one_body() -> None:
    async with open_session(answering()) as session:
        request = TurnRequest(messages=[U1])
        first = session.submit(request, digest=b"one", idempotency_key="k")
        assert session.submit(request, digest=b"one", idempotency_key="k") is first
        with pytest.raises(Refusal, match="'k' belongs to a request with another body"):
            session.submit(request, digest=b"two", idempotency_key="k")


# --- the engine


async def test_a_failed_turn_leaves_the_conversation_as_it_was_and_is_made_anew() -> None:
    answers: list[Any] = [QWEN3.encode_text(f"a{END}"), RolloutError("engine broke"), QWEN3.encode_text(f"b{END}")]
    rollout = ScriptedRolloutCtl(lambda _: answers.pop(0))
    async with open_session(rollout) as session:
        first = await ask(session, [U1])
        messages = [U1, said(first), U2]
        with pytest.raises(Refusal, match="engine broke") as caught:
            await ask(session, messages)
        assert (caught.value.status, caught.value.is_retryable) == (500, True)
        again = session.submit(TurnRequest(messages=messages), digest=digest(messages), is_retry=True)
        assert (await again.wait()).text == "b"
        result = await session.finalize()
    assert (result.num_turns, result.num_failed_turns, result.failure) == (2, 1, None)
    (trajectory,) = result.trajectories
    assert trained(trajectory) == f"a{END}b{END}"


async def test_a_session_whose_last_turn_failed_says_so() -> None:
    def fails(state: RolloutState) -> RolloutState:
        state.status, state.error_msg = Status.FAILED, "sample x: no replica"
        return state

    class Failing(ScriptedRolloutCtl):
        async def generate(self, state: RolloutState) -> RolloutState:
            return fails(state)

    async with open_session(Failing(lambda _: None)) as session:
        with pytest.raises(Refusal, match="no replica"):
            await ask(session, [U1])
        assert "no replica" in str((await session.finalize()).failure)


async def test_what_ends_the_run_ends_the_session() -> None:
    rollout = ScriptedRolloutCtl(lambda _: ActorUnavailableError("all replicas are down"))
    async with open_session(rollout) as session:
        with pytest.raises(Refusal) as caught:
            await ask(session, [U1])
        assert (caught.value.status, caught.value.is_retryable) == (503, False)
        assert session.ended.is_set()
        assert isinstance(session.fatal, ActorUnavailableError)


async def test_what_the_engine_aborts_is_asked_for_again() -> None:
    answers: list[Any] = [None, None, QWEN3.encode_text(f"a{END}")]
    async with open_session(ScriptedRolloutCtl(lambda _: answers.pop(0))) as session:
        assert (await ask(session, [U1])).text == "a"


async def test_or_aborts_the_session_where_attempts_are_made_again() -> None:
    async with open_session(ScriptedRolloutCtl(lambda _: None), resume_aborted=False) as session:
        with pytest.raises(Refusal) as caught:
            await ask(session, [U1])
        assert caught.value.status == 409
        assert session.state is SessionState.ABORTED
        assert session.ended.is_set()


WHOSE: ContextVar[str] = ContextVar("whose")


async def test_the_engine_is_asked_in_the_context_of_whoever_made_the_session() -> None:
    seen: list[str] = []

    def script(_: RolloutState) -> list[int]:
        seen.append(WHOSE.get())
        return QWEN3.encode_text(f"a{END}")

    WHOSE.set("the maker's")
    async with open_session(ScriptedRolloutCtl(script)) as session:
        WHOSE.set("the request's")
        await ask(session, [U1])
    assert seen == ["the maker's"]


async def test_a_model_without_tools_refuses_them() -> None:
    async with open_session(answering(), template=ChatTemplate(Tokenizer(make_tokenizer("smollm2")))) as session:
        with pytest.raises(Refusal, match="chat template does not know tools") as caught:
            await ask(session, [U1], tools=[TOOL])
    assert caught.value.status == 400


# --- capacity


async def test_answers_end_where_the_trajectory_is_full_and_then_it_ends() -> None:
    limit = len(TEMPLATE.encode([U1])) + 3
    rollout = answering("one two three four five six seven")
    async with open_session(rollout, limit=limit) as session:
        first = await ask(session, [U1])
        second = await ask(session, [U1, said(first), U2])
        result = await session.finalize()
    assert (len(first.response_ids), first.finish_reason) == (3, "length")
    assert (second.text, second.response_ids, second.finish_reason) == ("", [], "length")
    (trajectory,) = result.trajectories
    assert trajectory.ended_by == "max_trajectory_length"
    assert len(whole(trajectory)) == limit
    assert result.was_truncated
    assert len(rollout.requests) == 1


async def test_w6_a_prompt_longer_than_the_context_is_refused_and_no_failure() -> None:
    async with open_session(answering(), limit=5) as session:
        for is_retry in (False, True):
            with pytest.raises(Refusal, match="maximum context length is 5 tokens") as caught:
                session.submit(TurnRequest(messages=[U1]), digest=b"same", is_retry=is_retry)
        result = await session.finalize()
    assert (caught.value.status, caught.value.is_retryable) == (400, False)
    assert (result.was_truncated, result.failure) == (True, None)


async def test_requests_set_what_they_may_and_nothing_else() -> None:
    rollout = answering()
    async with open_session(rollout, request_params=["max_tokens", "stop"]) as session:
        params = {"temperature": 0.1, "max_tokens": 7, "stop": ["x"]}
        await session.submit(TurnRequest(messages=[U1], params=params), digest=b"").wait()
    used = rollout.requests[0].sample_params
    assert (used.temperature, used.max_tokens, used.stops) == (1.0, 7, ["x"])


async def test_a_stop_text_is_sampled_but_not_shown() -> None:
    async with open_session(answering("one STOP")) as session:
        request = TurnRequest(messages=[U1], params={"stop": ["STOP"]})
        result = await session.submit(request, digest=b"").wait()
        (trajectory,) = (await session.finalize()).trajectories
    assert (result.text, result.stop_text) == ("one ", "STOP")
    assert trained(trajectory) == "one STOP"


# --- ends


async def test_finalize_waits_for_what_is_in_flight() -> None:
    rollout = held(f"a{END}")
    async with open_session(rollout, finalize_grace_s=60) as session:
        pending = session.submit(TurnRequest(messages=[U1]), digest=b"")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pending.wait)
            await rollout.begun(1)
            results: list[Any] = []

            async def finalize() -> None:
                results.append(await session.finalize())

            tasks.start_soon(finalize)
            await until(lambda: session.state is SessionState.FINALIZING)
            with pytest.raises(Refusal, match="finalizing and takes no more"):
                session.submit(TurnRequest(messages=[U1]), digest=b"")
            rollout.let_go.set()
    assert [trained(trajectory) for trajectory in results[0].trajectories] == [f"a{END}"]


async def test_after_the_grace_what_is_in_flight_is_ended() -> None:
    rollout = held()
    async with open_session(rollout, finalize_grace_s=0) as session:
        pending = session.submit(TurnRequest(messages=[U1]), digest=b"")
        await rollout.begun(1)
        assert (await session.finalize()).trajectories == []
        with pytest.raises(Refusal, match="ended before the answer came"):
            await pending.wait()
    assert rollout.num_ended == 1


async def test_a_closed_session_takes_no_reward() -> None:
    async with open_session(answering()) as session:
        session.add_reward_info({"reward": 0.0})
        session.add_reward_info({"reward": 1.0})
        assert (await session.finalize()).reward_info == {"reward": 1.0}
        with pytest.raises(Refusal, match="is finalized"):
            session.add_reward_info({"reward": 2.0})
        with pytest.raises(Refusal, match="is finalized"):
            await session.finalize()


async def test_a_template_that_refuses_is_the_clients_error() -> None:
    async with open_session(answering()) as session:
        with pytest.raises(Refusal) as caught:
            await ask(session, [{"role": "user", "content": ["not", "text"]}])
    assert caught.value.status == 400


# --- all of it together

ACTION = st.sampled_from(["go on", "sample again", "replace", "edit", "begin anew"])


@settings(max_examples=40)
@given(st.lists(ACTION, max_size=14), st.data())
def test_every_token_that_is_trained_on_was_sampled_in_that_context(actions: list[str], data: st.DataObject) -> None:
    async def run() -> None:
        rollout = answering()
        async with open_session(rollout) as session:
            conversations: list[tuple[list[Any], TurnResult]] = []

            async def request(messages: list[Any]) -> None:
                conversations.append((messages, await ask(session, messages)))

            await request([U1])
            for number, action in enumerate(actions):
                messages, answer = data.draw(st.sampled_from(conversations))
                match action:
                    case "go on":
                        await request([*messages, said(answer), user(f"q{number}")])
                    case "sample again":
                        await request(messages)
                    case "replace":
                        await request([*messages, user(f"q{number}")])
                    case "edit":
                        await request([*messages, {"role": "assistant", "content": "edited"}, U2])
                    case _:
                        await request([user(f"q{number}")])
            result = await session.finalize()
        sampled = {
            (*(state.prompt_ids or []), *QWEN3.encode_text(f"{number}{END}"))
            for number, state in enumerate(rollout.requests, start=1)
        }
        seen: list[tuple[int, ...]] = []
        for trajectory in result.trajectories:
            tokens, mask = whole(trajectory), trajectory.response_mask
            ends = [
                len(trajectory.prompt_ids) + place + 1
                for place in range(len(mask))
                if mask[place] and (place + 1 == len(mask) or not mask[place + 1])
            ]
            seen += [tuple(tokens[:end]) for end in ends]
        assert set(seen) <= sampled
        assert len(seen) == len(set(seen)), "no turn is trained on twice"

    anyio.run(run)
