"""Errors that become answers, and the one of the command."""

from typing import Any


class ServeError(Exception):
    """The server cannot start with these options. The message says why; the command shows it without a traceback."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status, 400 to 599.
        message: What was expected, what came, what to do.
        field: The field of the request that is wrong, if one is.
        retry_after_s: Seconds after which the client may try again, if that makes sense.

    Example:
        >>> ApiError(400, "must be at least 1, got 0", field="max_tokens").body()["error"]["message"]
        'max_tokens: must be at least 1, got 0'
    """

    def __init__(
        self, status: int, message: str, *, field: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message if field is None else f"{field}: {message}")
        self.status = status
        self.field = field
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON answer, in OpenAI's error format; clients of SGLang read `error.message` from it too."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
                "param": self.field,
                "code": self.status,
            }
        }

    def headers(self) -> dict[str, str]:
        """`Retry-After`, where there is one."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
