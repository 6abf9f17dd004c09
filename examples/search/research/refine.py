"""The refine step: a second model reads what was found and writes down what answers the question.

It needs a server with OpenAI's chat completions, such as a second `penstock serve`; several servers share
the load. Its text is context for the policy, and not trained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import httpx

from research.grammar import show
from research.replicas import NoReplica, ReplicaFailed, Replicas
from research.retrieval_client import Found, post_json
from research.settings import RefineSettings

_PROMPT = (
    "Write down, in one or two sentences, what these passages say that helps to answer the question. "
    'If nothing does, write "{nothing}"\n\nQuestion: {question}\n\nPassages:\n{passages}'
)
NOTHING = "Nothing found."
# Matches up to the end tag, or to the end of the text if the token budget cut it off.
_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


class RefineFailed(Exception):
    """No server refined the results."""


class Refiner:
    """Calls the servers. Safe to use from several tasks."""

    def __init__(self, settings: RefineSettings) -> None:
        """Raises ValueError without a server."""
        self._settings = settings
        self.replicas = Replicas(
            settings.servers, settings.balance, patience_seconds=settings.patience_seconds
        )
        key = os.environ.get(settings.key_variable)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(timeout=settings.timeout_seconds)

    async def close(self) -> None:
        await self._http.aclose()

    async def refine(self, question: str, found: Sequence[Found]) -> str:
        """Summarizes what the chunks say about the question. Raises RefineFailed."""
        prompt = _PROMPT.format(nothing=NOTHING, question=question, passages=show(found))
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
        }

        async def ask(url: str) -> str:
            answer = await post_json(self._http, f"{url}/chat/completions", body, self._headers)
            return _read(answer)

        try:
            return await self.replicas.call(ask)
        except (NoReplica, ValueError) as error:
            raise RefineFailed(str(error)) from error


def _read(answer: Any) -> str:
    """The text of a completion, without its thinking. Raises ReplicaFailed if it is not a completion."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError) as error:
        raise ReplicaFailed(f"not a chat completion: {str(answer)[:200]}") from error
    return _THINKING.sub("", text or "").strip() or NOTHING
