# pyright: basic
"""Continuous batching: sequences join and leave a running batch between two steps. Synchronous; knows no actor.

A step is one forward pass of the model over one row of tokens, whatever they are::

    | prompts of those admitted now | next token of each that runs | padding |
      p0 p0 p0  p1 p1 p1  p2 p2       a b c d e f                    . .

Linear layers see a plain list of tokens, attention knows what belongs together (`kv_cache.attend`), and each sequence
gets its next token at the end. Equal prompts that are admitted together are computed once.

In float32 on the CPU a sequence's tokens and log-probs are, bit for bit, the same whatever else is in the batch: MKL's
products of matrices treat every row alike once there are a few rows per thread (hence the padding), everything else
works on rows. So the number of threads may follow the size of a pass. Only a sequence that had to be computed anew
(memory ran out, new weights came) may differ in rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from xrl_lite.rollout.kv_cache import Decoding, KVCache, KVPool, Layout, Prompts, attend, capacity_for
from xrl_lite.rollout.replica import GenerateRequest
from xrl_lite.rollout.sampling import keep_top_k, keep_top_p, penalise, sample_tokens, uniform

ROWS_PER_THREAD = 8
"""Fewer rows than this for each thread, and a product of matrices may round a row differently than among many."""
WORTH_THREADS = 8192
"""Tokens of a pass times width of the model: with less, threads wait for each other longer than they compute."""
ALIGNMENT = 8
"""The number of tokens of a pass is a multiple of this."""
RESERVED_TOKENS = 32
"""A new sequence gets room for so many tokens of its response at first."""
MAX_PREFILL_TOKENS = 4096
"""Prompts are admitted in one step up to so many tokens (a longer prompt alone)."""

_numbers = iter(range(1, 1 << 62))


@dataclass(eq=False)
class Sequence:
    """One response while it is generated."""

    request: GenerateRequest
    max_tokens: int
    """Tokens after which it ends."""
    stop_ids: frozenset[int]
    """Tokens that end it."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    policy_versions: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    aborted: bool = False
    pool: KVPool | None = None
    row: int = -1

    def __post_init__(self) -> None:
        params = self.request.sample_params
        self.prefix = tuple(self.request.prompt_ids)
        self.stops = params.stops
        self.needs_filter = (
            params.min_tokens > self.request.num_sampled
            or params.top_k > 0
            or params.top_p < 1.0
            or (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the prompt's included."""
        return len(self.prefix) + len(self.token_ids)

    @property
    def reserved(self) -> int:
        """Positions it asks room for when it is admitted."""
        return self.num_tokens + min(self.max_tokens - len(self.token_ids), RESERVED_TOKENS)

    @property
    def step(self) -> int:
        """Which token of the response comes next; counts those of an earlier, aborted call."""
        return self.request.num_sampled + len(self.token_ids)


@dataclass
class StepResult:
    """What a step changed."""

    advanced: list[Sequence]
    """Got a token."""
    ended: list[Sequence]
    """Will get no more."""


class ContinuousBatch:
    """Generates with a transformers model.

    Args:
        model: A causal language model on the CPU; its attention is replaced.
        decode: Token ids -> text, for stop texts.
        max_batch_size: Sequences that run at once.
        kv_cache_bytes: Limit of keys and values; a sequence that runs alone may exceed it.
    """

    def __init__(
        self, model: Any, *, decode: Callable[[list[int]], str], max_batch_size: int, kv_cache_bytes: int
    ) -> None:
        self._model = model
        self._decode = decode
        self._max_batch_size = max_batch_size
        self._kv_cache_bytes = kv_cache_bytes
        self._position_bytes = _position_bytes(model.config, model.dtype.itemsize)
        self._num_threads = torch.get_num_threads()
        self._width: int = model.config.get_text_config().hidden_size
        self._cache = self._empty_cache()
        self._layout = Layout(prompts=[], decoding=[])
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission."""
        self._draws = _Draws([])
        self.policy_version = 0
        name = f"xrl_lite_{next(_numbers)}"
        AttentionInterface.register(name, self._attend)
        model.config._attn_implementation = name

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def start_over(self) -> None:
        """Forget all keys and values: running sequences keep their tokens and are computed anew, first of all."""
        for sequence in self.running:
            sequence.pool = None
        self._cache = self._empty_cache()  # also rows of sequences that a failed step had admitted
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Give every running sequence a token, after admitting those that wait as far as there is room."""
        with computing_with(self._threads_for(len(self.running))):
            return self._step()

    def _step(self) -> StepResult:
        aborted = self._take_aborted()
        self._preempt_until_it_fits()
        self._cache.make_room()
        admitted = self._admit()
        if not admitted and not self.running:
            return StepResult([], aborted)
        num_tokens = len(self.running) + sum(sequence.num_tokens for sequence in admitted)
        with computing_with(self._threads_for(num_tokens)):
            sequences, logits = self._forward(admitted)
            self.running += admitted
            tokens, logprobs = self._sample(sequences, logits)
        ended: list[Sequence] = []
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.policy_versions.append(self.policy_version)
            if token in sequence.stop_ids or (sequence.stops and self._has_stop_text(sequence)):
                sequence.finish_reason = "stop"
                ended.append(sequence)
            elif len(sequence.token_ids) >= sequence.max_tokens:
                sequence.finish_reason = "length"
                ended.append(sequence)
        self._leave(ended)
        return StepResult(sequences, aborted + ended)

    def _empty_cache(self) -> KVCache:
        return KVCache(limit=self._kv_cache_bytes // self._position_bytes)

    # --- who runs

    def _take_aborted(self) -> list[Sequence]:
        aborted = [sequence for sequence in (*self.running, *self.waiting) if sequence.aborted]
        if aborted:
            for sequence in aborted:
                sequence.finish_reason = "abort"
            self._leave([sequence for sequence in aborted if sequence.pool is not None])
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.aborted)
        return aborted

    def _leave(self, sequences: list[Sequence]) -> None:
        if sequences:
            self._cache.remove(sequences)
            gone = set(map(id, sequences))
            self.running = [sequence for sequence in self.running if id(sequence) not in gone]

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        prompts: set[tuple[int, ...]] = set()
        num_tokens = 0
        free = self._kv_cache_bytes - sum(map(self._bytes_of, self.running))
        while self.waiting and len(self.running) + len(admitted) < self._max_batch_size:
            sequence = self.waiting[0]
            prefix = self._whole(sequence)
            cost = 0 if prefix in prompts else len(prefix)
            free -= self._position_bytes * capacity_for(sequence.reserved)
            busy = bool(self.running or admitted)
            if busy and (free < 0 or (admitted and num_tokens + cost > MAX_PREFILL_TOKENS)):
                break
            prompts.add(prefix)
            num_tokens += cost
            admitted.append(self.waiting.popleft())
        return admitted

    def _preempt_until_it_fits(self) -> None:
        """Send the youngest back to wait while the sequences that need more room find none."""
        if self._cache.max_positions * self._position_bytes <= self._kv_cache_bytes:
            return
        needed = sum(map(self._bytes_of, self.running))
        while needed > self._kv_cache_bytes and len(self.running) > 1:
            victim = self.running.pop()
            needed -= self._bytes_of(victim)
            self._cache.remove([victim])
            self.waiting.appendleft(victim)

    def _bytes_of(self, sequence: Sequence) -> int:
        assert sequence.pool is not None, "it runs"
        capacity = sequence.pool.capacity
        return self._position_bytes * (capacity if sequence.num_tokens <= capacity else capacity_for(capacity + 1))

    def _whole(self, sequence: Sequence) -> tuple[int, ...]:
        return (*sequence.prefix, *sequence.token_ids) if sequence.token_ids else sequence.prefix

    # --- one forward pass

    def _threads_for(self, num_tokens: int) -> int:
        return self._num_threads if num_tokens * self._width >= WORTH_THREADS else 1

    def _forward(self, admitted: list[Sequence]) -> tuple[list[Sequence], Tensor]:
        """Return the sequences in the order of the rows of the logits (B, V) float32."""
        ids: list[int] = []
        positions: list[int] = []
        predicting: list[int] = []
        order: list[Sequence] = []
        source: list[int] = []
        prompts: list[Prompts] = []
        for members in _by_length(admitted, self._whole):
            length = len(members[0][0])
            part = Prompts(start=len(ids), num_prompts=len(members), length=length)
            first = len(predicting)
            for number, (prefix, _) in enumerate(members):
                ids += prefix
                positions += range(length)
                predicting.append(part.start + (number + 1) * length - 1)
            sequences = [sequence for _, attempts in members for sequence in attempts]
            prompt_of = [number for number, (_, attempts) in enumerate(members) for _ in attempts]
            order += sequences
            source += [first + number for number in prompt_of]
            prompt_numbers = torch.tensor(prompt_of)
            # rows of those that run stay where they are: new ones are added behind them
            part.rows = [(pool, rows, prompt_numbers[numbers]) for pool, numbers, rows in self._cache.add(sequences)]
            prompts.append(part)
        decoding = self._next_tokens(set(map(id, admitted)), ids, positions, predicting, order, source)
        self._layout = Layout(prompts=prompts, decoding=decoding)
        self._pad(ids, positions, predicting)
        output = self._model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(predicting),
        )
        logits = output.logits[0].float()
        if source == list(range(len(source))):
            return order, logits[: len(source)]
        return order, logits[torch.tensor(source)]

    def _next_tokens(
        self,
        admitted: set[int],
        ids: list[int],
        positions: list[int],
        predicting: list[int],
        order: list[Sequence],
        source: list[int],
    ) -> list[Decoding]:
        decoding: list[Decoding] = []
        for pool in self._cache.pools():
            # those admitted now stand behind the others of their pool
            running = [sequence for sequence in pool.sequences if id(sequence) not in admitted]
            if not running:
                continue
            at = [sequence.num_tokens - 1 for sequence in running]
            decoding.append(Decoding(pool=pool, start=len(ids), positions=at))
            source += range(len(predicting), len(predicting) + len(running))
            predicting += range(len(ids), len(ids) + len(running))
            ids += [sequence.token_ids[-1] for sequence in running]
            positions += at
            order += running
        return decoding

    def _pad(self, ids: list[int], positions: list[int], predicting: list[int]) -> None:
        min_rows = ROWS_PER_THREAD * min(torch.get_num_threads(), 8)
        for values, filler in ((ids, 0), (positions, 0), (predicting, predicting[0])):
            size = max(min_rows, -(-len(values) // ALIGNMENT) * ALIGNMENT)
            values += [filler] * (size - len(values))

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Stand in for the model's attention: query, key and value are (1, heads, T, D)."""
        output = attend(
            self._layout,
            module.layer_idx,
            query[0],
            key[0],
            value[0],
            scaling=options.get("scaling") or query.shape[-1] ** -0.5,
            sliding_window=options.get("sliding_window"),
        )
        return output.unsqueeze(0), None

    # --- one token for each

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> tuple[Tensor, Tensor]:
        if sequences != self._draws.sequences:
            self._draws = _Draws(sequences)
        draws = self._draws
        for number in draws.filtered:
            _filter(logits[number : number + 1], sequences[number])
        random = uniform(draws.seeds, draws.steps)
        draws.steps = draws.steps + 1
        return sample_tokens(logits, random, draws.temperature)

    def _has_stop_text(self, sequence: Sequence) -> bool:
        # a character takes at most 4 tokens, so a text that ended just now lies within these
        number = 4 * max(map(len, sequence.stops)) + 8
        num_earlier = min(number, sequence.request.num_sampled)
        response = [*sequence.prefix[len(sequence.prefix) - num_earlier :], *sequence.token_ids[-number:]]
        tail = self._decode(response[-number:])
        return any(stop in tail for stop in sequence.stops)


class _Draws:
    """What sampling needs of sequences, in their order; the same from step to step as long as they are."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.filtered = [number for number, sequence in enumerate(sequences) if sequence.needs_filter]
        self.seeds = torch.tensor([sequence.request.seed for sequence in sequences], dtype=torch.int64)
        self.steps = torch.tensor([sequence.step for sequence in sequences], dtype=torch.int64)
        self.temperature = torch.tensor(
            [sequence.request.sample_params.temperature for sequence in sequences], dtype=torch.float32
        )


@contextmanager
def computing_with(num_threads: int) -> Iterator[None]:
    """Use so many threads of this process inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_length(
    sequences: list[Sequence], whole: Callable[[Sequence], tuple[int, ...]]
) -> list[list[tuple[tuple[int, ...], list[Sequence]]]]:
    """Group by equal tokens, and these by length."""
    attempts: dict[tuple[int, ...], list[Sequence]] = {}
    for sequence in sequences:
        attempts.setdefault(whole(sequence), []).append(sequence)
    lengths: dict[int, list[tuple[tuple[int, ...], list[Sequence]]]] = {}
    for prefix, members in attempts.items():
        lengths.setdefault(len(prefix), []).append((prefix, members))
    return list(lengths.values())


def _filter(logits: Tensor, sequence: Sequence) -> None:
    """Change one row of logits (1, V) as the sequence's parameters say, in the order in which vLLM does."""
    params = sequence.request.sample_params
    response = [*sequence.prefix[len(sequence.prefix) - sequence.request.num_sampled :], *sequence.token_ids]
    penalise(
        logits,
        torch.tensor(sequence.prefix + tuple(sequence.token_ids)),
        torch.tensor(response, dtype=torch.int64),
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )
    if sequence.step < params.min_tokens:
        logits[0, list(sequence.stop_ids)] = -torch.inf
    if params.top_k > 0:
        logits.copy_(keep_top_k(logits, params.top_k))
    if params.top_p < 1.0:
        logits.copy_(keep_top_p(logits, params.top_p, params.temperature))


def _position_bytes(config: Any, item_bytes: int) -> int:
    """Bytes of keys and values of one position."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * item_bytes
