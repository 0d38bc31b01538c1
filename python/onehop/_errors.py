"""Exceptions, one class for each group of the library's results."""

from onehop._types import Failure, Result


class Error(RuntimeError):
    """A call of the library failed.

    The text says what was expected, what was found, and on which rank. `code` is the library's result and `name` its
    name, as in onehop.h.
    """

    code: Result
    name: str

    def __init__(self, text: str, code: Result = Result.INTERNAL) -> None:
        super().__init__(text)
        self.code = code
        self.name = f"ONEHOP_ERR_{code.name}"

    def __reduce__(self) -> tuple[type["Error"], tuple[object, ...]]:
        return type(self), (*self.args, self.code)


class ArgumentError(Error, ValueError):
    """An argument, or the order of calls, is wrong: nothing was changed."""

    def __init__(self, text: str, code: Result = Result.ARGUMENT) -> None:
        super().__init__(text, code)


class SetupError(Error):
    """The machine, a peer at start-up, or memory: nothing is left behind, it may be tried again."""


class CommunicatorDead(Error):
    """Every later call on the object fails too: close it and make another.

    `failure` is the record of what happened, the same culprit on all ranks; None where there is none.
    """

    failure: Failure | None

    def __init__(self, text: str, code: Result = Result.ABORTED, failure: Failure | None = None) -> None:
        super().__init__(text, code)
        self.failure = failure

    def __reduce__(self) -> tuple[type[Error], tuple[object, ...]]:
        return type(self), (*self.args, self.code, self.failure)


class InternalError(Error):
    """A fault of onehop itself."""


def failure_of(record: tuple[int, int, int, int, int, int, int, str]) -> Failure:
    """The extension's tuple as a record."""
    return Failure(Result(record[0]), *record[1:])


def make_error(
    code: int, name: str, text: str, record: tuple[int, int, int, int, int, int, int, str] | None = None
) -> Error:
    """The exception for a result. Called by the extension."""
    result = Result(code) if code in Result.__members__.values() else Result.INTERNAL
    if result <= -400:
        return InternalError(text or name, result)
    if result <= -300:
        return CommunicatorDead(text, result, failure_of(record) if record else None)
    return SetupError(text, result) if result <= -200 else ArgumentError(text, result)
