"""Search over a local folder of texts: what a retrieval tool is to an agent, without a service.

Passages are ranked by BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009)::

    score(q, p) = sum over words w of q:  idf(w) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |p| / mean |p|))
    idf(w)      = ln(1 + (N - n_w + 0.5) / (n_w + 0.5))

with k1 = 1.2 and b = 0.75, N passages, n_w of them with w, tf times w in p.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from xrl_lite.errors import ToolError
from xrl_lite.tools.base import BaseTool
from xrl_lite.tools.response import ToolResponse
from xrl_lite.tools.schema import OpenAIFunctionToolSchema, ToolSchema

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class SearchFolderTool(BaseTool):
    """Finds passages in the text files of a folder.

    Settings (`config`):
        folder: The folder; searched once, when the tool is made.
        pattern: Which files, ``**/*.txt`` by default; a list of patterns works too.
        num_results: Passages in an answer, 3 by default.
        passage_words: Length of a passage, 120 by default.
        name: Name of the tool, "search" by default.
        description: What the model is told.

    Raises:
        ToolError: there is no such folder, or nothing in it matches.
    """

    checks_arguments: ClassVar[bool] = True

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: OpenAIFunctionToolSchema | ToolSchema | None = None,
    ) -> None:
        self.config = dict(config or {})
        super().__init__(config, tool_schema)
        if "folder" not in self.config:
            raise ToolError("search_folder needs config.folder: the folder to search.")
        folder = Path(self.config["folder"]).expanduser()
        if not folder.is_dir():
            raise ToolError(f"search_folder: there is no folder {folder} (looked for {folder.resolve()}).")
        patterns = self.config.get("pattern", "**/*.txt")
        self._index = Bm25Index(
            (str(path.relative_to(folder)), passage)
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
            for path in sorted(folder.glob(pattern))
            if path.is_file()
            for passage in split_passages(
                path.read_text(encoding="utf-8", errors="replace"), int(self.config.get("passage_words", 120))
            )
        )
        if not len(self._index):
            raise ToolError(f"search_folder: no text in {folder} matches {patterns!r}.")

    def get_openai_tool_schema(self) -> ToolSchema:
        description = self.config.get("description", "Search a collection of texts and return the best passages.")
        return {
            "type": "function",
            "function": {
                "name": self.config.get("name", "search"),
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string", "description": "Words to look for."}},
                    "required": ["query"],
                },
            },
        }

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        found = self._index.search(parameters["query"], limit=int(self.config.get("num_results", 3)))
        if not found:
            return ToolResponse(text="No passage has any of these words."), 0.0, {"num_results": 0}
        text = "\n\n".join(f"[{number}] {source}: {passage}" for number, (source, passage) in enumerate(found, start=1))
        return ToolResponse(text=text), 0.0, {"num_results": len(found)}


class Bm25Index:
    """Passages by their words.

    Args:
        passages: (source, text) of each.
    """

    def __init__(self, passages: Iterator[tuple[str, str]]) -> None:
        self._passages = list(passages)
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lengths: list[int] = []
        for number, (_, text) in enumerate(self._passages):
            words = Counter(_words(text))
            self._lengths.append(sum(words.values()))
            for word, times in words.items():
                self._places[word].append((number, times))
        self._mean_length = sum(self._lengths) / max(len(self._lengths), 1)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, *, limit: int) -> list[tuple[str, str]]:
        """Return the best passages, best first; of equals the earlier one comes first."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            places = self._places.get(word, [])
            idf = math.log(1 + (len(self) - len(places) + 0.5) / (len(places) + 0.5))
            for number, times in places:
                length = self._lengths[number] / self._mean_length
                scores[number] += idf * times * (K1 + 1) / (times + K1 * (1 - B + B * length))
        best = heapq.nsmallest(limit, scores, key=lambda number: (-scores[number], number))
        return [self._passages[number] for number in best]


def split_passages(text: str, num_words: int) -> Iterator[str]:
    """Yield passages of about so many words: whole paragraphs where they are shorter."""
    held: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if held and len(held) + len(words) > num_words:
            yield " ".join(held)
            held = []
        held += words
        while len(held) > num_words:
            yield " ".join(held[:num_words])
            held = held[num_words:]
    if held:
        yield " ".join(held)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
