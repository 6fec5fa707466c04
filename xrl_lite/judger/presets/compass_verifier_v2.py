"""CompassVerifier: a language model behind an OpenAI-compatible endpoint says whether an answer is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from xrl_lite.data.rollout_state import RolloutState, Status
from xrl_lite.judger.adapters import content_text
from xrl_lite.judger.base import Judger, JudgerOutputBatch, JudgerPayloadBatch
from xrl_lite.judger.hosts import Hosts
from xrl_lite.judger.outcome import JudgerInputError, UnsupportedCallError
from xrl_lite.judger.presets.llm_judge import HostedJudgerConfig, last_part, read_content
from xrl_lite.judger.prompt import check_template, fill

if TYPE_CHECKING:
    import httpx

FINISH_WORDS = ("<conclude>", "**Final Answer**", "</think>")
NAMES = ("question", "gold_answer", "llm_response")
_MAX_LINES = 10
_MAX_CHARACTERS = 1000

PROMPT_TEMPLATE = """\
You grade answers. Decide whether the candidate's final answer agrees with the standard answer. The standard answer is
right; do not solve the question again and do not doubt it. Look only at the final answer, not at the reasoning. Answers
in different forms agree if they mean the same; \\boxed{} around an answer does not matter. If there are several parts
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
    """Asks one of several hosts; see `Hosts` for which.

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
        hosts: Sequence[str] | Hosts,
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
        if not isinstance(hosts, Hosts):
            if not hosts:
                raise ValueError("CompassVerifierV2 requires at least one host.")
            hosts = Hosts(
                hosts,
                judger=judger_name,
                request_timeout=request_timeout,
                max_retries=max_retries,
                retry_wait_s=retry_wait_s,
                transport=transport,
            )
        self.hosts = hosts
        self.thinking_finish_words = list(thinking_finish_words or FINISH_WORDS)
        self.model = model
        self._prompt_template = prompt_template

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
        prompt = fill(
            self._prompt_template,
            {
                "question": content_text(payload["message"][-1]["content"]),
                "llm_response": self._judged_part(payload["response"]),
                "gold_answer": str(payload["label"]),
            },
        )
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1,
            "temperature": 0,
        }
        verdict = str(await self.hosts.post("/v1/chat/completions", body, read_content)).strip()
        return {"score": 1 if verdict == "A" else -1, "verdict": verdict}

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Not supported: one request judges one sample."""
        raise UnsupportedCallError("CompassVerifierV2 does not support batch_judge.")

    async def aclose(self) -> None:
        """Close the connections."""
        await super().aclose()
        await self.hosts.aclose()

    def _judged_part(self, response: str) -> str:
        lines = last_part(response, self.thinking_finish_words).split("\n")[-_MAX_LINES:]
        return "\n".join(lines)[-_MAX_CHARACTERS:]


class CompassVerifierV2Config(HostedJudgerConfig):
    """A language model as judge. `reward_handler`, `extra_info` and `signature` have no effect here."""

    judger_name: str = "compass_verifier_v2"
    """Name in messages and metrics."""

    thinking_finish_words: list[str] = Field(default_factory=lambda: list(FINISH_WORDS))
    """Only what stands behind the last of these is judged."""

    prompt_template: str = PROMPT_TEMPLATE
    """Prompt with {question}, {gold_answer} and {llm_response}."""

    @field_validator("prompt_template")
    @classmethod
    def _template_can_be_filled(cls, template: str) -> str:
        return check_template(template, known=NAMES, needed=("llm_response",))

    def reads_prompt(self) -> bool:
        """Return whether the template shows the prompt."""
        return "{question}" in self.prompt_template

    def build_local(self) -> Judger:
        """Return the judger; it asks no server yet."""
        return CompassVerifierV2(
            self.make_hosts(),
            thinking_finish_words=self.thinking_finish_words,
            judger_name=self.judger_name,
            model=self.model,
            prompt_template=self.prompt_template,
        )
