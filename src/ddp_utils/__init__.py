"""What the training scripts share: the plumbing and the mathematics, never the loop."""


class UserError(Exception):
    """A mistake that its maker can mend: one line on stderr, no traceback, this exit status."""

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
    """A file could not be written: the disk is full, the quota used up, the folder read-only."""

    exit_code = 4


class Stop(UserError):
    """An end that is no mistake, one line on stdout: 0 nothing left to do, 85 stopped and saved."""

    def __init__(self, line, exit_code):
        super().__init__(line)
        self.exit_code = exit_code
