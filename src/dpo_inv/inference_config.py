"""Settings of dpo_inv.inference: edit the defaults here, or use flags."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_utils import SettingError, cli

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
BIAS = re.compile(rf"[{LETTERS}]:[-+]?\d*\.?\d+")  # a letter and a number


@dataclass
class Config:
    # model and structures
    model_path: str = "v_48_020"  # .pt file, or name of an official model
    base_model_dir: str = "data/weights"  # folder with the .pt files of named models
    pdb_file: str = ""  # one PDB file
    pdb_list: str = ""  # text file with one path of a PDB file per line
    chain_id: str = ""  # chain to design; empty: the first protein chain
    design_chains: tuple[str, ...] = ()  # several chains to design
    fixed_chains: tuple[str, ...] = ()  # chains that keep their native sequence, as context
    mutable_positions: tuple[str, ...] = ()  # residues to design, such as 52 or A52; empty: all
    mutable_ranges: tuple[str, ...] = ()  # ranges of residues, including both ends: 6-17 A29-39
    fixed_residues: tuple[str, ...] = ()  # residues and ranges that keep their native letter
    numbering: Literal["pdb", "sequence", "gapped"] = "pdb"  # residue numbers; see docs

    # designs
    num_samples: int = 10  # sequences per structure and temperature
    temperature: tuple[float, ...] = (0.1,)  # sampling temperatures; lower is less diverse
    homo_oligomer: bool = False  # design identical chains with one common sequence
    tied_positions: tuple[str, ...] = ()  # residues that get one letter: A5=B5 A10-90=B10-90=C10-90
    omit_AA: str = ""  # amino acids that are never sampled, such as CM
    bias_AA: tuple[str, ...] = ()  # added to the log-probs of amino acids, such as A:0.5 G:-1
    fasta: str = ""  # FASTA file with sequences to score instead of sampling
    probabilities: Literal["none", "conditional", "unconditional"] = "none"  # write a table of them
    output_dir: str = "outputs/inference"  # folder for FASTA, JSON and CSV files

    # run
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # --no_cuda: gloo
    seed: int = 0  # random seed of decoding orders and samples
    check: bool = False  # read and check everything, then exit without writing
    debug: bool = False  # show a traceback for user errors


def read(argv: Sequence[str] | None = None) -> Config:
    """Return the defaults, changed by flags; raise UserError for values that cannot be used."""
    config = cli.parse(Config, argv)
    ranges: dict[str, cli.Range] = {
        "num_samples": cli.ABOVE_0,
        "temperature": ("> 0", lambda values: min(values, default=0) > 0),
        "omit_AA": (f"some, but not all, of {LETTERS}", lambda x: {*x} < {*LETTERS}),
        "bias_AA": ("such as A:0.5 G:-1", lambda texts: all(map(BIAS.fullmatch, texts))),
    }
    cli.check_ranges(config, **ranges)
    if bool(config.pdb_file) == bool(config.pdb_list):
        raise SettingError("pdb_file", "use either pdb_file or pdb_list")
    return config
