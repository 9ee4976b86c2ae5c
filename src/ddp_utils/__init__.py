"""What the training scripts share: the plumbing and the mathematics, never the loop."""


class UserError(Exception):
    """A mistake that its maker can mend: one line on stderr, no traceback, this exit status."""

    exit_code = 2


class NonFiniteError(UserError):
    """The loss or the gradient is NaN or infinite: every rank stops before the step."""

    exit_code = 3
