"""This command is `python -m lm.merge` now; this file goes with the next release."""

import sys

if __name__ == "__main__":
    print("error: ddp_utils.tools.merge: moved; use python -m lm.merge", file=sys.stderr)
    sys.exit(2)
