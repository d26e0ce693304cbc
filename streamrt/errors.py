"""What can go wrong, named by whose fault it is. The gateway maps this tree to HTTP in one table.

StreamrtError               code
+-- ConfigError             config            the pipeline file, a flag or the machine can not do what is asked
|   +-- MissingWeights      missing_weights   a model file is not in the cache; says the exact `streamrt fetch` line
+-- BadRequest              bad_request       the caller's input
|   +-- UnknownTask         unknown_task      no stage of this pipeline does that
|   +-- UnknownModel        unknown_model     no such model
|   +-- UnknownVoice        unknown_voice     no such voice
|   +-- TooLong             too_long          text, audio or prompt over the limit
+-- Overloaded              overloaded        the queue is full; try again later
+-- Unavailable             unavailable       a stage is not ready, or its process was lost before anything was sent
+-- StageFailed             stage_failed      a stage raised, or its process died in mid-stream
+-- Expired                 expired           the request's deadline passed
+-- Cancelled               cancelled         somebody ended it; `cause` says who
+-- NotRunning              not_running       no pipeline of that name is up
+-- AlreadyRunning          already_running   a pipeline of that name is up already
"""

from __future__ import annotations


class StreamrtError(Exception):
    """Root of the tree. `hint` says what to do about it."""

    code = "internal"

    def __init__(self, message: str, *, hint: str = "", param: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param  # the field of the request or the key of the file that is wrong

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(StreamrtError):
    code = "config"


class MissingWeights(ConfigError):
    code = "missing_weights"


class BadRequest(StreamrtError):
    code = "bad_request"


class UnknownTask(BadRequest):
    code = "unknown_task"


class UnknownModel(BadRequest):
    code = "unknown_model"


class UnknownVoice(BadRequest):
    code = "unknown_voice"


class TooLong(BadRequest):
    code = "too_long"


class Overloaded(StreamrtError):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Unavailable(StreamrtError):
    code = "unavailable"


class StageFailed(StreamrtError):
    code = "stage_failed"


class Expired(StreamrtError):
    code = "expired"


class Cancelled(StreamrtError):
    code = "cancelled"

    def __init__(self, message: str = "cancelled", *, cause: str = "client") -> None:
        super().__init__(message)
        self.cause = cause


class NotRunning(StreamrtError):
    code = "not_running"


class AlreadyRunning(StreamrtError):
    code = "already_running"


def from_code(code: str, message: str, *, param: str = "") -> StreamrtError:
    """The error that `code` names, as it came over the wire."""
    error = _by_code.get(code, StageFailed)(message)
    error.param = param
    return error


def tree(root: type[StreamrtError] = StreamrtError) -> list[type[StreamrtError]]:
    """Every class of the tree, root first."""
    return [root, *(c for child in root.__subclasses__() for c in tree(child))]


_by_code = {cls.code: cls for cls in tree() if cls is not StreamrtError}
