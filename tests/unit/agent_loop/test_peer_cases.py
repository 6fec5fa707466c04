"""Cases from bug reports of other systems: T for calls of tools, K for tokens and masks. One test each, id = case."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_templates import make_tokenizer
from tests.unit.agent_loop.test_sessions import ANSWER, CALCULATOR, QWEN3, Judger, make_state, scripted, trained_text
from xrl_lite.agent_loop import AgentLoopBase, AgentLoopOutput, AgentsConfig, register
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.algorithms.packing import collate, pack_groups
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.errors import RunError
from xrl_lite.trainer.prepare import prepare_train_data

END = "<|im_end|>"


async def run(config: AgentsConfig, *texts: str) -> list[RolloutState]:
    loop = config.build(scripted(*texts), Judger(), tokenizer=QWEN3)
    return await loop.generate_group([make_state()], sample_params=SampleParams(max_tokens=400))


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>{END}"


T_CASES = [
    ("T1", '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"', "not valid JSON", "malformed"),
    ("T2", call('{"name":"calculator","arguments":"{\\"expression\\": \\"71+1\\"}"}'), "72", None),
    ("T3", call('{"name":"calculator","arguments":{"expression":72}}'), "72", None),
    ("T3-list", call('{"name":"calculator","arguments":{"expression":[7]}}'), "[7]", "raised"),
    ("T4", call('{"name":"cacl","arguments":{}}'), "unknown tool cacl; available: calculator", "unknown_tool"),
]


@pytest.mark.parametrize(("case", "written", "answer", "failure"), T_CASES, ids=[case for case, *_ in T_CASES])
async def test_calls(case: str, written: str, answer: str, failure: str | None) -> None:
    (state,) = await run(AgentsConfig(tools=CALCULATOR), written, ANSWER)
    _, _, result, last = state.extra_fields["messages"]
    assert answer in result["content"]
    assert state.extra_fields["tool_counts"]["failures"] == ({} if failure is None else {failure: 1})
    assert (state.status, last["content"]) == (Status.COMPLETED, "It is 7.")


async def test_t7_an_empty_list_of_calls_is_no_call() -> None:
    (state,) = await run(AgentsConfig(tools=CALCULATOR), call("[]"))
    assert state.extra_fields["stopped_by"] == "no_tool_call"
    assert state.extra_fields["num_turns"] == 2


async def test_k1_reasoning_that_is_dropped_ends_a_row_and_each_token_is_trained_once() -> None:
    @register("test_k1")
    class Twice(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
            tokens = self.start(kwargs["raw_prompt"])
            for turn in range(2):
                output = await self.server_manager.generate("r", prompt_ids=tokens.context_ids, sampling_params={})
                tokens.add_sampled(output.token_ids, output.log_probs or [])
                if not turn:
                    tokens.add_messages([{"role": "user", "content": "Sure?"}])
            return [AgentLoopOutput.of_row(row) for row in tokens.rows()]

    texts = [f"<think>\nHm.\n</think>\n\nIt is 7.{END}", f"<think>\nYes.\n</think>\n\n7{END}"]
    states = await run(AgentsConfig(default_agent_loop="test_k1"), *texts)
    assert [trained_text(state) for state in states] == texts
    batch, _ = prepare_train_data([states])
    assert [sum(mask) for mask in batch.response_masks] == [len(QWEN3.encode_text(text)) for text in texts]


def test_k2_a_mask_of_another_length_raises_with_the_sample() -> None:
    state = make_state(7).model_copy(
        update={
            "status": Status.COMPLETED,
            "response": "x",
            "response_ids": [1, 2],
            "response_mask": [1],
            "logprobs": [-1.0, -1.0],
            "reward": {"score": 1.0},
        }
    )
    with pytest.raises(RunError, match=r"Sample 7 of group 0 .*response_mask: it has 1 values for 2 response tokens"):
        prepare_train_data([[state]])


async def test_k5_the_end_token_is_trained_on_although_it_is_the_padding_token_too() -> None:
    long = f"It is a good deal more than that.{END}"
    loop = AgentsConfig(default_agent_loop="single_turn_agent").build(scripted(ANSWER, long), Judger(), tokenizer=QWEN3)
    states = await loop.generate_group([make_state(0), make_state(1)], sample_params=SampleParams(max_tokens=64))
    batch, _ = prepare_train_data([states])
    assert batch.response_masks == [[1] * len(QWEN3.encode_text(text)) for text in (ANSWER, long)]
    assert {row[-1] for row in batch.responses} == QWEN3.eos_token_ids
    rows = [[group] for group in pack_groups(batch.prompts, batch.responses, max_tokens_per_row=1)]
    assert collate(rows).targets.tolist() == [token for response in batch.responses for token in response]


async def test_k6_what_ends_on_another_token_than_the_tokenizers_end_is_not_cut_off() -> None:
    base = make_tokenizer("qwen2.5")
    other = type(base)(
        tokenizer_object=base.backend_tokenizer, eos_token="<|endoftext|>", chat_template=base.chat_template
    )
    tokenizer = Tokenizer(other)
    rollout = ScriptedRolloutCtl.of_texts([ANSWER], tokenizer.encode_text)
    loop = AgentsConfig(default_agent_loop="single_turn_agent").build(rollout, Judger(), tokenizer=tokenizer)
    (state,) = await loop.generate_group([make_state()], sample_params=SampleParams(max_tokens=64))
    batch, metrics = prepare_train_data([[state]])
    assert (state.finish_reason, metrics["completions/clipped_ratio"]) == ("stop", 0.0)
    assert batch.response_masks == [[1] * len(tokenizer.encode_text(ANSWER))]
