"""A sequence classifier as judger, in this process and in an actor of its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.build import judger_system
from tests.unit.judger.states import make_state
from xrl_lite.actors import CPUResourceManager, set_cpu_resource_manager
from xrl_lite.judger import RemoteJudger, RewardModelJudgerConfig

pytestmark = pytest.mark.process

RESPONSES = ["1", "3 4 5 6 7", "9 9"]


@pytest.fixture(scope="module")
def classifier(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with two labels."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer: Any = AutoTokenizer.from_pretrained(str(tiny_model_folder))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=2,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("classifier")
    LlamaForSequenceClassification(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


async def scores(judger: Any) -> list[float]:
    states = await asyncio.gather(*(judger.judge(make_state(response, None)) for response in RESPONSES))
    assert all(state.reward is not None for state in states), [state.error_msg for state in states]
    return [state.reward["score"] for state in states]


async def test_a_text_made_by_a_template_begins_as_the_template_says(classifier: Path, tmp_path: Path) -> None:
    """Some tokenizers put a mark before every text, and so do their templates: one is enough."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    folder = shutil.copytree(classifier, tmp_path / "classifier")
    (folder / "chat_template.jinja").unlink()
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    mark = words.id_to_token(0)
    words.post_processor = TemplateProcessing(single=f"{mark} $A", special_tokens=[(mark, 0)])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=mark)
    tokenizer.save_pretrained(str(folder))
    plain = RewardModelJudgerConfig(model=str(folder), cpu_resources=None).build()
    expected = await plain.batch_judge([make_state(f"How many?{each}", None, message=[]) for each in RESPONSES])

    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(str(folder))
    judged = await scores(RewardModelJudgerConfig(model=str(folder), cpu_resources=None).build())
    assert judged == pytest.approx([state.reward["score"] for state in expected if state.reward], abs=1e-6)


async def test_scores_are_the_models_singly_and_in_batches(classifier: Path) -> None:
    local = RewardModelJudgerConfig(model=str(classifier), cpu_resources=None).build()
    expected = await scores(local)
    assert len(set(expected)) == len(RESPONSES)
    assert all(0.0 < score < 1.0 for score in expected)
    batch = await local.batch_judge([make_state(response, None) for response in RESPONSES])
    assert [state.reward["score"] for state in batch if state.reward] == pytest.approx(expected, abs=1e-6)
    first = RewardModelJudgerConfig(model=str(classifier), cpu_resources=None, label_index=0).build()
    assert await scores(first) == pytest.approx([1.0 - score for score in expected], abs=1e-6)
    logits = RewardModelJudgerConfig(model=str(classifier), cpu_resources=None, activation="none").build()
    assert await scores(logits) != pytest.approx(expected)
    missing = RewardModelJudgerConfig(model="/no/such/model", cpu_resources=None).build()
    assert "no/such/model" in str((await missing.judge(make_state("x"))).error_msg)


@pytest.mark.slow  # loads torch in another process
@pytest.mark.timeout(120)
async def test_it_scores_alike_in_an_actor_of_its_own(classifier: Path) -> None:
    expected = await scores(RewardModelJudgerConfig(model=str(classifier), cpu_resources=None).build())
    with judger_system() as system:
        set_cpu_resource_manager(CPUResourceManager(capacity=system))
        async with RewardModelJudgerConfig(model=str(classifier)).build(system) as remote:
            assert isinstance(remote, RemoteJudger)
            assert await scores(remote) == pytest.approx(expected, abs=1e-6)
        set_cpu_resource_manager(None)


def test_a_response_is_needed(classifier: Path) -> None:
    judger = RewardModelJudgerConfig(model=str(classifier), cpu_resources=None).build()
    with pytest.raises(AssertionError, match="must have a response"):
        asyncio.run(judger.judge(make_state(None)))
