"""What a call ends with that is not answered as it should be."""

from __future__ import annotations

from bus.faults import Fault, RequestTimeout, Transient


class ApiAddressInvalid(Fault):
    """The address is none of an API, or would send the token in the clear."""

    code = "api.address"


class ApiUnavailable(Transient):
    """Nothing answers at the address, or the connection was cut."""

    code = "api.unavailable"


class ApiTimeout(RequestTimeout):
    """No answer in time. The request may have been carried out."""

    code = "api.timeout"


class ApiAnswerInvalid(Fault):
    """The answer is none of this API: a proxy's, a newer server's, or one beyond the bounds."""

    code = "api.answer_invalid"


class ApiProblem(Fault):
    """The server's refusal, with its own code. status: of HTTP. retry_after_s: when to ask again; None: not stated."""

    def __init__(self, status: int, code: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail, code=code)
        self.status = status
        self.retry_after_s = retry_after_s
