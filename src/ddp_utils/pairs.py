"""Records -> token ids of prompt, chosen and rejected, and a report of what happened to them.

The three share one prompt: the common prefix of the tokens of prompt, prompt + chosen and
prompt + rejected. Where a tokenizer merges across the seam, the merged token belongs to the
response, so that no response token is lost and no prompt token is trained.
"""

import collections
from typing import NamedTuple

from transformers import AutoTokenizer

from ddp_utils import UserError, batching, records


class Pair(NamedTuple):
    """Token ids of one preference; chosen and rejected end with the end-of-text token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    where: str  # file:line
    text: str  # the prompt as the data file has it

    @property
    def tokens(self):
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)


def load_tokenizer(name):
    """The model's tokenizer; UserError if there is none at that path or hub name."""
    try:
        return AutoTokenizer.from_pretrained(str(model_path(name)), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"--model_name: no tokenizer at {name}: {_first_line(error)}") from error


def model_path(name):
    """A folder, from the current one or the project's root, or else a name on the hub."""
    folder = records.resolve(name)
    if folder.is_dir():
        return folder
    if str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise UserError(f"--model_name: there is no folder {name}; give a folder or a hub name")
    return name


def _first_line(error):
    return str(error).strip().splitlines()[0][:200]


class Encoder:
    """Turns one record into a Pair: template, seam, end-of-text, truncation."""

    def __init__(self, tokenizer, chat_template="auto", max_length=1024, truncation="keep_end"):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.keep_end = truncation == "keep_end"
        self.templated = chat_template == "auto" and bool(tokenizer.chat_template)

    def prompt_text(self, prompt):
        """What the model reads before it answers."""
        if not self.templated:
            return prompt
        turn = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def ids(self, text):
        """Token ids with at most one BOS: a template may render one that the tokenizer adds too."""
        ids = self.tokenizer(text, add_special_tokens=not self.templated).input_ids
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def encode(self, where, prompt, chosen, rejected):
        """-> Pair and how many of its tokens were cut off."""
        text = self.prompt_text(prompt)
        whole = [self.ids(text), self.ids(text + chosen), self.ids(text + rejected)]
        seam = common_prefix(*whole)
        if seam == 0:  # nothing before the first response token would predict it
            raise UserError(f"{where}: prompt {prompt!r:.40} has no token of its own; lengthen it")
        head = whole[0][:seam]
        chosen, rejected = self.ended(whole[1][seam:]), self.ended(whole[2][seam:])
        pair = Pair(*self.cut(head, chosen, rejected), where, prompt)
        return pair, len(head) + len(chosen) + len(rejected) - sum(map(len, pair[:3]))

    def ended(self, response):
        """Exactly one end-of-text token, if the tokenizer has one, and it is trained."""
        eos = self.tokenizer.eos_token_id
        while response and eos is not None and response[-1] == eos:
            response = response[:-1]
        return response if eos is None else [*response, eos]

    def cut(self, prompt, chosen, rejected):
        """Shorten the prompt first, to a quarter of max_length at least, then the responses."""
        room = self.max_length - max(len(chosen), len(rejected))
        room = max(room, min(len(prompt), self.max_length // 4), 1)
        if len(prompt) > room:
            bos = prompt[:1] if prompt[0] == self.tokenizer.bos_token_id and room > 1 else []
            tail = prompt[len(prompt) - room + len(bos) :]
            prompt = bos + tail if self.keep_end else prompt[:room]
        room = self.max_length - len(prompt)
        return prompt, chosen[:room], rejected[:room]


def common_prefix(*sequences):
    """How many leading items all sequences share."""
    count = 0
    for items in zip(*sequences, strict=False):
        if len(set(items)) > 1:
            break
        count += 1
    return count


def read(path, encoder, limit=-1):
    """The usable pairs of a data file, and its report: rows read, dropped and truncated by reason.

    A pair whose sides are equal, before or after truncation, is dropped and counted: its loss is
    constant and its gradient 0.
    """
    pairs, dropped, truncated = [], collections.defaultdict(list), []
    found = records.read(path, limit)
    for record in found:
        fields = [records.text(record, name) for name in ("prompt", "chosen", "rejected")]
        pair, lost = encoder.encode(record.where, *fields)
        row = record.where.rsplit(":", 1)[1]
        if fields[1] == fields[2] or pair.chosen == pair.rejected:
            dropped["identical" if fields[1] == fields[2] else "identical once cut"].append(row)
            continue
        if lost:
            truncated.append(row)
        pairs.append(pair)
    report = {"file": str(path), "rows": len(found), "used": len(pairs)}
    report |= {"dropped": dict(dropped), "truncated": truncated}
    if not pairs:
        raise UserError(f"{path}: 0 usable pairs of {len(found)}; chosen equals rejected in all")
    return pairs, report


def split_by_prompt(pairs, seed, shares=(0.85, 0.05, 0.10)):
    """Cut pairs into train, validation and test so that no prompt stands in two of them."""
    prompts = sorted({pair.text for pair in pairs})
    visit = batching.order(len(prompts), seed, epoch=-1)
    edges = [round(len(prompts) * sum(shares[: k + 1])) for k in range(len(shares))]
    place = {}
    for turn, index in enumerate(visit):
        place[prompts[index]] = next(k for k, edge in enumerate(edges) if turn < edge)
    return [[pair for pair in pairs if place[pair.text] == k] for k in range(len(shares))]
