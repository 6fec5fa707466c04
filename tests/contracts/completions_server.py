"""A completions server for tests: the embedded engine behind OpenAI's protocol, streamed, over plain sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Self

from xrl_lite.data import SampleParams
from xrl_lite.errors import RolloutError
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult
from xrl_lite.rollout.torch_engine import TorchReplica


class CompletionsServer:
    """Serves while inside. `refuse_next` makes it answer so often with 503 first."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.refuse_next = 0
        self.without_ids = False
        self.halts = False
        """Whether responses stop after their first token, until whoever asked goes away."""
        self.num_requests = 0

    async def __aenter__(self) -> Self:
        self._replica = TorchReplica(config=RolloutConfig(), model_path=str(self._model), replica=0)
        self._waiting: dict[str, asyncio.Queue[Any]] = {}
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._collector.cancel()
        self._server.close()

    async def _collect(self) -> None:
        while True:
            collected = await self._replica.collect(0.05)
            for request_id, part in (*collected.progress.items(), *collected.ended.items()):
                if request_id in self._waiting:
                    self._waiting[request_id].put_nowait(part)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST /v1/completions "):
                (length,) = (
                    int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
                )
                await self._answer(json.loads(await reader.readexactly(length)), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        if self.refuse_next:
            self.refuse_next -= 1
            writer.write(b"HTTP/1.1 503 Busy\r\nretry-after: 0.01\r\ncontent-length: 4\r\n\r\nbusy")
            return
        request_id = str(self.num_requests)
        fields = ("temperature", "top_p", "max_tokens", "stop_token_ids")
        request = GenerateRequest(
            request_id=request_id,
            prompt_ids=body["prompt"],
            sample_params=SampleParams(**{name: body[name] for name in fields if name in body}),
            seed=body["seed"],
            stream=True,
        )
        queue = self._waiting[request_id] = asyncio.Queue()
        await self._replica.submit([request])
        first = await queue.get()
        if isinstance(first, RolloutError):
            text = str(first).encode()
            writer.write(b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            await self._stream(first, queue, reader, writer)
        except ConnectionError:
            await self._replica.abort([request_id])
            raise
        finally:
            del self._waiting[request_id]

    async def _stream(
        self,
        part: GenerateResult,
        queue: asyncio.Queue[Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        sent = 0
        while True:
            if self.halts:
                part = GenerateResult(token_ids=part.token_ids[:1], logprobs=part.logprobs[:1])
            new = part.since(sent) if part.finish_reason else part
            sent += len(new.token_ids)
            choice = {
                "text": "x" * len(new.token_ids),
                "token_ids": new.token_ids,
                "logprobs": {"token_logprobs": new.logprobs},
                "finish_reason": new.finish_reason,
            }
            if self.without_ids:
                del choice["token_ids"]
            event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            if self.halts:
                await reader.read()
                raise ConnectionError("whoever asked has gone away")
            if part.finish_reason:
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                return await writer.drain()
            part = await queue.get()
