"""A row's texts -> token ids of prompt, chosen and rejected.

The three share one prompt: the common prefix of the tokens of prompt, prompt + chosen and
prompt + rejected. Where a tokenizer merges across the seam, the merged token belongs to the
response, so that no response token is lost and no prompt token is trained.
"""

import collections
import re
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import AutoTokenizer

from ddp_utils import UserError, jsonl, models

PLAIN_ROLES = {"system": "\n\nSystem:", "user": "\n\nHuman:", "assistant": "\n\nAssistant:"}


class Pair(NamedTuple):
    """Token ids of one preference; chosen and rejected end with the token that ends a reply."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    where: str  # file:line
    text: str  # the prompt as the data file has it, without template
    expected: str = ""  # the chosen response as the data file has it

    @property
    def tokens(self):
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)

    @property
    def row(self):
        """Tokens of the longer text."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    def fed(self, shared):
        """Tokens that go through the model: the prompt once or twice, no response's last one."""
        return self.tokens - 2 - (len(self.prompt) if shared else 0)

    @property
    def targets(self):
        """The tokens whose log-probs are asked for: one list a side."""
        return [self.chosen, self.rejected]

    def rows(self):
        """As rows of a padded batch, one a side: what is fed, and the place before each target."""
        first = len(self.prompt) - 1  # the prompt's last token predicts the response's first
        return [
            (self.prompt + side[:-1], range(first, first + len(side)))
            for side in (self.chosen, self.rejected)
        ]

    def stretch(self):
        """As one stretch of a packed row: fed ids, positions, span (P, C, R), places a side."""
        p, c, r = len(self.prompt), len(self.chosen) - 1, len(self.rejected) - 1
        ids = self.prompt + self.chosen[:-1] + self.rejected[:-1]
        places = [range(p - 1, p + c), [p - 1, *range(p + c, p + c + r)]]
        return ids, [*range(p + c), *range(p, p + r)], (p, c, r), places


def load_tokenizer(name):
    """The model's tokenizer; UserError if there is none at that path or hub name."""
    with models.reading(f"--model_name: no tokenizer at {name}"):
        return AutoTokenizer.from_pretrained(str(models.model_path(name)), trust_remote_code=False)


class Encoder:
    """Turns one row into a Pair: template, seam, end of the reply, truncation.

    chat_template: "auto" (the tokenizer's, if it has one), "none", or a .jinja file. kwargs: what
    the template is given besides the messages, a JSON object as text.
    """

    def __init__(
        self, tokenizer, chat_template="auto", max_length=1024, truncation="keep_end", kwargs=""
    ):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.keep_end = truncation == "keep_end"
        if chat_template not in ("auto", "none"):
            file = jsonl.resolve(chat_template)
            if not file.is_file():
                raise UserError(f"--chat_template: no file {chat_template}; or give auto, or none")
            tokenizer.chat_template = jsonl.content(chat_template).decode()
        self.templated = chat_template != "none" and bool(tokenizer.chat_template)
        self.kwargs = self._arguments(kwargs) if kwargs else {}
        self.end, self.behind, self.rewrites = tokenizer.eos_token_id, "", False
        if self.templated:
            self._try_template()
        self.counts = collections.defaultdict(list)  # what was mended -> rows

    @property
    def ends(self):
        """Token ids at which a sampled reply is over."""
        ends = {self.end, self.tokenizer.eos_token_id} - {None}
        return sorted(ends, key=lambda token: token != self.end)

    def render(self, messages, **options):
        """The template's text; one without a system role gets it in front of the first turn."""
        try:
            options |= self.kwargs
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except (TemplateError, *models.FAULTS) as error:  # it is a program
            if messages[0]["role"] != "system" or len(messages) < 2:
                raise UserError(f"--chat_template: {models.first_line(error)}") from error
            system, first, *rest = messages
            first = {**first, "content": f"{system['content']}\n\n{first['content']}"}
            return self.render([first, *rest], **options)

    def _arguments(self, text):
        """The object in a JSON text; UserError for a name that the template does not mention."""
        flag = "--chat_template_kwargs"
        mend = 'give an object, such as {"enable_thinking": false}'
        given = jsonl.decoded(flag, 1, text.encode(), f"; {mend}")
        if not isinstance(given, dict):
            raise UserError(f"{flag}: {mend}")
        known = {*re.findall(r"\w+", str(self.tokenizer.chat_template))}
        known -= {"messages", "add_generation_prompt"}
        for name in given.keys() - (known if self.templated else set()):
            raise UserError(f"{flag}: no chat template takes {jsonl.shown(name)}; leave it out")
        return given

    def _try_template(self):
        """Find out what it writes behind a reply, and whether it `rewrites` what is before that.

        It does if it puts more than white space between its prompt and the reply, such as an empty
        thought, or takes the reply's thought apart.
        """
        mark = "@@@"
        question = {"role": "user", "content": "u"}
        reply = {"role": "assistant", "content": mark}
        self.behind = self.render([question, reply]).rsplit(mark, 1)[-1]
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        ids = self.tokenizer(self.behind, add_special_tokens=False).input_ids
        self.end = next((token for token in ids if token in special), self.end)
        prompt = self.render([question], add_generation_prompt=True)
        for content in (mark, f"<think>{mark}</think>{mark}"):
            whole = self.render([question, {**reply, "content": content}])
            as_read = "".join(f"{prompt}{content}{self.behind}".split())
            if prompt != self.render([question]) and "".join(whole.split()) != as_read:
                self.rewrites = True

    def text(self, prompt):
        """What the model reads before it replies."""
        if self.templated:
            return self.render(messages_of(prompt), add_generation_prompt=True)
        if isinstance(prompt, str):
            return prompt
        text = "".join(f"{PLAIN_ROLES[turn['role']]} {turn['content']}" for turn in prompt)
        return text + PLAIN_ROLES["assistant"]

    def joined(self, prompt, reply, text):
        """A prompt and a reply to it as one text; `text`: that of the prompt alone."""
        if self.rewrites:
            whole = self.render([*messages_of(prompt), {"role": "assistant", "content": reply}])
            return whole.removesuffix(self.behind)
        return text + reply if self.templated or isinstance(prompt, str) else f"{text} {reply}"

    def ids(self, text, row=None):
        """Token ids with at most one BOS: a template may render one that the tokenizer adds too."""
        ids = self.tokenizer(  # not verbose: what is too long for the model is cut, or refused
            text, add_special_tokens=not self.templated, verbose=False
        ).input_ids
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
            if row:
                self.counts["second BOS removed"].append(row)
        return ids

    def encode(self, example):
        """One Pair; `counts` remembers what had to be mended."""
        row = example.where.rsplit(":", 1)[1]
        _, prompt, chosen, rejected = example
        text = self.text(prompt)
        whole = [self.ids(text, row), self.ids(self.joined(prompt, chosen, text))]
        # a text to imitate (texts.py) has two equal sides
        same = rejected == chosen
        whole.append(whole[1] if same else self.ids(self.joined(prompt, rejected, text)))
        seam = common_prefix(*whole)
        if seam == 0:  # nothing before the first response token would predict it
            raise UserError(
                f"{example.where}: prompt {text!r:.40} has no token of its own; lengthen it"
            )
        if seam < len(whole[0]):
            self.counts["merged at the seam"].append(row)
        head = whole[0][:seam]
        sides = [self.ended(ids[seam:], row) for ids in whole[1:]]
        parts = self.cut(head, *sides)
        if sum(map(len, parts)) < len(head) + sum(map(len, sides)):
            self.counts["truncated"].append(row)
        return Pair(*parts, example.where, plain(example.prompt), example.chosen)

    def ended(self, response, row):
        """Exactly one end token, if there is one, and it is trained."""
        ends = 0
        while response and response[-1] in self.ends:
            response = response[:-1]
            ends += 1
        if ends and row not in self.counts["end token in the text"][-1:]:
            self.counts["end token in the text"].append(row)
        return response if self.end is None else [*response, self.end]

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


def messages_of(prompt):
    """A prompt as a conversation: a text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def plain(prompt):
    """A prompt as text: of a single question just that, of a conversation all turns."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def common_prefix(*sequences):
    """How many leading items all sequences share."""
    differ = (k for k, items in enumerate(zip(*sequences, strict=False)) if len(set(items)) > 1)
    return next(differ, min(map(len, sequences)))
