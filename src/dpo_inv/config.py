"""Settings of dpo_inv.run_dpo_ddp: edit them here, or give any as a flag: --beta 0.3."""

from dataclasses import dataclass
from typing import Literal

from ddp_utils import UserError, cli, data, loggers

MEASURED_METHODS = ("ddg", "listwise")  # losses of stability.py, which need a ddG
DEMO_VAL, DEMO_MODEL = "data/input/test_data_val.json", "data/demo/protein_model.pt"


@dataclass
class Config:
    # what people change first
    train_data: str = "data/input/test_data_real.json"  # items: docs/protein_dpo.md
    val_data: str = ""  # empty: a tenth of the pairs, whole backbones
    output_dir: str = "outputs/dpo_ddp"  # models, curves, metrics, checkpoints
    base_model_name: str = ""  # a name or a .pt file; empty: v_48_020, the demo's for its data
    base_model_dir: str = "data/weights"  # where named models are
    learning_rate: float | None = None  # 1e-4, on the demo's data 2e-4; --lr is the same
    beta: float = 0.1  # how tightly the policy is held to the reference
    batch_size: int = 1  # pairs of one forward and process, of one backbone
    num_epochs: float | None = None  # passes over the data: 2, over the demo's 10
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device

    # objective
    method: Literal[cli.Method, "ddg", "listwise"] = "dpo"  # the loss
    weighting: Literal["none", "margin"] = "none"  # of pairs in the loss: alike, or by their ddG
    sft_weight: float = 0.0  # of the NLL per residue of the preferred sequence
    label_smoothing: float | None = None  # cdpo, robust: share of labels that are wrong (0.1)
    lambda_dpop: float | None = None  # dpop, dpopshift: price of a falling log-prob (50)
    lambda_shift: float | None = None  # dposhift, dpopshift: weight of the unpreferred (0.75)
    simpo_gamma: float | None = None  # simpo: the margin it asks for (0.5)
    length_average: bool = False  # log-probs per residue instead of summed
    decoding_order: Literal["random", "sequential", "mutated_last"] = "random"  # of residues
    num_orders: int = 1  # random orders of a pair; its log-probs are averaged over them
    temperature: float = 1.0  # of the log-probs in the objective

    # data
    altloc: Literal["first", "occupancy"] = "first"  # which of a residue's alternative conformers
    homo_oligomer: bool = False  # the designed chains are copies and get one sequence
    numbering: Literal["pdb", "sequence"] = "pdb"  # of mutations: the file's, or from 1
    stable_ddg: Literal["negative", "positive"] = "negative"  # the sign of a stabilising ddG
    max_length: int = 500  # residues with context; longer items are dropped and counted
    max_rows: int = -1  # read only so many items of train_data
    on_bad_record: Literal["error", "skip"] = "error"  # what to do with a malformed item
    shuffle: bool = True  # a new order in every epoch

    # optimisation
    gradient_accumulation_steps: int = 1  # larger global batch, same memory
    max_steps: int = -1  # -1: by num_epochs; 0: evaluate only
    lr_scaling: Literal["linear", "sqrt", "world_size", "none"] = "none"  # with the global batch
    base_batch_size: int = 1  # the global batch that learning_rate is meant for
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_ratio: float = 0.0  # share of the steps in which the rate rises
    weight_decay: float = 0.0  # AdamW, on matrices
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: do not

    # run
    save_every: int = 0  # steps between checkpoints; 0: each epoch and every 15 minutes
    keep_checkpoints: int = 2  # the newest ones; older ones are removed
    stop_after_minutes: float = 0.0  # save and end with status 85; 0: no limit
    restart: bool = False  # move an unfinished run aside instead of going on with it
    timeout_minutes: float = 30.0  # how long a rank waits for the others
    log_every: int = 1  # steps between printed lines; metrics.jsonl has all
    report_to: loggers.Name = "tensorboard"  # live curves, or files alone
    seed: int = 0  # split, order of the data, decoding orders
    deterministic: bool = False  # deterministic kernels, slower
    check: bool = False  # read and check everything, train nothing
    debug: bool = False  # tracebacks for user errors, too


def read_settings(argv: list[str]) -> Config:
    """Flags over the defaults, checked before anything is read."""
    aliases = {"--lr": "--learning_rate", "--no_cuda": "--backend=gloo"}
    config = cli.parse(Config, argv, aliases=aliases)
    above_0 = dict.fromkeys(("num_orders", "temperature", "max_length"), cli.ABOVE_0)
    cli.check_ranges(config, sft_weight=cli.FROM_0, **above_0)
    if not config.output_dir:
        raise UserError("--output_dir: it is empty; give a folder for the run")
    cli.loss_options(config)  # an option that the method does not use is refused
    if config.method in MEASURED_METHODS and config.length_average:
        raise UserError(f"--length_average: {config.method} takes summed log-probs")
    demo = data.resolve(config.train_data) == data.resolve(Config.train_data)
    config.val_data = config.val_data or (DEMO_VAL if demo else "")
    config.base_model_name = config.base_model_name or (DEMO_MODEL if demo else "v_48_020")
    config.learning_rate = config.learning_rate or (2e-4 if demo else 1e-4)  # never 0
    config.num_epochs = config.num_epochs or (10.0 if demo else 2.0)
    return config
