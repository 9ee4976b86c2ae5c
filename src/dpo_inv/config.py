"""Settings of this package's programs: edit the defaults here, or use flags such as --beta 0.3."""

import re
from dataclasses import dataclass
from typing import Literal

from ddp_utils import UserError, cli, data

MEASURED_METHODS = ("ddg", "listwise")  # losses of dpo_inv/losses.py, which need a ddG of each pair
# constants, so that an edited default of train_data is not the demo
DEMO_TRAIN, DEMO_VAL = "data/input/test_data_real.json", "data/input/test_data_val.json"
DEMO_MODEL = "data/demo/protein_model.pt"

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
BIAS = re.compile(rf"[{LETTERS}]:[-+]?\d*\.?\d+")  # a letter and a number

Method = Literal[cli.Method, "ddg", "listwise"]  # type: ignore[valid-type]


@dataclass
class Common:
    """Settings of all programs of this package."""

    # most used settings
    base_model_dir: str = "data/weights"  # folder with the .pt files of named models
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # --no_cuda sets gloo

    # data
    homo_oligomer: bool = False  # design identical chains with one common sequence
    numbering: Literal["pdb", "sequence", "gapped"] = "pdb"  # how residues are numbered

    # run
    seed: int = 0  # random seed of data split, data order, decoding orders and designs
    debug: bool = False  # show a traceback for user errors


@dataclass
class PairSettings(Common):
    """Settings of training and of dpo_inv.evaluate: how pairs are read and decoded."""

    # objective
    decoding_order: Literal["random", "mutated_last"] = "random"  # decoding order of the residues
    num_orders: int = 1  # random decoding orders per pair, over which log-probs are averaged

    # data
    stable_ddg: Literal["negative", "positive"] = "negative"  # sign of a stabilizing ddG
    max_length: int = 500  # maximum residues with context; longer items are dropped and counted
    on_bad_record: Literal["error", "skip"] = "error"  # stop at a malformed item, or skip it


@dataclass
class Config(PairSettings):
    """Settings of dpo_inv.run_dpo_ddp."""

    # most used settings
    base_model_name: str = ""  # name or .pt file; empty: v_48_020, or the demo model for demo data
    train_data: str = "data/input/test_data_real.json"  # preference pairs; see docs/protein_data.md
    val_data: str = ""  # validation pairs; empty: complete families, up to a tenth of train_data
    output_dir: str = "outputs/dpo_ddp"  # folder for models, metrics, plots and checkpoints
    learning_rate: float | None = None  # peak; None: 1e-4, for the demo data 2e-4; alias: --lr
    beta: float = 0.1  # strength of the KL penalty; higher keeps the policy closer to the reference
    batch_size: int = 1  # pairs per forward pass and process; a batch has one backbone
    num_epochs: float | None = None  # passes over the training data; None: 2, for the demo data 10

    # objective
    method: Method = "dpo"  # loss function
    weighting: Literal["none", "margin"] = "none"  # weight of a pair: 1, or its ddG margin
    sft_weight: float | None = None  # weight of the NLL of preferred (None: 0; orpo: 1)
    label_smoothing: float | None = None  # cdpo, robust: fraction of wrong labels (None: 0.1)
    lambda_dpop: float | None = None  # dpop, dpopshift: weight of the penalty (None: 50)
    lambda_shift: float | None = None  # dposhift, dpopshift: weight of rejected (None: 0.75)
    simpo_gamma: float | None = None  # simpo: target reward margin (None: 0.5)
    length_average: bool = False  # average log-probs over residues instead of summing
    temperature: float = 1.0  # temperature of the log-probs in the loss

    # data
    max_rows: int = -1  # use only the first items of train_data; -1: all
    shuffle: bool = True  # shuffle the data in every epoch

    # optimization
    gradient_accumulation_steps: int = 1  # forward passes per optimizer step
    max_steps: int = -1  # optimizer steps; -1: from num_epochs; 0: evaluate only
    lr_scaling: Literal["linear", "sqrt", "world_size", "none"] = "none"  # how the rate is scaled
    base_batch_size: int = 1  # global batch size for which learning_rate is meant
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"  # schedule after the warm-up
    warmup_ratio: float = 0.0  # fraction of the steps for the linear warm-up
    weight_decay: float = 0.0  # AdamW weight decay of weight matrices
    max_grad_norm: float = 1.0  # clip the gradient norm at this value; 0: no clipping

    # run
    save_every: int = 0  # steps between checkpoints; 0: after each epoch and every 15 minutes
    keep_checkpoints: int = 2  # number of most recent checkpoints to keep
    stop_after_minutes: float = 0.0  # save and exit with status 85 after this time; 0: no limit
    restart: bool = False  # start from scratch; the old run folder is renamed
    timeout_minutes: float = 30.0  # time limit of a collective operation
    log_every: int = 0  # steps between printed lines; 0: about 30 lines in all
    report_to: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # logger besides the files
    deterministic: bool = False  # use deterministic kernels; slower
    config: str = ""  # YAML file of settings, `name: value` lines; flags override its values
    check: bool = False  # read and check everything, then exit without training


def read_settings(argv: list[str]) -> Config:
    """Return the settings: flags over the YAML file over the defaults.

    Raises UserError for values that cannot be used.
    """
    config, places = cli.parse_with_file(Config, argv)
    with cli.located(places):
        check(config)
    cli.check_accelerate()
    is_demo = data.is_same_file(config.train_data, DEMO_TRAIN)
    config.val_data = config.val_data or (DEMO_VAL if is_demo else "")
    config.base_model_name = config.base_model_name or (DEMO_MODEL if is_demo else "v_48_020")
    config.learning_rate = config.learning_rate or (2e-4 if is_demo else 1e-4)  # never 0
    config.num_epochs = config.num_epochs or (10.0 if is_demo else 2.0)
    return config


def check(config: Config) -> None:
    """Raise UserError for a value out of its range, or for values that exclude each other."""
    above_0 = dict.fromkeys(("num_orders", "temperature", "max_length"), cli.ABOVE_0)
    cli.check_ranges(config, output_dir=cli.FOLDER, sft_weight=cli.FROM_0, **above_0)
    cli.loss_options(config)
    if config.method in MEASURED_METHODS:
        if config.length_average:
            raise UserError(f"--length_average: {config.method} needs sums; leave it out")
        if config.beta != Config.beta:
            raise UserError(f"--beta: {config.method} does not use it; leave it out")


@dataclass
class DesignConfig(Common):
    """Settings of dpo_inv.inference."""

    # model and structures
    model_path: str = "v_48_020"  # .pt file, or name of an official model
    pdb_file: str = ""  # one PDB file
    pdb_list: str = ""  # text file with one path of a PDB file per line
    chain_id: str = ""  # chain to design; empty: the first protein chain
    design_chains: tuple[str, ...] = ()  # several chains to design
    fixed_chains: tuple[str, ...] = ()  # chains that keep their native sequence, as context
    mutable_positions: tuple[str, ...] = ()  # residues to design, such as 52 or A52; empty: all
    mutable_ranges: tuple[str, ...] = ()  # ranges of residues, including both ends: 6-17 A29-39
    fixed_residues: tuple[str, ...] = ()  # residues and ranges that keep their native letter

    # designs
    num_samples: int = 10  # sequences per structure and temperature
    temperature: tuple[float, ...] = (0.1,)  # sampling temperatures; lower is less diverse
    tied_positions: tuple[str, ...] = ()  # residues that get one letter: A5=B5 A10-90=B10-90=C10-90
    omit_AA: str = ""  # amino acids that are never sampled, such as CM
    bias_AA: tuple[str, ...] = ()  # added to the log-probs of amino acids, such as A:0.5 G:-1
    fasta: str = ""  # FASTA file with sequences to score instead of sampling
    probabilities: Literal["none", "conditional", "unconditional"] = "none"  # write a table of them
    output_dir: str = "outputs/inference"  # folder for FASTA, JSON and CSV files

    # run
    check: bool = False  # read and check everything, then exit without writing


def read_design_settings(argv: list[str]) -> DesignConfig:
    """Return the defaults, changed by flags; raise UserError for values that cannot be used."""
    config = cli.parse(DesignConfig, argv)
    ranges: dict[str, cli.Range] = {
        "num_samples": cli.ABOVE_0,
        "temperature": ("> 0", lambda values: min(values, default=0) > 0),
        "omit_AA": (f"some, but not all, of {LETTERS}", lambda x: {*x} < {*LETTERS}),
        "tied_positions": ("such as A5=B5", lambda texts: all("=" in text for text in texts)),
        "bias_AA": ("such as A:0.5 G:-1", lambda texts: all(map(BIAS.fullmatch, texts))),
    }
    cli.check_ranges(config, **ranges)
    if bool(config.pdb_file) == bool(config.pdb_list):
        raise UserError("--pdb_file: use either pdb_file or pdb_list")
    if config.fasta:
        names = "num_samples", "temperature", "omit_AA", "bias_AA"
        cli.note_unused(config, "sequences of --fasta are scored, none is sampled", *names)
    if config.tied_positions and config.homo_oligomer:
        raise UserError("--tied_positions: --homo_oligomer ties chains by itself; use only one")
    return config
