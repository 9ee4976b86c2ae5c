"""Settings of ad/evaluate.py: edit the defaults here, or use flags."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_utils import cli


@dataclass
class Config:
    ckpt_dir: str = "runs/ad_demo"  # folder of a finished run
    eval_episodes: int | None = None  # episodes per trial, all in one context; None: as in the run
    eval_copies: int | None = None  # trials per task; None: as in the run
    eval_temperature: float | None = None  # sampling temperature of actions; None: as in the run
    eval_explore_temperature: float | None = None  # before the first reward; None: as in the run
    seed: int | None = None  # random seed of the actions; None: as in the run
    debug: bool = False  # show a traceback for user errors


def read(argv: Sequence[str] | None = None) -> Config:
    """Return the defaults, changed by flags; raise UserError for a value out of its range."""
    config = cli.parse(Config, argv)
    names = ("eval_episodes", "eval_copies", "eval_temperature", "eval_explore_temperature")
    cli.check_ranges(config, **dict.fromkeys(names, cli.ABOVE_0))
    return config
