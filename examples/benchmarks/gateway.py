"""What the gateway costs: many sessions at once, memory over many of them, long conversations.

Prints times beside the engine's own, CPU of the gateway per request, and ratios against a baseline of the same run:

- what a request takes over HTTP beyond the engine's own time, with `--sessions` sessions of `--turns` turns at once.
  The engine takes `--engine-s` for a turn on average, drawn for each (lognormal, seeded); the sessions begin evenly
  within that time. The clients are another process, on another core, and count from the first byte sent to the last
  one read, connecting included. Beside it the same clients against a bare socket that answers after the same times;
- memory after the first tenth of `--many` short sessions and after all of them;
- CPU time of finding the conversation of a request at 8 and at 64 turns, and of hashing it anew;
- CPU time of the tokens of a conversation of 64 turns, incremental and rendered anew at every turn.

    python examples/benchmarks/gateway.py --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import resource
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread

from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, SampleParams
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.tokenizer import Message, Tokenizer
from xrl_lite.gateway import Gateway, GatewayConfig
from xrl_lite.gateway.chain import Chain, ChatChains, Sampled, select
from xrl_lite.gateway.prefix import PrefixHasher
from xrl_lite.gateway.turn import TurnRequest
from xrl_lite.run import collect_rarely

ANSWER = "The number is larger than the one before, so I would look for the next one in the list. " * 4
QUESTION = "And after that one, which is the next, and why do you think so? " * 2
SPREAD = 0.8
"""Standard deviation of the logarithm of the engine's time for a turn."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--model", required=True, help="folder or hub id of a model with a chat template")
    arguments.add_argument("--sessions", type=int, default=500)
    arguments.add_argument("--turns", type=int, default=8)
    arguments.add_argument("--engine-s", type=float, default=4.0, help="mean seconds the engine takes for a turn")
    arguments.add_argument("--many", type=int, default=20_000)
    given = arguments.parse_args()
    tokenizer = Tokenizer.load(given.model)
    template = ChatTemplate(tokenizer)
    collect_rarely()  # as in a run, and in `xrl-lite serve`
    anyio.run(at_once, tokenizer, given, backend_options={"use_uvloop": True})
    anyio.run(one_after_the_other, tokenizer, given.many, backend_options={"use_uvloop": True})
    print_selection()
    print_tokens(template)


class TurnTimes:
    """Draws how long the engine takes for each turn of each session: the same in every process.

    Args:
        mean_s: On average.
    """

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s
        self._turns: Counter[object] = Counter()

    def next_s(self, session_id: object) -> float:
        """Return the seconds of the next turn of a session."""
        self._turns[session_id] += 1
        draw = random.Random(f"{session_id}/{self._turns[session_id]}").gauss(0.0, SPREAD)
        return self._mean_s * math.exp(draw - SPREAD**2 / 2)


class SlowEngine(ScriptedRolloutCtl):
    """Says the same every time, after a while of its own."""

    def __init__(self, tokens: list[int], mean_s: float) -> None:
        super().__init__(lambda _: tokens)
        self._times = TurnTimes(mean_s)

    async def generate(self, state: RolloutState) -> RolloutState:
        await asyncio.sleep(self._times.next_s(state.session_id))
        state = await super().generate(state)
        self.requests.clear()
        return state


# --- many at once


async def at_once(tokenizer: Tokenizer, given: argparse.Namespace) -> None:
    """Serve clients in another process, and print what it took beyond the engine."""
    engine = SlowEngine(turn_of(tokenizer), given.engine_s)
    answer = {"choices": [{"message": {"role": "assistant", "content": ANSWER}}]}
    async with Gateway(engine, tokenizer=tokenizer, sample_params=SampleParams(max_tokens=4096)) as gateway:
        handles = [gateway.create_session(session_id=f"s{number}") for number in range(given.sessions)]
        targets = [(handle.session_id, handle.api_key) for handle in handles]
        async with await bare_server(json.dumps(answer).encode(), given.engine_s) as bare:
            bare_s, _ = await measure(bare.sockets[0].getsockname()[1], targets, given)
        waited_s = waited_for_core_s()
        overheads, cpu_s = await measure(int(gateway.url.rpartition(":")[2]), targets, given)
        waited_s = waited_for_core_s() - waited_s
        results = [await gateway.finalize_session(handle.session_id) for handle in handles]
    num_turns = [trajectory.num_turns for result in results for trajectory in result.trajectories]
    lost = given.sessions * given.turns - sum(num_turns)
    print(
        f"{given.sessions} sessions at once, {given.turns} turns each, {given.sessions / given.engine_s:.0f} a second: "
        f"{lost} turns lost, {len(num_turns)} trajectories"
    )
    for name, times in (("gateway", overheads), ("bare socket", bare_s)):
        p50, p99 = (times[int(len(times) * share)] * 1e3 for share in (0.5, 0.99))
        print(f"  {name}, beyond the engine's time: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {times[-1] * 1e3:.1f} ms")
    print(f"  CPU of the gateway per request: {cpu_s / len(overheads) * 1e3:.2f} ms")
    print(f"  other programs kept its core from it for {waited_s * 1e3:.0f} ms: with more than some ms, measure again")


async def measure(port: int, targets: list[tuple[str, str]], given: argparse.Namespace) -> tuple[list[float], float]:
    """Return each request's seconds beyond the engine's, sorted, and CPU seconds of this process."""
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {own})
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    given_clients = (there, set(others or [own]), port, targets, given.turns, given.engine_s)
    clients = context.Process(target=run_clients, args=given_clients)
    clients.start()
    await anyio.to_thread.run_sync(here.recv)  # it is there
    cpu = time.process_time()
    here.send("go")
    overheads: list[float] = sorted(await anyio.to_thread.run_sync(here.recv))
    cpu = time.process_time() - cpu
    clients.join()
    os.sched_setaffinity(0, {own, *others})
    return overheads, cpu


def waited_for_core_s() -> float:
    """Return how long this thread was ready to run and did not, because others ran on its core."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


async def bare_server(answer: bytes, seconds: float) -> asyncio.Server:
    """Return a server that reads requests and answers all alike, after the times of their sessions."""
    times = TurnTimes(seconds)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(content_length(head))
                await asyncio.sleep(times.next_s(head.split(b"/")[2].decode()))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)


def run_clients(
    parent: Connection, cores: set[int], port: int, targets: list[tuple[str, str]], turns: int, engine_s: float
) -> None:
    """Talk to the gateway from a process of its own, and send back each request's time beyond the engine's."""
    os.sched_setaffinity(0, cores)
    gc.disable()  # a pause of the clients would look like one of the gateway
    times = TurnTimes(engine_s)

    async def all_of_them() -> list[float]:
        overheads: list[float] = []
        async with asyncio.TaskGroup() as tasks:
            for number, (session_id, key) in enumerate(targets):
                start_after_s = engine_s * number / len(targets)  # requests come evenly
                tasks.create_task(talk(port, session_id, key, turns, start_after_s, times, overheads))
        return overheads

    parent.send("ready")
    parent.recv()
    parent.send(asyncio.run(all_of_them()))


async def talk(
    port: int, session_id: str, key: str, turns: int, start_after_s: float, times: TurnTimes, overheads: list[float]
) -> None:
    """Hold one conversation over one connection."""
    await asyncio.sleep(start_after_s)
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Any] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": QUESTION})
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        head = (
            f"POST /sessions/{session_id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = began or time.perf_counter()
        writer.write(head.encode() + body)
        answer = await read_answer(reader)
        overheads.append(time.perf_counter() - began - times.next_s(session_id))
        began = 0.0
        messages.append(answer["choices"][0]["message"])
    writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Any:
    """Return the body of a response."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    return json.loads(await reader.readexactly(content_length(head)))


def content_length(head: bytes) -> int:
    """Return the length of the body behind a head."""
    (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return length


# --- one after the other


async def one_after_the_other(tokenizer: Tokenizer, num_sessions: int) -> None:
    """Begin and end many sessions, and print the memory after a tenth of them and after all."""
    tokens = turn_of(tokenizer)
    engine = SlowEngine(tokens, 0.0)
    tenth = 0.0
    async with Gateway(engine, tokenizer=tokenizer, config=GatewayConfig()) as gateway:
        began = time.perf_counter()
        for number in range(num_sessions):
            if number == num_sessions // 10:
                tenth = memory_mb()
            handle = gateway.create_session()
            request = TurnRequest(messages=[{"role": "user", "content": QUESTION}])
            await gateway.session(handle.session_id).submit(request, digest=b"").wait()
            result = await gateway.finalize_session(handle.session_id)
            assert len(result.trajectories) == 1
        seconds = time.perf_counter() - began
    whole = memory_mb()
    print(f"memory after {num_sessions // 10} sessions: {tenth:.1f} MB, after {num_sessions}: {whole:.1f} MB")
    print(
        f"  growth per session: {(whole - tenth) * 1024 / (num_sessions * 0.9):.3f} KB; {num_sessions / seconds:.0f}/s"
    )


def memory_mb() -> float:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


# --- long conversations


def print_selection() -> None:
    """Print how long finding a conversation takes at two lengths, beside hashing it anew."""
    found = {turns: selection_us(turns) for turns in (8, 64)}
    for turns, (incremental, anew) in found.items():
        print(f"finding a conversation of {turns} turns: {incremental:.1f} us, hashed anew {anew:.1f} us")
    print(f"  64 turns / 8 turns = {found[64][0] / found[8][0]:.2f}, hashed anew {found[64][1] / found[8][1]:.2f}")


def selection_us(turns: int) -> tuple[float, float]:
    """Return microseconds of the last request of a conversation: with what is known of it, and without."""
    messages = [message for _ in range(turns) for message in (question(), {"role": "assistant", "content": ANSWER})]
    earlier, last = [*messages[:-2], question()], [*messages, question()]
    rounds = 200
    copies = [json.loads(json.dumps(last)) for _ in range(rounds)]
    known = [PrefixHasher() for _ in range(rounds)]
    for hasher in known:
        hasher.hashes(json.loads(json.dumps(earlier)))
    began = time.process_time()
    for hasher, request in zip(known, copies, strict=True):
        select([], hasher.hashes(request), b"", allows_rollback=True)
    incremental = time.process_time() - began
    began = time.process_time()
    for request in copies:
        select([], PrefixHasher().hashes(request), b"", allows_rollback=True)
    return incremental / rounds * 1e6, (time.process_time() - began) / rounds * 1e6


def print_tokens(template: ChatTemplate, turns: int = 64) -> None:
    """Print how long the tokens of a whole conversation take: incremental, and rendered anew at every turn."""
    makes = ChatChains(template, on_rewrite="fork", allows_rollback=True)
    sampled = turn_of(template.tokenizer)
    answer: Message = {"role": "assistant", "content": ANSWER}
    turn = Sampled(
        token_ids=sampled,
        logprobs=[-1.0] * len(sampled),
        policy_versions=[0] * len(sampled),
        finish_reason="stop",
        template_message=answer,
        client_message=answer,
    )
    hasher, chains = PrefixHasher(), list[Chain]()
    messages: list[Message] = []
    began = time.process_time()
    for number in range(turns):
        messages = [*messages, question()]
        step = makes.step(chains, TurnRequest(messages=messages), hasher.hashes(messages), b"")
        step.commit(turn, updated=number)
        chains = [step.chain]
        messages = [*messages, answer]
    incremental = time.process_time() - began
    began = time.process_time()
    for number in range(turns):
        template.encode(messages[: 2 * number + 1])
    anew = time.process_time() - began
    print(f"tokens of {turns} turns: incremental {incremental * 1e3:.1f} ms, anew {anew * 1e3:.1f} ms")
    print(f"  anew / incremental = {anew / incremental:.1f}")


def question() -> Message:
    """Return what the user says."""
    return {"role": "user", "content": QUESTION}


def turn_of(tokenizer: Tokenizer) -> list[int]:
    """Return what the engine samples."""
    return [*tokenizer.encode_text(ANSWER), *sorted(tokenizer.eos_token_ids)[:1]]


if __name__ == "__main__":
    main()
