"""GRPO from end to end in one file, to be read from top to bottom: no actors, no controller, no buffer.

    python examples/grpo_flat.py                          # learns to sort digits, about two minutes on two CPU cores
    python examples/grpo_flat.py --task addition --seed 1

A small transformer is built and warmed up from nothing. Then, in every step: draw prompts, sample a group of responses
to each, score them, compare each response with the rest of its group, and make one update that raises the probability
of the better ones. Task, tiny model, judger and algorithms are the ones that ``xrl-lite train`` uses. The recipes are
those of ``configs/quickstart.yaml`` and ``configs/addition.yaml``, but with one update per step instead of two, a
higher learning rate, and more steps.

What it leaves out, and ``xrl_lite/run.py`` has: generation, judging and training in processes of their own that may
crash or hang without ending the run; asynchronous rollouts and their staleness; micro-batches and several ranks; more
than one update per rollout; a KL penalty; checkpoints; metrics beyond the printed line; other models and data. Samples
follow from one generator per run, not from a seed per response, so its numbers are close to those of ``xrl-lite
train`` but not equal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: idle threads sleep instead of spinning

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from xrl_lite.algorithms import PolicyLossConfig
from xrl_lite.algorithms.advantages.outcome import grpo_advantages
from xrl_lite.algorithms.losses.ratio import vanilla
from xrl_lite.algorithms.packing import collate, pack_groups
from xrl_lite.data import RolloutState, Status
from xrl_lite.data.tasks import iterate_rows, make_rows
from xrl_lite.engine.tiny_model import build_tiny_model
from xrl_lite.engine.tiny_model_config import TinyModelConfig, WarmUpConfig
from xrl_lite.judger import BaseJudger, ExactMatchJudgerConfig

GROUPS_PER_STEP = 32
GROUP_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how."""

    model: TinyModelConfig
    num_steps: int
    learning_rate: float
    max_new_tokens: int
    eval_every: int = 30


RECIPES = {
    "sort_digits": Recipe(
        model=TinyModelConfig(hidden_size=64, intermediate_size=256, warm_up=WarmUpConfig(task="sort_digits")),
        num_steps=180,
        learning_rate=1e-3,
        max_new_tokens=6,
    ),
    "addition": Recipe(
        model=TinyModelConfig(
            architecture="qwen3",
            hidden_size=96,
            intermediate_size=256,
            warm_up=WarmUpConfig(task="addition", target_accuracy=0.25, learning_rate=3e-3, batch_size=64),
        ),
        num_steps=500,
        learning_rate=1.5e-3,
        max_new_tokens=5,
        eval_every=50,
    ),
}


@dataclass(kw_only=True)
class Sample:
    """One response to one prompt."""

    row: dict[str, Any]
    prompt_ids: list[int]
    response_ids: list[int]
    """Ends with the end of sequence, unless it was cut at the longest length."""
    logprobs: list[float]
    """Of each response token, when it was sampled."""
    reward: float = 0.0


async def main(task: str, *, seed: int, num_steps: int | None, cache_dir: Path) -> None:
    recipe = RECIPES[task]
    num_steps = num_steps or recipe.num_steps
    folder = build_tiny_model(recipe.model.model_copy(update={"seed": seed}), cache_dir, report=print)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    judger = ExactMatchJudgerConfig(judger_name=task, sync_in="loop").build()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    # up over 15 steps, then down to a tenth
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 15, 1 - 0.9 * n / num_steps))
    train_rows = endless(list(iterate_rows(task, split="train", seed=seed, options={})), seed=seed)
    eval_rows = make_rows(task, split="eval", num_rows=512, seed=0, options={})

    async def attempt(rows: list[dict[str, Any]], *, group_size: int, temperature: float) -> list[Sample]:
        samples = generate(model, tokenizer, rows, group_size, temperature, recipe.max_new_tokens, generator)
        await judge(judger, tokenizer, samples)
        return samples

    async def evaluate(step: int) -> None:
        of = {t: mean(s.reward for s in await attempt(eval_rows, group_size=1, temperature=t)) for t in (1.0, 0.0)}
        print(f"step {step:3d}: held-out {of[1.0]:.3f} sampled, {of[0.0]:.3f} greedy; {training_s:.0f} s of GRPO")

    training_s = 0.0
    await evaluate(0)
    for step in range(1, num_steps + 1):
        started = time.perf_counter()
        rows = [next(train_rows) for _ in range(GROUPS_PER_STEP)]
        samples = await attempt(rows, group_size=GROUP_SIZE, temperature=1.0)
        rewards = torch.tensor([sample.reward for sample in samples])
        groups = torch.arange(GROUPS_PER_STEP).repeat_interleave(GROUP_SIZE)
        update(model, optimizer, samples, grpo_advantages(rewards, groups))
        schedule.step()
        training_s += time.perf_counter() - started
        if step % recipe.eval_every == 0 or step == num_steps:
            await evaluate(step)


def endless(rows: list[dict[str, Any]], *, seed: int) -> Iterator[dict[str, Any]]:
    """Yield every row once per epoch, in a new order each time."""
    order = random.Random(seed)
    while True:
        yield from order.sample(rows, len(rows))


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    group_size: int,
    temperature: float,
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[Sample]:
    """Sample `group_size` responses to each row's prompt, group by group; temperature 0 means greedy.

    The prompts are read once each; their keys and values are then repeated for the members of the group.
    """
    chats = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    prompts = tokenizer(chats, padding=True, padding_side="left", return_tensors="pt")
    samples = [
        Sample(row=row, prompt_ids=ids[is_prompt.bool()].tolist(), response_ids=[], logprobs=[])
        for row, ids, is_prompt in zip(rows, prompts.input_ids, prompts.attention_mask, strict=True)
        for _ in range(group_size)
    ]
    mask, positions = prompts.attention_mask, (prompts.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=prompts.input_ids, attention_mask=mask, position_ids=positions, use_cache=True)
    cache, logits = output.past_key_values, output.logits[:, -1].repeat_interleave(group_size, dim=0)
    cache.batch_repeat_interleave(group_size)
    mask, position = (x.repeat_interleave(group_size, dim=0) for x in (mask, positions[:, -1:]))
    for _ in range(max_new_tokens):
        tokens, logprobs = choose(logits, temperature, generator)
        going = [sample.response_ids[-1:] != [tokenizer.eos_token_id] for sample in samples]
        if not any(going):
            break
        for sample, goes, token, logprob in zip(samples, going, tokens.tolist(), logprobs.tolist(), strict=True):
            if goes:
                sample.response_ids.append(token)
                sample.logprobs.append(logprob)
        mask, position = torch.cat([mask, torch.ones_like(position)], dim=1), position + 1
        step = {"input_ids": tokens.unsqueeze(1), "attention_mask": mask, "position_ids": position}
        logits = model(**step, past_key_values=cache).logits[:, -1]
    return samples


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pick a token for each row of logits, (rows, vocabulary); return tokens and their log-probabilities, (rows,)."""
    logprobs = (logits / (temperature or 1.0)).log_softmax(dim=-1)
    picked = torch.multinomial(logprobs.exp(), 1, generator=generator) if temperature else logprobs.argmax(-1, True)
    return picked.squeeze(1), logprobs.gather(1, picked).squeeze(1)


async def judge(judger: BaseJudger, tokenizer: PreTrainedTokenizerBase, samples: list[Sample]) -> None:
    """Fill in the reward of each sample."""
    texts = tokenizer.batch_decode([sample.response_ids for sample in samples], skip_special_tokens=True)
    for sample, text in zip(samples, texts, strict=True):
        state = RolloutState(
            message=sample.row["prompt"],
            response=text,
            reward_model=sample.row["reward_model"],
            data_source=sample.row["data_source"],
            status=Status.COMPLETED,
        )
        judged = await judger.judge(state)
        if judged.reward is None:
            raise RuntimeError(f"No reward for {text!r}: {judged.error_msg}")
        sample.reward = judged.reward["score"]


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, samples: list[Sample], advantages: Tensor) -> None:
    """Make one optimizer step on the samples; those of groups without any difference in reward cost nothing.

    The loss is the clipped surrogate of PPO with each sample's advantage at all of its tokens, averaged over tokens.
    """
    used = [(sample, float(value)) for sample, value in zip(samples, advantages, strict=True) if value != 0]
    if not used:
        return
    # the members of a group stand in one row behind one copy of their prompt, and a mask keeps them apart
    groups = pack_groups([s.prompt_ids for s, _ in used], [s.response_ids for s, _ in used], max_tokens_per_row=4096)
    batch = collate([[group] for group in groups])
    places = {"position_ids": batch.position_ids, "attention_mask": batch.attention_mask}
    hidden = model.base_model(input_ids=batch.input_ids, **places, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden.flatten(0, 1)[batch.predicted_at])
    logprobs = logits.log_softmax(dim=-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    values = [value for sample, value in used for _ in sample.response_ids]
    loss, _ = vanilla(
        torch.tensor([[logprob for sample, _ in used for logprob in sample.logprobs]]),
        logprobs.unsqueeze(0),
        torch.tensor([values]),
        torch.ones(1, len(values)),
        loss_agg_mode="token-mean",
        config=PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28),
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on a synthetic task, in one file.")
    parser.add_argument("--task", choices=sorted(RECIPES), default="sort_digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="training steps; the recipe's own number by default")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/xrl-lite/models").expanduser())
    arguments = parser.parse_args()
    asyncio.run(main(arguments.task, seed=arguments.seed, num_steps=arguments.steps, cache_dir=arguments.cache_dir))
