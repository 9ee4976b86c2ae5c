"""What the training scripts share: the plumbing and the mathematics, never the loop."""

import re

SECRET = re.compile(  # a token or a password in what a user gave: no file and no log has it
    r"hf_\w{20,}|sk-[\w-]{20,}|AKIA\w{12,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)"
    r"|(?i:(?<=token=)|(?<=key=)|(?<=secret=)|(?<=password=))[^\s'\x22]+"
)


class UserError(Exception):
    """A mistake that its maker can mend: one line on stderr, no traceback, this exit status."""

    exit_code = 2
    in_summary = False  # whether the run's summary.json says it, for whoever started the launcher


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
