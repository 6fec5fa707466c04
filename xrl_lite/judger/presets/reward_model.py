"""Reward models: a sequence classifier scores prompt and response. In an actor of its own, or behind vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from xrl_lite.actors import CPUResourcesConfig
from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.errors import ConfigError
from xrl_lite.judger.adapters import content_text, prompt_text
from xrl_lite.judger.base import Judger, JudgerOutputBatch, JudgerPayload, JudgerPayloadBatch
from xrl_lite.judger.config import JudgerConfig
from xrl_lite.judger.hosts import Hosts
from xrl_lite.judger.outcome import JudgerInputError, UnsupportedCallError
from xrl_lite.judger.presets.llm_judge import HostedJudgerConfig
from xrl_lite.judger.prompt import check_template, fill
from xrl_lite.judger.serial_thread import SerialThread
from xrl_lite.lazy import is_installed

Activation = Literal["auto", "none", "sigmoid", "softmax"]

GIB = 1 << 30


class RewardModelJudger(Judger):
    """Scores with a transformers model on the CPU: the logit of a model with one label, or the probability of one.

    The model is loaded by `prepare`, or with the first judgement.

    Args:
        model: Folder or hub id of a model with a head for sequence classification, and its tokenizer.
        activation: What is done with the logits. auto: nothing for one label, softmax for several.
        label_index: Which label's value is the score.
        max_length: Longer texts are cut at the front, in tokens, so that the end of the response is always read.
        request_timeout: Longest run of one judgement, in seconds.
        judger_name: Name in messages and metrics.
    """

    limits_itself = True

    def __init__(
        self,
        model: str,
        *,
        activation: Activation = "auto",
        label_index: int = -1,
        max_length: int = 4096,
        request_timeout: float = 120.0,
        judger_name: str = "reward_model",
    ) -> None:
        super().__init__(judger_name)
        self._path = model
        self._activation: Activation = activation
        self._label_index = label_index
        self._max_length = max_length
        self._request_timeout = request_timeout
        self._thread = SerialThread(f"judger {judger_name}")
        self._loaded: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model out: another process loads its own."""
        return {**self.__dict__, "_loaded": None}

    def prepare(self) -> None:
        """Load model and tokenizer, if that is not done."""
        self._load()

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Return the messages and the response."""
        return {"message": rollout_state.message, "response": rollout_state.response}

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Score one payload or several.

        Raises:
            JudgerInputError: no response.
            JudgementTimeoutError: it ran longer than `request_timeout`.
        """
        payloads = payload if isinstance(payload, list) else [payload]
        if any(one["response"] is None for one in payloads):
            raise JudgerInputError("RolloutState must have a response for judging.")
        scores = await self._thread.run(self._score, payloads, limit_s=self._request_timeout)
        outputs: list[dict[str, Any]] = [{"score": score} for score in scores]
        return outputs if isinstance(payload, list) else outputs[0]

    def _score(self, payloads: Sequence[JudgerPayload]) -> list[float]:
        """Score one after the other: padding would make a score depend on what else is in the batch."""
        import torch

        model, tokenizer = self._load()
        scores: list[float] = []
        for payload in payloads:
            inputs = tokenizer(
                self._text(tokenizer, payload),
                add_special_tokens=tokenizer.chat_template is None,  # a template writes them itself
                truncation=True,
                max_length=self._max_length,
                return_tensors="pt",
            )
            with torch.inference_mode():
                logits_L = model(**inputs).logits[0].float()  # noqa: N806 - L labels
            scores.append(self._activate(logits_L)[self._label_index].item())
        return scores

    def _activate(self, logits_L: Any) -> Any:  # noqa: N803
        activation = self._activation
        if activation == "auto":
            activation = "none" if len(logits_L) == 1 else "softmax"
        match activation:
            case "none":
                return logits_L
            case "sigmoid":
                return logits_L.sigmoid()
            case "softmax":
                return logits_L.softmax(dim=0)

    def _text(self, tokenizer: Any, payload: JudgerPayload) -> str:
        messages = [*payload["message"], {"role": "assistant", "content": payload["response"]}]
        if tokenizer.chat_template is None:
            return "\n".join(content_text(message.get("content")) for message in messages)
        return tokenizer.apply_chat_template(messages, tokenize=False)

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            library: Any = AutoModelForSequenceClassification
            tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(self._path, truncation_side="left")
            model: Any = library.from_pretrained(self._path).float().eval()
            model.config.pad_token_id = None  # rows are not padded, and the last token of a text may be that one
            self._loaded = model, tokenizer
        return self._loaded


class RewardModelJudgerConfig(JudgerConfig):
    """A reward model on the CPU, in an actor of its own. `reward_handler`, `extra_info` and `signature` have no effect.

    Needs ``pip install 'xrl-lite[train]'``.
    """

    judger_name: str = "reward_model"
    """Name in messages and metrics."""

    model: str
    """Folder or hub id of a model with a head for sequence classification, and its tokenizer."""

    activation: Activation = "auto"
    """What is done with the logits: none, sigmoid, softmax. auto: none for one label, softmax for several."""

    label_index: int = -1
    """Which label's value is the score."""

    max_length: int = Field(default=4096, gt=0)
    """Longer texts are cut at the front, in tokens."""

    request_timeout: float = Field(default=120.0, gt=0)
    """Longest run of one judgement, in seconds."""

    cpu_resources: CPUResourcesConfig | None = Field(
        default_factory=lambda: CPUResourcesConfig(cpu_memory_per_worker=4 * GIB)
    )
    """The actors, each with a copy of the model. None loads it into this process."""

    def reads_prompt(self) -> bool:
        """Return True."""
        return True

    @model_validator(mode="after")
    def _libraries_are_there(self) -> Self:
        missing = [name for name in ("torch", "transformers") if not is_installed(name)]
        if missing:
            raise ConfigError(f"a reward model needs {missing[0]}. Install it with: pip install 'xrl-lite[train]'")
        return self

    def build_local(self) -> Judger:
        """Return the judger; the model is not loaded yet."""
        return RewardModelJudger(
            self.model,
            activation=self.activation,
            label_index=self.label_index,
            max_length=self.max_length,
            request_timeout=self.request_timeout,
            judger_name=self.judger_name,
        )


class ClassifyJudger(Judger):
    """Scores with a reward model behind vLLM's ``/classify``.

    Args:
        hosts: The servers.
        model: Model name; asked from the servers when not given.
        input_template: What the model reads: text with ``{prompt}`` and ``{response}``.
        label_index: Which label's probability is the score.
        judger_name: Name in messages and metrics.
    """

    limits_itself = True

    def __init__(
        self,
        hosts: Hosts,
        *,
        model: str | None = None,
        input_template: str = "{prompt}\n{response}",
        label_index: int = -1,
        judger_name: str = "reward_model",
    ) -> None:
        super().__init__(judger_name)
        self.hosts = hosts
        self._model = model
        self._input_template = input_template
        self._label_index = label_index

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Return the text of the prompt, and the response."""
        return {"prompt": prompt_text(rollout_state.message), "response": rollout_state.response}

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Return the probability of the label.

        Raises:
            JudgerInputError: no response.
            RuntimeError: no server answered.
        """
        if isinstance(payload, list):
            raise UnsupportedCallError("ClassifyJudger does not support batch payloads.")
        if payload["response"] is None:
            raise JudgerInputError("RolloutState must have a response for judging.")
        body = {"model": self._model, "input": fill(self._input_template, payload)}
        return {"score": await self.hosts.post("/classify", body, self._probability)}

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Not supported: one request judges one sample."""
        raise UnsupportedCallError("ClassifyJudger does not support batch_judge.")

    async def aclose(self) -> None:
        """Close the connections."""
        await super().aclose()
        await self.hosts.aclose()

    def _probability(self, answer: Mapping[str, Any]) -> float:
        return float(answer["data"][-1]["probs"][self._label_index])


class ClassifyJudgerConfig(HostedJudgerConfig):
    """A reward model behind vLLM's ``/classify``. `reward_handler`, `extra_info` and `signature` have no effect."""

    judger_name: str = "reward_model"
    """Name in messages and metrics."""

    input_template: str = "{prompt}\n{response}"
    """What the model reads, its chat template included: text with {prompt} and {response}."""

    label_index: int = -1
    """Which label's probability is the score."""

    @field_validator("input_template")
    @classmethod
    def _template_can_be_filled(cls, template: str) -> str:
        return check_template(template, known=("prompt", "response"), needed=("response",))

    def reads_prompt(self) -> bool:
        """Return whether the template shows the prompt."""
        return "{prompt}" in self.input_template

    def build_local(self) -> Judger:
        """Return the judger; it asks no server yet."""
        return ClassifyJudger(
            self.make_hosts(),
            model=self.model,
            input_template=self.input_template,
            label_index=self.label_index,
            judger_name=self.judger_name,
        )
