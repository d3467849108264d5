"""ApiError: what a client is told of its mistake, or of the server's, as OpenAI's API has it."""

from __future__ import annotations

import json
import traceback
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response

INVALID = "invalid_request_error"
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """An error with an HTTP status, for a client. `param` names the field that is meant."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else INVALID
        kind = _TYPES.get(HTTPStatus(self.status), kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The whole answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body, status=self.status, headers=headers)


def json_response(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """An answer of JSON, in ASCII: half of a surrogate pair can't break it."""
    return Response(
        json.dumps(body, allow_nan=False, separators=(",", ":")),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def place_of(error: Exception) -> str:
    """What an error is and where it was raised, for a log.

    Its message may have a part of a prompt, or a path, and isn't for a log.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    callers = " < ".join(frame.name for frame in reversed(frames[-6:-1]))
    return f"{type(error).__name__}{place} < {callers}"
