"""The model's tokenizer: messages to text, text to token ids, token ids to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from xrl_lite.errors import ConfigError, TemplateError

Message = dict[str, Any]
"""A chat message: ``role``, ``content``, and where they apply ``tool_calls``, ``tool_call_id``, ``name``."""


class Tokenizer:
    """Wraps a transformers tokenizer.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        template_kwargs: Passed to the chat template at every rendering, for example ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._ids_of: dict[tuple[str, ...], frozenset[int]] = {}

    @classmethod
    def load(cls, model_path: str, *, template_kwargs: Mapping[str, Any] | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder or hub id.

        Raises:
            ConfigError: there is none, or it has no chat template.
        """
        transformers: Any = import_module("transformers")  # takes seconds
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"No tokenizer could be loaded from model.path {model_path!r}: {error}") from error
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"The tokenizer of {model_path!r} has no chat template, so prompts cannot be rendered. "
                f"Use the instruct version of the model."
            )
        return cls(tokenizer, template_kwargs=template_kwargs)

    def with_template(self, file: Path | None, template_kwargs: Mapping[str, Any]) -> Tokenizer:
        """Return it with another chat template, and with further arguments of it.

        Args:
            file: Jinja file that takes the place of the model's own template; None keeps that.
            template_kwargs: Passed to the template on top of those there are.

        Raises:
            ConfigError: there is no such file.
        """
        changes = dict(template_kwargs)
        if file is not None:
            changes["chat_template"] = read_template(file)
        return Tokenizer(self.hf, template_kwargs={**self.template_kwargs, **changes}) if changes else self

    @property
    def hf(self) -> Any:
        """The transformers tokenizer inside."""
        return self._tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a response."""
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset([end])

    def encode(self, messages: list[Message]) -> list[int]:
        """Render a prompt with the chat template, generation prompt included, and return its token ids."""
        return self.encode_text(self.render(messages, add_generation_prompt=True))

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None, add_generation_prompt: bool
    ) -> str:
        """Return the text the chat template makes of messages.

        Raises:
            TemplateError: the template refuses them; says why.
        """
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except (JinjaError, TypeError, KeyError, AttributeError, IndexError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"The chat template cannot render messages of the roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text as it stands, special tokens in it included, none added."""
        backend = self._backend
        if backend is not None and backend.truncation is None and backend.padding is None:
            return backend.encode(text, add_special_tokens=False).ids  # the same, for a tenth of the overhead
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_following(self, text: str) -> list[int]:
        """Return the token ids of a text that comes behind a special token.

        Some tokenizers put a space before the first word of what they are given; behind a special token they do not, or
        do so in the way the model has seen.
        """
        anchor = self._anchor
        if anchor is None:
            return self.encode_text(text)
        return self.encode_text(anchor + text)[1:]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        if self._decodes_plainly:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)  # the same, in less time
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a mark of the format and not text."""
        return token_id in self._special_ids

    def token_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of those texts that are one token each; texts the tokenizer has no token for are left out."""
        key = tuple(texts)
        if key not in self._ids_of:
            found = (self._tokenizer.convert_tokens_to_ids(text) for text in texts)
            unknown = self._tokenizer.unk_token_id
            self._ids_of[key] = frozenset(token for token in found if token is not None and token != unknown)
        return self._ids_of[key]

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer of the `tokenizers` library inside; None where it is another."""
        split = getattr(self._tokenizer, "split_special_tokens", False)
        return None if split else getattr(self._tokenizer, "backend_tokenizer", None)

    @cached_property
    def _decodes_plainly(self) -> bool:
        """Whether transformers adds nothing to what the backend decodes: it cleans up spaces, though never for BPE."""
        hf, backend = self._tokenizer, getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend is not self._backend:
            return False
        cleans = bool(getattr(hf, "clean_up_tokenization_spaces", False))
        insists = bool(getattr(hf, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
        return not cleans or (type(backend.model).__name__ == "BPE" and not insists)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added: Any = self._tokenizer.added_tokens_decoder
        return frozenset(self._tokenizer.all_special_ids) | {token for token, mark in added.items() if mark.special}

    @cached_property
    def _anchor(self) -> str | None:
        end = self._tokenizer.eos_token
        return end if end is not None and len(self.encode_text(end)) == 1 else None


class TextStream:
    """The text of tokens that come one after the other. What may be half of a character is held back.

    Only the last tokens are decoded again with each new one, so its cost does not depend on how many there were.

    Args:
        tokenizer: Decodes them.
        skip_special_tokens: Leave marks of the format out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self.text = ""
        """The text so far."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._recent: list[int] = []
        self._num_shown = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Take tokens."""
        self._recent += token_ids
        # a token may look different behind another one: it is decoded together with those shown before it
        shown = self._tokenizer.decode(self._recent[: self._num_shown], self._skip_special_tokens)
        text = self._tokenizer.decode(self._recent, self._skip_special_tokens)
        if len(text) > len(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.text += text[len(shown) :]
            del self._recent[: self._num_shown]
            self._num_shown = len(self._recent)


def read_template(file: Path) -> str:
    """Return the text of a chat template.

    Raises:
        ConfigError: there is no such file.
    """
    if not file.is_file():
        raise ConfigError(f"chat_template: there is no file {file} (looked for {file.resolve()}).")
    return file.read_text(encoding="utf-8")


def check_model_folder(folder: Path) -> None:
    """Check that a folder holds a model with tokenizer and chat template, without loading anything.

    Raises:
        ConfigError: something is missing; says what, and where to get it.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path {folder} is not a Hugging Face model folder: it has no config.json.")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"model.path {folder} has no weights (*.safetensors or *.bin).")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(
            f"model.path {folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json). Save the model's "
            f"tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})."
        )
    settings = folder / "tokenizer_config.json"
    in_settings = settings.is_file() and "chat_template" in settings.read_text(encoding="utf-8")
    if not in_settings and not any(folder.glob("chat_template*")):
        raise ConfigError(
            f"model.path {folder} has no chat template, so prompts cannot be rendered. Use the instruct version of "
            f"the model, or add a chat_template.jinja."
        )


def max_position_embeddings(model_path: str) -> int | None:
    """Return the longest sequence of a model folder in tokens; None where its config does not tell, or for a hub id."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return None
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return settings.get("max_position_embeddings") or settings.get("text_config", {}).get("max_position_embeddings")
