"""A language model as judge, behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import Field, field_validator, model_validator

from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.errors import ConfigError
from xrl_lite.judger.adapters import content_text, data_source_name, prompt_text
from xrl_lite.judger.base import Judger, JudgerOutputBatch, JudgerPayload, JudgerPayloadBatch, label_of
from xrl_lite.judger.config import CallableOrPath, JudgerConfig
from xrl_lite.judger.handler import DEFAULT_CONCURRENCY, RewardHandler, load_handler
from xrl_lite.judger.hosts import Hosts
from xrl_lite.judger.outcome import JudgementPolicy, JudgerInputError, RewardValueError, UnsupportedCallError
from xrl_lite.judger.prompt import check_template, fill

if TYPE_CHECKING:
    pass

NAMES = ("prompt", "question", "label", "response", "data_source")

PROMPT_TEMPLATE = """\
You grade answers. The reference answer is right; do not doubt it. Compare the final answer of the candidate with it.
Answers in different forms agree if they mean the same. An answer that is cut off, off topic or missing is incorrect.

<question>
{question}
</question>
<reference_answer>
{label}
</reference_answer>
<candidate_answer>
{response}
</candidate_answer>

Say in one sentence what you compared. Then write a last line: Verdict: correct, or Verdict: incorrect.
"""

_MINUS = "\N{MINUS SIGN}"
VERDICT_PATTERN = rf"[Vv]erdict\W*?((?:[-+{_MINUS}]?\.?\d|\w)(?:[\w.+-]*\w)?)"
"""What follows the word, behind any marks: a word, or a number with its sign and its point."""


class Verdict:
    """Reads the score out of what the judge wrote.

    Args:
        pattern: Regular expression whose first group is the verdict; the last match counts.
        scores: Score of each verdict, whatever its case. Without it the verdict is a number.
        scale: A number is divided by this.
    """

    def __init__(self, pattern: str = VERDICT_PATTERN, scores: Mapping[str, float] | None = None, scale: float = 1.0):
        self._pattern = re.compile(pattern)
        self._scores = {word.casefold(): score for word, score in scores.items()} if scores is not None else None
        self._scale = scale

    def __call__(self, text: str) -> dict[str, Any]:
        """Return ``score`` and ``verdict``.

        Raises:
            RewardValueError: there is no verdict, or one that has no score. That says nothing about the response.
        """
        found = [match[1] for match in self._pattern.finditer(text)]
        if not found:
            raise RewardValueError(f"the judge gave no verdict. It wrote: {text[-300:]!r}")
        verdict = found[-1].strip()
        if self._scores is not None:
            if verdict.casefold() not in self._scores:
                raise RewardValueError(f"the judge's verdict {verdict!r} is none of {', '.join(self._scores)}.")
            return {"score": self._scores[verdict.casefold()], "verdict": verdict}
        try:
            return {"score": float(verdict.replace(_MINUS, "-")) / self._scale, "verdict": verdict}
        except ValueError as error:
            raise RewardValueError(f"the judge's verdict {verdict!r} is not a number.") from error


class LlmJudger(Judger):
    """Puts question, label and response into a prompt, and reads the verdict in the answer.

    Args:
        hosts: The servers.
        read_verdict: Turns the judge's text into a reward dict or a number.
        prompt_template: Text with ``{response}``, and ``{question}`` (last message), ``{prompt}`` (all), ``{label}``,
            ``{data_source}``.
        system_prompt: System message before it.
        model: Model name; asked from the servers when not given.
        sampling: Further parts of the request.
        needs_label: Whether a sample must have a ground truth.
        finish_words: Only what stands behind the last of these in the response is shown.
        max_characters: Of the response, the last so many are shown.
        gold_template: What a right response looks like, with {label} in it.
        judger_name: Name in messages and metrics.
    """

    limits_itself = True

    def __init__(
        self,
        hosts: Hosts,
        read_verdict: RewardHandler,
        *,
        prompt_template: str = PROMPT_TEMPLATE,
        system_prompt: str | None = None,
        model: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        needs_label: bool = True,
        finish_words: Sequence[str] = (),
        max_characters: int = 20_000,
        gold_template: str | None = None,
        judger_name: str = "llm_judge",
    ) -> None:
        super().__init__(judger_name)
        self.hosts = hosts
        self._read_verdict = read_verdict
        self._prompt_template = prompt_template
        self._system_prompt = system_prompt
        self._model = model
        self._sampling = dict(sampling or {})
        self._needs_label = needs_label
        self._finish_words = tuple(finish_words)
        self._max_characters = max_characters
        self._gold_template = gold_template

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Return what the prompt is made of."""
        return {
            "response": rollout_state.response,
            "label": label_of(rollout_state),
            "prompt": prompt_text(rollout_state.message),
            "question": content_text(rollout_state.message[-1].get("content")) if rollout_state.message else "",
            "data_source": data_source_name(rollout_state),
        }

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Return what the verdict says.

        Raises:
            JudgerInputError: no response, or no label where one is needed.
            RewardValueError: the answer holds no verdict.
            RuntimeError: no server answered.
        """
        if isinstance(payload, list):
            raise UnsupportedCallError("LlmJudger does not support batch payloads.")
        if payload["response"] is None or (self._needs_label and payload["label"] is None):
            raise JudgerInputError(
                "RolloutState must have a response, and reward_model with 'ground_truth', for judging."
            )
        values = {name: "" if payload[name] is None else str(payload[name]) for name in NAMES}
        values["response"] = last_part(payload["response"], self._finish_words)[-self._max_characters :]
        text = await self.hosts.post("/v1/chat/completions", self._body(values), read_content)
        found: Any = self._read_verdict(text)
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {"score": found}

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Not supported: one request judges one sample."""
        raise UnsupportedCallError("LlmJudger does not support batch_judge.")

    def gold_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return the label in the template, if there is one."""
        return None if self._gold_template is None else self._gold_template.replace("{label}", str(label))

    async def aclose(self) -> None:
        """Close the connections."""
        await super().aclose()
        await self.hosts.aclose()

    def _body(self, values: Mapping[str, str]) -> dict[str, Any]:
        messages = [{"role": "user", "content": fill(self._prompt_template, values)}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return {"model": self._model, "messages": messages, **self._sampling}


class HostedJudgerConfig(JudgerConfig):
    """What judgers on model servers have in common. `reward_handler` and `extra_info` have no effect."""

    hosts: list[str] = Field(min_length=1)
    """``host:port`` or URLs of servers that all serve the same model."""

    model: str | None = None
    """Name of the model; asked from the servers when not given."""

    request_timeout: float = Field(default=30.0, gt=0)
    """Limit of one request, in seconds; a judgement makes up to `max_retries` of them."""

    max_retries: int = Field(default=3, gt=0)
    """Requests for one judgement before it fails. A server that failed is left alone for a while."""

    retry_wait_s: float = Field(default=1.0, ge=0)
    """Wait between two requests for one judgement, in seconds."""

    api_key_env: str | None = None
    """Environment variable that holds the key; sent as a bearer token."""

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

    def make_hosts(self) -> Hosts:
        """Return the servers; none is asked yet.

        Raises:
            ConfigError: the variable with the key is not set.
        """
        headers: dict[str, str] = {}
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(f"judger {self.judger_name!r}: the variable {self.api_key_env} is not set.")
            headers["Authorization"] = f"Bearer {key}"
        return Hosts(
            self.hosts,
            judger=self.judger_name,
            request_timeout=self.request_timeout,
            max_retries=self.max_retries,
            retry_wait_s=self.retry_wait_s,
            max_concurrency=self.max_concurrency or DEFAULT_CONCURRENCY,
            headers=headers,
        )


class LlmJudgerConfig(HostedJudgerConfig):
    """A language model as judge, with a prompt and a verdict of your own if you like."""

    judger_name: str = "llm_judge"
    """Name in messages and metrics."""

    prompt_template: str = PROMPT_TEMPLATE
    """Prompt with {response}, and {question} (last message), {prompt} (all messages), {label}, {data_source}."""

    system_prompt: str | None = None
    """System message before it."""

    verdict_pattern: str = VERDICT_PATTERN
    """Regular expression whose first group is the verdict; the last match counts."""

    verdict_scores: dict[str, float] | None = Field(default_factory=lambda: {"correct": 1.0, "incorrect": 0.0})
    """Score of each verdict, whatever its case. Null: the verdict is a number."""

    verdict_scale: float = Field(default=1.0, gt=0)
    """A number is divided by this, for example 10."""

    verdict_parser: CallableOrPath | None = Field(default=None, exclude=True)
    """Instead of these: called with the judge's text, returns a number or a reward dict."""

    needs_label: bool = True
    """Whether a sample must have a ground truth."""

    finish_words: list[str] = Field(default_factory=lambda: ["</think>"])
    """Only what stands behind the last of these in the response is shown to the judge."""

    max_characters: int = Field(default=20_000, gt=0)
    """Of the response, the last so many characters are shown."""

    max_tokens: int = Field(default=512, gt=0)
    """Longest answer of the judge."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""

    extra_body: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further parts of the request, for example {top_p: 1}."""

    _code = (*JudgerConfig._code, "verdict_parser")

    @field_validator("prompt_template")
    @classmethod
    def _template_can_be_filled(cls, template: str) -> str:
        return check_template(template, known=NAMES, needed=("response",))

    @model_validator(mode="after")
    def _verdict_can_be_read(self) -> Self:
        try:
            groups = re.compile(self.verdict_pattern).groups
        except re.error as error:
            raise ConfigError(f"verdict_pattern is not a regular expression: {error}") from error
        if not groups:
            raise ConfigError(f"verdict_pattern needs a group around the verdict, got {self.verdict_pattern!r}.")
        self.make_verdict()
        return self

    def reads_prompt(self) -> bool:
        """Return whether the template shows the prompt."""
        return "{prompt}" in self.prompt_template or "{question}" in self.prompt_template

    def make_verdict(self) -> RewardHandler:
        """Return what reads the judge's text."""
        if self.verdict_parser is not None:
            return load_handler(self.verdict_parser, judger=self.judger_name)
        return Verdict(self.verdict_pattern, self.verdict_scores, self.verdict_scale)

    def build_local(self) -> Judger:
        """Return the judger; it asks no server yet."""
        return LlmJudger(
            self.make_hosts(),
            self.make_verdict(),
            prompt_template=self.prompt_template,
            system_prompt=self.system_prompt,
            model=self.model,
            sampling={"max_tokens": self.max_tokens, "temperature": self.temperature, **self.extra_body},
            needs_label=self.needs_label,
            finish_words=self.finish_words,
            max_characters=self.max_characters,
            gold_template=self.gold_template,
            judger_name=self.judger_name,
        )


def last_part(response: str, finish_words: Sequence[str]) -> str:
    """Return what stands behind the last of some words."""
    answer = response.replace("<|im_end|>", "").strip()
    for word in finish_words:
        answer = answer.rpartition(word)[2]
    return answer


def read_content(answer: Any) -> str:
    """Return the text of a chat completion."""
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise TypeError(f"the answer has no text: {answer!r:.200}")
    return content
