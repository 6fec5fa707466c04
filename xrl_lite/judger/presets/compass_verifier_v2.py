"""CompassVerifier: a language model behind an OpenAI-compatible endpoint says whether an answer is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
from pydantic import Field, field_validator

from xrl_lite.data.rollout_state import RolloutState, Status
from xrl_lite.errors import ConfigError
from xrl_lite.judger.adapters import content_text
from xrl_lite.judger.base import Judger, JudgerOutputBatch, JudgerPayloadBatch
from xrl_lite.judger.config import JudgerConfig
from xrl_lite.judger.http import SharedClient
from xrl_lite.judger.outcome import JudgementPolicy, JudgerInputError, UnsupportedCallError
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    import httpx

logger = get_logger(__name__)

FINISH_WORDS = ("<conclude>", "**Final Answer**", "</think>")
_MAX_LINES = 10
_MAX_CHARACTERS = 1000

PROMPT_TEMPLATE = """\
You grade answers. Decide whether the candidate's final answer agrees with the standard answer. The standard answer is
right; do not solve the question again and do not doubt it. Look only at the final answer, not at the reasoning. Answers
in different forms agree if they mean the same; \\boxed{{}} around an answer does not matter. If there are several parts
or options, all of them have to agree. An answer that is cut off, repeats itself, is off topic or refuses is invalid.

<question>
{question}
</question>
<standard_answer>
{gold_answer}
</standard_answer>
<candidate_answer>
{llm_response}
</candidate_answer>

Reply with one letter and nothing else. A: correct. B: incorrect. C: invalid.
"""


class CompassVerifierV2(Judger):
    """Asks hosts in turn; one that fails is asked last for the next judgements.

    Args:
        hosts: ``host:port`` of OpenAI-compatible servers of one model.
        request_timeout: Limit of one request, in seconds.
        max_retries: Requests for one judgement before it fails.
        thinking_finish_words: Only what stands behind the last of these is judged.
        judger_name: Name in messages and metrics.
        model: Model name; asked from the first host that answers when not given.
        prompt_template: Text with ``{question}``, ``{gold_answer}`` and ``{llm_response}``.
        retry_wait_s: Wait between two requests.
        transport: Replaces the network, for tests.
    """

    limits_itself = True

    def __init__(
        self,
        hosts: Sequence[str],
        request_timeout: float = 30.0,
        max_retries: int = 3,
        thinking_finish_words: Sequence[str] | None = None,
        *,
        judger_name: str = "compass_verifier_v2",
        model: str | None = None,
        prompt_template: str = PROMPT_TEMPLATE,
        retry_wait_s: float = 1.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(judger_name)
        if not hosts:
            raise ValueError("CompassVerifierV2 requires at least one host.")
        self.hosts = list(hosts)
        self.max_retries = max_retries
        self.thinking_finish_words = list(thinking_finish_words or FINISH_WORDS)
        self.model = model
        self._prompt_template = prompt_template
        self._retry_wait_s = retry_wait_s
        self._client = SharedClient(request_timeout, transport)

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Return 1 for a right answer and -1 for any other; ``verdict`` keeps the letter.

        Raises:
            JudgerInputError: there is no label.
            RuntimeError: no host answered.
        """
        if isinstance(payload, list):
            raise UnsupportedCallError("CompassVerifierV2 does not support batch payloads.")
        if payload["status"] != Status.COMPLETED or payload["response"] is None:
            return {"score": -1}
        if payload["label"] is None:
            raise JudgerInputError("Judger payload must contain label for CompassVerifierV2.")
        prompt = self._prompt_template.format(
            question=content_text(payload["message"][-1]["content"]),
            llm_response=self._judged_part(payload["response"]),
            gold_answer=payload["label"],
        )
        verdict = await self._ask(prompt)
        return {"score": 1 if verdict == "A" else -1, "verdict": verdict}

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Not supported: one request judges one sample."""
        raise UnsupportedCallError("CompassVerifierV2 does not support batch_judge.")

    async def aclose(self) -> None:
        """Close the connections."""
        await super().aclose()
        await self._client.aclose()

    def _judged_part(self, response: str) -> str:
        answer = response.replace("<|im_end|>", "").strip()
        for word in self.thinking_finish_words:
            answer = answer.rpartition(word)[2]
        return "\n".join(answer.split("\n")[-_MAX_LINES:])[-_MAX_CHARACTERS:]

    async def _ask(self, prompt: str) -> str:
        import httpx  # costs a tenth of a second, and most judgers never ask a service

        failure: Exception | None = None
        for attempt in range(self.max_retries):
            if attempt:
                await anyio.sleep(self._retry_wait_s)
            host = self.hosts[0]
            try:
                return await self._ask_host(host, prompt)
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:  # the last three: a malformed answer
                logger.warning(
                    "judger %r: %s did not judge (attempt %d): %r", self.get_judger_name(), host, attempt + 1, error
                )
                failure = error
                if self.hosts[0] == host:
                    self.hosts.append(self.hosts.pop(0))
        raise RuntimeError(f"Cannot connect to judger service for {self.max_retries} times.") from failure

    async def _ask_host(self, host: str, prompt: str) -> str:
        client = await self._client.get()
        if self.model is None:
            listed = await client.get(f"http://{host}/v1/models")
            self.model = str(listed.raise_for_status().json()["data"][0]["id"])
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1,
            "temperature": 0,
        }
        answer = await client.post(f"http://{host}/v1/chat/completions", json=body)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"]).strip()


class CompassVerifierV2Config(JudgerConfig):
    """A language model as judge. `reward_handler`, `extra_info` and `signature` have no effect here."""

    judger_name: str = "compass_verifier_v2"
    """Name in messages and metrics."""

    hosts: list[str] = Field(min_length=1)
    """``host:port`` of OpenAI-compatible servers that all serve the same model."""

    request_timeout: float = Field(default=30.0, gt=0)
    """Limit of one request, in seconds; a judgement makes up to `max_retries` of them."""

    max_retries: int = Field(default=3, gt=0)
    """Requests for one judgement before it fails."""

    thinking_finish_words: list[str] = Field(default_factory=lambda: list(FINISH_WORDS))
    """Only what stands behind the last of these is judged."""

    model: str | None = None
    """Name of the model; asked from the servers when not given."""

    prompt_template: str = PROMPT_TEMPLATE
    """Prompt with {question}, {gold_answer} and {llm_response}."""

    retry_wait_s: float = Field(default=1.0, ge=0)
    """Wait between two requests for one judgement, in seconds."""

    @field_validator("prompt_template")
    @classmethod
    def _template_can_be_filled(cls, template: str) -> str:
        try:
            template.format(question="", gold_answer="", llm_response="")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"may only use {{question}}, {{gold_answer}} and {{llm_response}}: {error!r}") from error
        return template

    @property
    def policy(self) -> JudgementPolicy:
        """The policy, with the limit of a whole judgement."""
        whole_s = self.max_retries * (2 * self.request_timeout + self.retry_wait_s)
        return JudgementPolicy(
            on_error=self.on_error, request_timeout=whole_s, max_initial_failures=self.max_initial_failures
        )

    def waits_rather_than_computes(self) -> bool:
        """Return True: it waits for servers."""
        return True

    def build_local(self) -> Judger:
        """Return the judger; it asks no server yet."""
        return CompassVerifierV2(
            self.hosts,
            request_timeout=self.request_timeout,
            max_retries=self.max_retries,
            thinking_finish_words=self.thinking_finish_words,
            judger_name=self.judger_name,
            model=self.model,
            prompt_template=self.prompt_template,
            retry_wait_s=self.retry_wait_s,
        )
