"""Settings of ad/evaluate.py: edit them here, or give any as a flag."""

from dataclasses import dataclass

from ddp_utils import cli


@dataclass
class Config:
    ckpt_dir: str = "runs/ad_demo"  # a run's folder
    eval_episodes: int = 60  # of one try, in one context
    eval_copies: int = 8  # tries of each task
    eval_temperature: float | None = None  # of its actions; empty: the run's
    eval_explore_temperature: float | None = None  # the same, until it has seen a reward
    seed: int = 0  # of what it tries
    debug: bool = False  # tracebacks for user errors, too


def read(argv: list[str]) -> Config:
    """Return the flags over the defaults; raise UserError for a value out of its range."""
    config = cli.parse(Config, argv)
    names = "eval_episodes eval_copies eval_temperature eval_explore_temperature"
    cli.check_ranges(config, **dict.fromkeys(names.split(), cli.ABOVE_0))
    return config
