"""Settings of src/generate_data.py: edit the defaults here, or use flags."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_utils import cli


@dataclass
class Config:
    # most used settings
    model_name: str = "data/demo/model"  # folder or Hugging Face name of the model
    x0_file: str = "data/demo/x0.txt"  # text file with the system prompt to bake
    question_dataset: str = "data/demo/questions_train.jsonl"  # see docs/prompt_baking.md
    columns: str = ""  # other names of data fields, such as question=prompt
    num_questions: int = 88  # use only the first questions; -1: all
    num_sequences_per_question: int = 25  # replies per question
    batch_size: int = 38  # replies per forward pass and process
    max_sequence_length: int = 128  # maximum tokens per reply
    temperature: float = 1.0  # sampling temperature; 0: greedy decoding
    top_p: float = 1.0  # nucleus sampling: smallest set of tokens with this probability

    # other system prompts, with which the model should not change
    retain_prompts: str = "data/demo/retain_prompts.txt"  # .txt or .json for training; or empty
    retain_share: float = 0.3  # fraction of the training replies that use these prompts
    other_prompts: str = "data/demo/other_prompts.json"  # .txt or .json for evaluation; or empty

    # output
    traj_out_file: str = "data/traj_chat.jsonl"  # replies for training
    val_out_file: str = "data/traj_val.jsonl"  # replies to held-out questions
    val_split: float = 0.1  # fraction of held-out questions

    # model and hardware
    chat_template: str = "auto"  # auto: the tokenizer's, if any; or none, a .jinja file, or a name
    chat_template_kwargs: str = ""  # template arguments as JSON, such as {"enable_thinking": false}
    use_mixed_precision: bool = True  # bf16 if the GPU supports it, else fp16; fp32 on a CPU
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # precision of the weights
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # auto: by device
    timeout_minutes: float = 30.0  # time limit of a collective operation

    # run
    stop_after_minutes: float = 0.0  # save and exit with status 85 after this time; 0: no limit
    seed: int = 0  # random seed of replies and data split
    config: str = ""  # YAML file of settings, `name: value` lines; flags override its values
    check: bool = False  # read and check everything, then exit without sampling
    debug: bool = False  # show a traceback for user errors


def read(argv: Sequence[str] | None = None) -> Config:
    """Return the settings: flags over the YAML file over the defaults.

    Raises UserError for a value out of its range.
    """
    config, places = cli.parse_with_file(Config, argv)
    with cli.located(places):
        cli.check_ranges(
            config,
            num_sequences_per_question=cli.ABOVE_0,
            max_sequence_length=cli.ABOVE_0,
            num_questions=("-1 or >= 1", lambda x: x == -1 or x > 0),
            val_split=("> 0 and < 1", lambda x: 0 < x < 1),
            retain_share=(">= 0 and < 1", lambda x: 0 <= x < 1),
        )
    if not config.retain_prompts:
        cli.note_unused(config, "retain_prompts is empty", "retain_share")
    elif not config.retain_share:
        cli.note_unused(config, "retain_share is 0", "retain_prompts")
    return config
