"""What `examples/` shows of agents and tools is run: two tools, a manager of one's own, an agent that is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.two_tools import prices
from tests.build import build_random_model, write_rows
from tests.chat_templates import make_tokenizer
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.config import load_config
from xrl_lite.data import RolloutState, Status
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.template_check import check_template
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.gateway import BlackBoxAgentsConfig
from xrl_lite.run import train
from xrl_lite.tools import FunctionCall, ToolParser

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/two_tools/grpo.yaml"


def test_the_reward_of_the_two_tools_is_built_up() -> None:
    (row,) = prices.make_rows([(3, "cup")])
    info, prompt = row["extra_info"], row["prompt"]

    def score(*messages: dict[str, Any]) -> float:
        made = {**info, "messages": [*prompt, *messages]}
        return prices.compute_score("prices", "", row["reward_model"]["ground_truth"], made)["score"]

    def result(name: str, content: str) -> dict[str, Any]:
        return {"role": "tool", "name": name, "content": content}

    says = {"role": "assistant", "content": "They cost 15."}
    scores = [
        score(says),
        score(result("price", "Error: unknown tool"), says),
        score(result("price", "There is no cups."), says),
        score(result("price", "5"), says),
        score(result("price", "5"), result("multiply", "15"), says),
    ]
    assert scores == [0.0, 0.0, 0.2, 0.5, 1.0]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
async def test_the_recipe_of_two_tools_trains_the_tiny_model_under_a_manager_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    model = build_random_model(tmp_path / "model", max_position_embeddings=2048)
    rows = write_rows(tmp_path / "rows.jsonl", prices.make_rows([(2, "cup"), (3, "hat"), (4, "lamp")]))
    config = load_config(
        RECIPE,
        [
            f"model.path={model}",
            f"output_dir={tmp_path / 'runs'}",
            f"task.sampler_config.data.path={rows}",
            f"evaluation.data.path={rows}",
            "evaluation.every_steps=2",
            "task.sampler_config.prompt_repeat_k=2",
            "task.agent_loop_config.response_length=8",
            "task.agent_loop_config.sample_params.max_tokens=8",
            "rollout.max_model_len=2048",
            "trainer.num_steps=2",
            "trainer.groups_per_step=2",
            "agent_loop_manager.agent_loop_manager_class=examples/own_manager.py:LongestFirst",
            "report.completions_every=0",
        ],
    )
    summary = await train(config)
    assert summary is not None
    assert summary.last_step == 2
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["num_turns/mean"] for line in lines if "num_turns/mean" in line] == [2.0, 2.0]
    assert sum("eval/greedy/accuracy" in line for line in lines) == 2


def test_a_model_without_tool_support_gets_it_from_the_template_of_the_recipe() -> None:
    text = (RECIPE.parent / "chatml_with_tools.jinja").read_text()
    tokenizer = Tokenizer(make_tokenizer("smollm2"), template_kwargs={"chat_template": text})
    template = ChatTemplate(tokenizer)
    report = check_template(template, tools=[prices.price.schema, prices.multiply.schema])
    assert (report.forks, report.differences) == ([], [])
    (row,) = prices.make_rows([(3, "cup")])
    shown = tokenizer.decode(template.encode(row["prompt"], tools=[prices.price.schema]), False)
    (call,) = ToolParser.get_tool_parser("hermes").parse(shown[shown.rindex("<tool_call>") :], []).calls
    assert (call.name, call.parameters) == ("multiply", {"x": 2, "y": 3})


async def test_an_agent_of_the_openai_agents_package_is_trained_as_it_is() -> None:
    pytest.importorskip("agents")
    tokenizer = Tokenizer(make_tokenizer("qwen3"))
    parser = ToolParser.get_tool_parser("hermes")
    turns = [
        parser.render([FunctionCall("price", '{"item": "cup"}')]) + "<|im_end|>",
        parser.render([FunctionCall("multiply", '{"x": 3, "y": 5}')]) + "<|im_end|>",
        "They cost 15 euros.<|im_end|>",
    ]
    rollout = ScriptedRolloutCtl.of_texts(turns, tokenizer.encode_text)
    settings = {
        "agents": {"shop": {"runner": "examples.openai_agents.train:run_shop_assistant"}},
        "sample_params": {"max_tokens": 400},
    }
    loop = BlackBoxAgentsConfig.model_validate(settings).build(rollout, None, tokenizer=tokenizer)
    state = RolloutState(
        message=[{"role": "user", "content": "What do 3 cups cost together?"}],
        group_id=0,
        rollout_id=0,
        prompt_ids=[1],
        reward_model={"ground_truth": "15"},
    )
    await loop.ready()
    try:
        (done,) = await loop.generate_group([state])
    finally:
        await loop.aclose()
    assert (done.status, done.error_msg) == (Status.COMPLETED, None)
    assert done.reward is not None
    assert done.reward["score"] == 1.0
    pairs = zip(done.response_ids or [], done.response_mask or [], strict=True)
    assert tokenizer.decode([token for token, mask in pairs if mask], False) == "".join(turns)
    results = [message["content"] for message in done.extra_fields["messages"] if message["role"] == "tool"]
    assert results == ["5", "15"]
