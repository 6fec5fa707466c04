"""How far log-probs of trainer and embedded engine are apart on the same tokens, beside what float32 allows.

    python examples/benchmarks/agreement.py [FOLDER]        # ~/.cache/xrl-lite/smollm2-135m-instruct by default

Each row is a pair: means over 192 sampled tokens. The last two say what is to be expected of any two implementations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from xrl_lite.data import SampleParams
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig
from xrl_lite.engine.worker import EngineWorker
from xrl_lite.rollout.continuous_batch import ContinuousBatch
from xrl_lite.rollout.continuous_batch import Sequence as Response
from xrl_lite.rollout.replica import GenerateRequest

DEFAULT = Path("~/.cache/xrl-lite/smollm2-135m-instruct")
PROMPTS = ("Tell me a story about a fox.", "What is 2+3?", "Write a poem about rain and the sea.", "Explain gravity.")
NUM_RESPONSES, NUM_TOKENS = 8, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    path = str(parser.parse_args().folder.expanduser())
    responses = generate(path)
    engine = torch.cat([torch.tensor(response.logprobs) for response in responses])
    trainer = by_trainer(path, responses)
    sdpa, eager = (by_transformers(path, responses, torch.float32, attention) for attention in ("sdpa", "eager"))
    exact = by_transformers(path, responses, torch.float64, "sdpa")
    print(f"{'':32} {'mean':>8} {'99 %':>8} {'largest':>8}")
    for name, one, other in (
        ("engine and trainer", engine, trainer),
        ("engine and float64", engine, exact),
        ("trainer and float64", trainer, exact),
        ("transformers, sdpa and eager", sdpa, eager),
    ):
        gap = (one.double() - other.double()).abs()
        print(f"{name:32} {gap.mean():8.1e} {gap.quantile(0.99):8.1e} {gap.max():8.1e}")


def generate(path: str) -> list[Response]:
    """Sample responses with the embedded engine."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    batch = ContinuousBatch(load(path), decode=tokenizer.decode, max_batch_size=16, kv_cache_bytes=1 << 30)
    responses: list[Response] = []
    for number in range(NUM_RESPONSES):
        message = {"role": "user", "content": PROMPTS[number // 2]}
        ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        request = GenerateRequest(
            request_id=str(number), prompt_ids=list(ids), sample_params=SampleParams(), seed=number
        )
        responses.append(Response(request=request, max_tokens=NUM_TOKENS, stop_ids=frozenset()))
        batch.add(responses[-1])
    while batch.has_work:
        batch.step()
    return responses


def by_trainer(path: str, responses: Sequence[Response]) -> Tensor:
    """Log-probs as the training engine computes them, in packed rows."""
    worker = EngineWorker(config=EngineConfig(), model_path=path, num_updates=1, seed=0)
    batch = TrainBatch(
        prompts=[list(response.prefix) for response in responses],
        responses=[response.token_ids for response in responses],
        response_masks=[[1] * NUM_TOKENS for _ in responses],
        rollout_logprobs=[response.logprobs for response in responses],
        groups=[number // 2 for number in range(len(responses))],
        sessions=list(range(len(responses))),
        advantages=[[0.0] * NUM_TOKENS for _ in responses],
    )
    return torch.tensor(worker.measure(batch, ["old_logprobs"])["old_logprobs"]).flatten()


@torch.no_grad()
def by_transformers(path: str, responses: Sequence[Response], dtype: torch.dtype, attention: str) -> Tensor:
    """Log-probs of transformers' own forward pass, one response at a time."""
    model = load(path, dtype, attention)
    found: list[Tensor] = []
    for response in responses:
        ids = torch.tensor([[*response.prefix, *response.token_ids]])
        logits = model(ids, use_cache=False).logits[0, len(response.prefix) - 1 : -1]
        targets = torch.tensor(response.token_ids).unsqueeze(1)
        found.append(logits.gather(1, targets).squeeze(1) - logits.logsumexp(dim=1))
    return torch.cat(found)


def load(path: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()


if __name__ == "__main__":
    main()
