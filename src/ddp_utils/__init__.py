"""What the training scripts share: the plumbing and the mathematics, never the loop."""

import re

NAME = r"(?:(?:auth|access)?token|(?:api|access|secret)?[_-]?key|secret|passw(?:or)?d|pwd"
NAME += r"|passphrase|credentials?|sig|signature)"
VALUE = r"""(?:"[^"]+"|'[^']+'|[^\s'"]+)"""
SECRETS = {  # what nobody may read in a file or a log -> pattern, and what stays of it
    "token of Hugging Face": r"\bhf_\w{20,}",
    "key of OpenAI or Anthropic": r"(?<![\w-])sk-[\w-]{20,}",
    "key id of AWS": r"\b(?:AKIA|ASIA)\w{12,}",
    "token of GitHub": r"\b(?:gh[oprsu]|github_pat)_\w{20,}",
    "token of GitLab": r"\bglpat-[\w-]{20,}",
    "token of Slack": r"\bxox[a-z]-[\w-]{10,}",
    "key of Google": r"\bAIza[\w-]{30,}",
    "JSON Web Token": r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?",
    "HTTP header": r"(?i:(?P<kept>\bbearer\s+|\bauthorization:\s*\w+\s+))[\w.~+/=-]{8,}",
    "user of a URL": r"(?P<kept>:/{1,2})[^/?#\s'\"]+(?=@)",
    "password before a host": r"(?P<kept>\b[\w.+-]+:)[^\s/@:'\"]+(?=@(?!sha256:)\w)",
    "name=value": rf"(?i:(?<![a-z])(?P<kept>{NAME}=)){VALUE}",
    "JSON": rf"""(?i:(?P<kept>["'](?:[\w-]*[_-])?{NAME}["']\s*:\s*)){VALUE}""",
    "YAML": rf"(?i:(?<![a-z])(?P<kept>(?:passw(?:or)?d|pwd|secret|api[_-]?key):\s+)){VALUE}",
}


def redact(text) -> str:
    """Return the text with `<redacted>` in place of each token and password."""
    for pattern in SECRETS.values():
        text = re.sub(pattern, lambda at: at.groupdict().get("kept", "") + "<redacted>", text)
    return text


class UserError(Exception):
    """A mistake that its maker can mend: one line on stderr, no traceback, this exit status."""

    exit_code = 2


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
