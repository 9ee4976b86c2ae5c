"""Modules that the training scripts share: everything except the training loops."""


class UserError(Exception):
    """A mistake that the user can fix: one line on stderr, no traceback, exit status 2."""

    exit_code = 2


class SettingError(UserError):
    """A setting has a value that cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"--{field}: {problem}")
        self.field = field
        self.problem = problem


class NonFiniteError(UserError):
    """The loss or the gradient is NaN or infinite: every rank stops before the step."""

    exit_code = 3


class WriteError(UserError):
    """A file could not be written: the disk is full or read-only, or a quota is used up."""

    exit_code = 4


class Stop(UserError):
    """A normal end, one line on stdout: 0 for nothing left to do, 85 for stopped and saved."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def parse_number(name: str, text: str, lowest: int = 0, highest: int = 2**31) -> int:
    """Return the number in a text, such as an environment variable.

    Raises UserError if it is not a whole number from lowest to highest.
    """
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise UserError(f"{name}: '{text}' must be a whole number from {lowest} to {highest}")
    return int(text)
