"""Settings of src/generate_data.py: edit them here, or give any as a flag."""

from dataclasses import dataclass
from typing import Literal

from ddp_utils import cli


@dataclass
class Config:
    # what people change first
    model_name: str = "data/demo/model"  # folder or hub name
    x0_file: str = "data/demo/x0.txt"  # the system prompt that is to be baked
    question_dataset: str = "data/demo/questions_train.jsonl"  # with question; or .txt, one a line
    columns: str = ""  # fields under other names: question=prompt
    num_questions: int = 88  # the first so many; -1: all
    num_sequences_per_question: int = 25  # replies to each
    batch_size: int = 38  # replies of one forward and process
    max_sequence_length: int = 128  # new tokens of a reply, at most
    temperature: float = 1.0  # 1: as the model has it; 0: the most probable word each time
    top_p: float = 1.0  # draw from the smallest set of words with this much probability

    # other system prompts, under which the baked model is to remain the base model
    retain_prompts: str = "data/demo/retain_prompts.txt"  # trained on: one a line; empty: none
    retain_share: float = 0.3  # of the replies to train on that are sampled under these
    retain_questions: str = ""  # for these; each also asked without any prompt
    other_prompts: str = "data/demo/other_prompts.json"  # measured on, {name: prompt}; empty: none

    # what comes out
    traj_out_file: str = "data/traj_chat.jsonl"  # replies to train on
    val_out_file: str = "data/traj_val.jsonl"  # replies to questions that are held out
    val_split: float = 0.1  # share of the questions that is held out

    # model and hardware
    chat_template: str = "auto"  # auto: the tokenizer's, if it has one; none; or a .jinja file
    chat_template_kwargs: str = ""  # what the template takes, as JSON: {"enable_thinking": false}
    use_mixed_precision: bool = True  # bf16 where the GPU has it, else fp16; fp32 on a CPU
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # of the weights
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device
    timeout_minutes: float = 30.0  # how long a rank waits for the others

    # run
    stop_after_minutes: float = 0.0  # keep what there is and end with status 85; 0: no limit
    seed: int = 0  # of the replies and of the split
    check: bool = False  # read and check everything, sample nothing
    debug: bool = False  # tracebacks for user errors, too


def read(argv: list[str]) -> Config:
    """Return the flags over the defaults; raise UserError for a value out of its range."""
    config = cli.parse(Config, argv)
    cli.check_ranges(
        config,
        num_sequences_per_question=cli.ABOVE_0,
        max_sequence_length=cli.ABOVE_0,
        num_questions=("-1 or >= 1", lambda x: x == -1 or x > 0),
        val_split=("> 0 and < 1", lambda x: 0 < x < 1),
        retain_share=(">= 0 and < 1", lambda x: 0 <= x < 1),
    )
    return config
