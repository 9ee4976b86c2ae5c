"""This command is `python -m lm.chat` now; this file goes with the next release."""

import sys

if __name__ == "__main__":
    print("error: ddp_utils.tools.chat: moved; use python -m lm.chat", file=sys.stderr)
    sys.exit(2)
