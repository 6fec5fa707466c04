r"""Mathematics of any kind: what is not plainly the same text or number is compared by the library math-verify.

Numbers, fractions, lists and texts are compared first by `math_answers`, which takes microseconds and decides most
samples that are right. The rest goes to math-verify (sympy), which also knows that :math:`(x+1)^2` is
:math:`x^2+2x+1`. Its own time limits are alarms, which work in the main thread only: that is where reward code runs in
a worker process (``cpu_resources``). Anywhere else they are left off, and the limit of the judger holds alone.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from xrl_lite.errors import ConfigError
from xrl_lite.judger.base import Judger
from xrl_lite.judger.config import JudgerConfig, RewardCode
from xrl_lite.judger.math_answers import differ_in_brackets, final_answer, same_answer
from xrl_lite.judger.outcome import JudgementTimeoutError
from xrl_lite.lazy import is_installed

DEFAULT_STEP_TIMEOUT_S = 5

LONGEST_ANSWER = 1000
"""Characters of an answer, or of the end of a response without a marked one, that math-verify reads."""

_ENVIRONMENT = ("$", "\\boxed", "\\[", "\\(")
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{4,}")


def compute_reward(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the final answer of the response, or else its end, with the label.

    Args:
        response: The whole response.
        label: The right answer, in LaTeX or plain.
        extra_info: ``step_timeout``: seconds for each parsing and each comparison, in the main thread.

    Raises:
        JudgementTimeoutError: parsing or comparing took longer than that. It is no reason to call an answer wrong.
    """
    answer = final_answer(response)
    gold = str(label)
    step_timeout = extra_info.get("step_timeout", DEFAULT_STEP_TIMEOUT_S)
    if answer is not None:
        is_right = is_equivalent(answer, gold, step_timeout=step_timeout)
    else:
        is_right = same_answer(response, gold) or _library_says_so(
            response[-LONGEST_ANSWER:], _as_latex(gold), step_timeout=step_timeout
        )
    return {"score": 1.0 if is_right else 0.0, "acc": is_right}


def is_equivalent(answer: str, right: str, *, step_timeout: int = DEFAULT_STEP_TIMEOUT_S) -> bool:
    """Return whether two answers are the same, or mean the same as math-verify sees it.

    Raises:
        JudgementTimeoutError: parsing or comparing took longer than `step_timeout` seconds.
    """
    if same_answer(answer, right):
        return True
    if differ_in_brackets(answer, right):
        return False
    return _library_says_so(_as_latex(answer[:LONGEST_ANSWER]), _as_latex(right), step_timeout=step_timeout)


def require_library(judger: str) -> None:
    """Check that math-verify is there.

    Raises:
        ConfigError: it is not; says how to install it.
    """
    if not is_installed("math_verify"):
        raise ConfigError(f"the {judger} judger needs math-verify. Install it with: pip install 'xrl-lite[math]'")


def _library_says_so(given: str, right: str, *, step_timeout: int) -> bool:
    import math_verify  # loads sympy, half a second
    from math_verify.errors import TimeoutException

    library: Any = math_verify  # its hints are narrower than what it takes

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of limits left off, which is meant
    limit = step_timeout if threading.current_thread() is threading.main_thread() else None
    try:
        gold = library.parse(right, parsing_timeout=limit, raise_on_error=True)
        answer = library.parse(given, parsing_timeout=limit, raise_on_error=True)
        return bool(library.verify(gold, answer, timeout_seconds=limit, raise_on_error=True))
    except TimeoutException as error:  # a BaseException, which would end a worker
        raise JudgementTimeoutError(f"math-verify: {str(error)[:200]} after {step_timeout} s") from error


def _as_latex(answer: str) -> str:
    """Put an answer where math-verify looks for LaTeX; one with words ("14 dollars") is text and stays so."""
    is_ready = any(sign in answer for sign in _ENVIRONMENT) or _WORD.search(answer)
    return answer if is_ready else f"${answer}$"


class MathJudgerConfig(JudgerConfig):
    r"""1.0 if the answer in ``\boxed{}``, behind ``####``, behind "answer is" or at the end equals the label; else 0.0.

    Needs ``pip install 'xrl-lite[math]'``. Give it `cpu_resources`: sympy may take for ever on what a model writes, and
    only a process can be ended.
    """

    judger_name: str = "math"
    """Name in messages and metrics."""

    reward_handler: RewardCode = Field(default_factory=lambda: compute_reward, exclude=True)
    """What scores."""

    step_timeout: int = Field(default=DEFAULT_STEP_TIMEOUT_S, gt=0)
    """Limit of each parsing and each comparison in a worker, in whole seconds; longer is the outcome timeout."""

    @model_validator(mode="after")
    def _library_is_there(self) -> Self:
        require_library("math")
        return self

    def build_local(self) -> Judger:
        """Return the judger, with `step_timeout` in its `extra_info`."""
        return self.native(self.reward_handler, {"step_timeout": self.step_timeout, **self.extra_info})

    def gold_response(self, label: Any) -> str | None:
        """Return the label in a box."""
        return f"\\boxed{{{label}}}"
