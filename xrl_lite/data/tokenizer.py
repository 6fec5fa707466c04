"""The model's tokenizer: messages to token ids, token ids to text."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from xrl_lite.errors import ConfigError


class Tokenizer:
    """Wraps a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model_path: str) -> Tokenizer:
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
        return cls(tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a response."""
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset([end])

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Render a prompt with the chat template, generation prompt included, and return its token ids."""
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def check_template(self) -> str | None:
        """Render a conversation of three turns at once and turn by turn; return how they differ, None if they do not.

        Where they do, a conversation cannot be continued token by token: what the model sees in the next turn is not
        what it saw and wrote before.
        """
        turns = [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two?"},
        ]
        whole = self.encode(turns)
        first = self.encode(turns[:1])
        place = next((i for i, (a, b) in enumerate(zip(first, whole, strict=False)) if a != b), None)
        if place is None and len(first) <= len(whole):
            return None
        place = len(whole) if place is None else place
        shown = [self.decode(ids[max(place - 8, 0) : place + 8], False) for ids in (first, whole)]
        return (
            f"token {place} of the first turn is another one in the whole conversation: {shown[0]!r} became "
            f"{shown[1]!r}. The chat template changes earlier turns (some drop reasoning); turns must then be trained "
            f"as rows of their own."
        )

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


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
