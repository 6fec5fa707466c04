"""What a request is refused with, before it has the shape of a vendor."""

from __future__ import annotations

from typing import Literal

RefusalKind = Literal[
    "invalid_request", "authentication", "not_found", "conflict", "too_large", "context_length", "server", "unavailable"
]

STATUS: dict[RefusalKind, int] = {
    "invalid_request": 400,
    "context_length": 400,
    "authentication": 401,
    "not_found": 404,
    "conflict": 409,
    "too_large": 413,
    "server": 500,
    "unavailable": 503,
}
"""HTTP status of each kind."""


class Refusal(Exception):  # noqa: N818 - an answer, not a defect
    """A request that is not answered.

    Args:
        kind: What is wrong, in one word; decides status and code.
        message: For the person who reads the client's error.
        param: The field of the request that is to blame.
        code: The vendor's code, where there is one for this case.
    """

    def __init__(self, kind: RefusalKind, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.message = message
        self.param = param
        self.code = code

    @property
    def status(self) -> int:
        """HTTP status."""
        return STATUS[self.kind]

    @property
    def is_retryable(self) -> bool:
        """Whether sending the same again may help."""
        return self.kind == "server"


def invalid(message: str, *, param: str | None = None) -> Refusal:
    """Return the refusal of a request that can never be answered."""
    return Refusal("invalid_request", message, param=param)
