"""Settings of dpo_inv.inference: edit them here, or give any as a flag."""

from dataclasses import dataclass
from typing import Literal

from ddp_utils import UserError, cli


@dataclass
class Config:
    # model and structures
    model_path: str = "v_48_020"  # a .pt file, or the name of an official model
    base_model_dir: str = "data/weights"  # where named models are
    pdb_file: str = ""  # one structure
    pdb_list: str = ""  # or a text file with one path per line
    chain_id: str = ""  # the designed chain; empty: the first protein chain
    design_chains: tuple[str, ...] = ()  # or several
    fixed_chains: tuple[str, ...] = ()  # context with its native sequence
    mutable_positions: tuple[int, ...] = ()  # from 0 in the designed sequence; empty: all
    mutable_ranges: tuple[str, ...] = ()  # 6-17 29-39, both ends included
    altloc: Literal["first", "occupancy"] = "first"  # which of a residue's alternative conformers

    # what to do with them
    num_samples: int = 10  # sequences for each structure
    temperature: tuple[float, ...] = (0.1,)  # the lower, the surer; num_samples at each
    homo_oligomer: bool = False  # the designed chains are copies and get one sequence
    omit_AA: str = ""  # letters that are not drawn: CM
    bias_AA: tuple[str, ...] = ()  # A:0.5 G:-1, added to the log-probs of these letters
    omit_AA_per_residue: str = ""  # a JSON file, chain and number: {"A12": "CM"}
    bias_AA_per_residue: str = ""  # a JSON file: {"A12": {"A": 0.5, "G": -1}}
    fasta: str = ""  # score these sequences instead of sampling
    output_dir: str = "outputs/inference"  # FASTA and JSON

    # run
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # --no_cuda: gloo
    seed: int = 0  # decoding orders and letters
    check: bool = False  # read and check everything, write nothing
    debug: bool = False  # tracebacks for user errors, too


def read(argv: list[str]) -> Config:
    """Return the flags over the defaults; raise UserError for a value out of its range."""
    aliases = {"--no_cuda": "--backend=gloo"}
    config = cli.parse(Config, argv, aliases=aliases)
    above_0 = ("> 0", lambda values: min(values, default=0) > 0)
    cli.check_ranges(config, num_samples=cli.ABOVE_0, temperature=above_0)
    if bool(config.pdb_file) == bool(config.pdb_list):
        raise UserError("--pdb_file: give one structure, or --pdb_list with one path per line")
    return config
