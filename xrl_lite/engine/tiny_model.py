# pyright: basic
"""Builds a small transformer and its tokenizer from nothing, and warms it up on a task until RL has something to go on.

::

    settings -> random weights -> supervised steps until p(right answer) >= target -> <cache_dir>/<content hash>

The folder is an ordinary transformers folder: ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it, and so does vLLM.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from xrl_lite.data.tasks import iterate_rows
from xrl_lite.engine.tiny_model_config import (
    FINISHED_MARKER,
    TinyModelConfig,
    WarmUpConfig,
    cached_tiny_model,
    tiny_model_path,
)
from xrl_lite.errors import ConfigError, RunError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""``<|user|>sort 4721<|end|><|assistant|>``; the response ends with ``<|end|>``, the tokenizer's end of sequence."""

IGNORED = -100
"""Target of a position that is not trained on."""

PROBE_FROM = 0.8
"""The warm-up measures its accuracy exactly once a batch reaches this share of the target."""


def build_tiny_model(config: TinyModelConfig, cache_dir: Path, *, report: Callable[[str], None] = logger.info) -> Path:
    """Return the folder of a tiny model, building it first where the cache has none.

    The same settings give the same weights, bit for bit, on one machine. The folder appears under its name only when it
    is complete; a second process that wants it at the same time waits for the first.

    Args:
        config: The model and its warm-up.
        cache_dir: Where finished models are kept, one folder each, named by the hash of their settings.
        report: Called with a line of text now and then during the warm-up.

    Raises:
        ConfigError: the task's rows do not fit the model, or there are too few of them.
        RunError: the warm-up did not reach its target.
    """
    with _only_one_builder(tiny_model_path(config, cache_dir)):
        if (cached := cached_tiny_model(config, cache_dir)) is not None:
            return cached
        tokenizer = make_tokenizer(max_length=config.max_position_embeddings)
        with _one_thread():
            model = make_model(config, tokenizer)
            if config.warm_up is not None:
                warm_up(model, tokenizer, config.warm_up, seed=config.seed, report=report)
        folder = tiny_model_path(config, cache_dir)
        _save(model, tokenizer, config, folder)
        return folder


def make_tokenizer(*, max_length: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer that knows the 256 bytes and the marks of a chat: any text goes in and comes out unchanged.

    Ids are 0 for padding, 1 for the end of a message, 2-5 for the roles, then the bytes.
    """
    special = [PAD, END, *ROLES]
    vocabulary = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def make_model(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Make the model with random float32 weights that follow from the seed. Leaves torch's own generator as it was."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[config.architecture]
    model_config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        head_dim=config.hidden_size // config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.initializer_range,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return model_class(model_config)


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    config: WarmUpConfig,
    *,
    seed: int,
    report: Callable[[str], None] = logger.info,
) -> float:
    """Train the model in place on a task's train rows until its sampled accuracy, which it returns, is on target.

    Raises:
        ConfigError: the rows do not fit the model, or there are too few of them.
        RunError: the target was not reached within ``max_steps``.
    """
    inputs, targets = encode_rows(_train_rows(config, seed=seed), tokenizer, max_length=tokenizer.model_max_length)
    probe_inputs, probe_targets = inputs[: config.num_probe_rows], targets[: config.num_probe_rows]
    inputs, targets = inputs[config.num_probe_rows :], targets[config.num_probe_rows :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = _endless_batches(len(inputs), config.batch_size, seed=seed)
    batch_accuracy = 0.0
    model.train()
    for step in range(1, config.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, step / (config.ramp_steps + 1))
        batch = next(batches)
        nll = response_nll(model, inputs[batch], targets[batch])
        loss = nll.sum() / (targets[batch] != IGNORED).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        batch_accuracy = torch.exp(-nll.detach()).mean().item()
        if step % 20 == 0:
            report(f"warm-up: step {step}, loss {loss.item():.3f}, sampled accuracy {batch_accuracy:.3f} in the batch")
        # the batch is a rough measure that costs nothing, and says when the exact one is worth its price
        if batch_accuracy < PROBE_FROM * config.target_accuracy:
            continue
        accuracy = sampled_accuracy(model, probe_inputs, probe_targets)
        if accuracy >= config.target_accuracy:
            report(f"warm-up: finished at step {step}, sampled accuracy {accuracy:.3f}")
            model.eval()
            return accuracy
    raise RunError(
        f"The warm-up on task {config.task!r} ended after {config.max_steps} steps with a sampled accuracy of "
        f"{batch_accuracy:.3f} in the last batch, short of the target of {config.target_accuracy}. Raise max_steps, "
        f"make the model larger, or lower the target."
    )


def response_nll(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return minus the log-probability of each row's response, in nats, [rows].

    Args:
        model: The policy.
        inputs: Token ids, [rows, tokens].
        targets: The next token where it belongs to the response, else -100; [rows, tokens].
    """
    first = int((targets != IGNORED).any(dim=0).nonzero()[0])  # no logits for columns that hold only prompts
    logits = model(input_ids=inputs, use_cache=False, logits_to_keep=inputs.shape[1] - first).logits
    kept = targets[:, first:]
    nll = functional.cross_entropy(logits.flatten(0, 1), kept.flatten(), ignore_index=IGNORED, reduction="none")
    return nll.view_as(kept).sum(dim=1)


@torch.no_grad()
def sampled_accuracy(model: PreTrainedModel, inputs: Tensor, targets: Tensor) -> float:
    """Return how often a response sampled at temperature 1 would be the right one: exactly, and without sampling.

    That is the mean probability of the right response. Arguments as for `response_nll`.
    """
    parts = zip(inputs.split(256), targets.split(256), strict=True)
    return torch.cat([torch.exp(-response_nll(model, *part)) for part in parts]).mean().item()


def encode_rows(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, *, max_length: int
) -> tuple[Tensor, Tensor]:
    """Turn rows into token ids and next-token targets, both [rows, tokens], padded on the right.

    The ground truth is the response. Targets are -100 outside of it; its end of sequence is part of it. Since padding
    comes last and attention is causal, no attention mask is needed.

    Raises:
        ConfigError: a row is longer than the model can read.
    """
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    answers = [f"{row['reward_model']['ground_truth']}{tokenizer.eos_token}" for row in rows]
    encode = tokenizer.backend_tokenizer.encode_batch
    pairs = [(prompt.ids, answer.ids) for prompt, answer in zip(encode(prompts), encode(answers), strict=True)]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    if longest > max_length:
        raise ConfigError(
            f"The longest row of the warm-up has {longest} tokens, prompt and answer together, but the tiny model "
            f"reads {max_length}. Raise max_position_embeddings to {longest} or more."
        )
    inputs = torch.full((len(pairs), longest - 1), cast("int", tokenizer.pad_token_id))
    targets = torch.full((len(pairs), longest - 1), IGNORED)
    for index, (prompt, answer) in enumerate(pairs):
        both = torch.tensor(prompt + answer)
        inputs[index, : len(both) - 1] = both[:-1]
        targets[index, len(prompt) - 1 : len(both) - 1] = both[len(prompt) :]
    return inputs, targets


def _train_rows(config: WarmUpConfig, *, seed: int) -> list[dict[str, Any]]:
    wanted = config.num_probe_rows + config.max_steps * config.batch_size
    rows = list(islice(iterate_rows(config.task, split="train", seed=seed, options=config.options), wanted))
    if len(rows) < config.num_probe_rows + config.batch_size:
        raise ConfigError(
            f"Task {config.task!r} with options {config.options} has {len(rows)} train rows, too few for "
            f"num_probe_rows={config.num_probe_rows} and a batch of {config.batch_size}. Lower either."
        )
    return rows


def _endless_batches(num_rows: int, batch_size: int, *, seed: int) -> Iterator[Tensor]:
    """Yield row numbers, [batch_size] each, in a new order every epoch; a last part below a batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator)
        yield from order[: num_rows - num_rows % batch_size].split(batch_size)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: TinyModelConfig, folder: Path) -> None:
    """Write the folder aside, then give it its name: under its name there is a complete folder or none."""
    partial = folder.with_name(f"{folder.name}.partial")
    for leftover in (partial, folder):  # of a build that was killed, or damaged by hand
        shutil.rmtree(leftover, ignore_errors=True)
    with _no_progress_bars():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    marker = {"config": config.model_dump(mode="json"), "file_sizes": sizes}
    (partial / FINISHED_MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")
    partial.rename(folder)


@contextmanager
def _only_one_builder(folder: Path) -> Generator[None]:
    """Hold the lock of a folder. The kernel drops it when its holder dies, however that happens."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _no_progress_bars() -> Generator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _one_thread() -> Generator[None]:
    """Compute on one thread: the order of sums is then fixed, and a small model gains little from a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
