"""A row's texts -> token ids of prompt, chosen and rejected.

The three share one prompt: the common prefix of the tokens of prompt, prompt + chosen and
prompt + rejected. Where a tokenizer merges across the boundary, the merged token belongs to the
response, so that no response token is lost and no prompt token is trained.
"""

import os.path
import re

from jinja2 import TemplateError

from ddp_utils import UserError, jsonl, models
from ddp_utils.logps import Pair

PLAIN_ROLES = {"system": "\n\nSystem:", "user": "\n\nHuman:", "assistant": "\n\nAssistant:"}


class Encoder:
    """Turns one row into a Pair: template, prompt boundary, end of the reply, truncation.

    chat_template: "auto" (the tokenizer's, if it has one), "none", or a .jinja file. kwargs: what
    the template is given besides the messages, a JSON object as text. `notes` collects what was
    mended; the reader of a file counts and clears them after each row.
    """

    def __init__(
        self, tokenizer, chat_template="auto", max_length=1024, truncation="keep_end", kwargs=""
    ):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.keep_end = truncation == "keep_end"
        self.notes = set()
        if chat_template not in ("auto", "none"):
            if not jsonl.resolve(chat_template).is_file():
                raise UserError(f"--chat_template: no file {chat_template}; or give auto, or none")
            tokenizer.chat_template = jsonl.content(chat_template).decode()
        self.templated = chat_template != "none" and bool(tokenizer.chat_template)
        self.kwargs = self._arguments(kwargs) if kwargs else {}
        self.end = tokenizer.eos_token_id
        self.behind = ""  # what the template writes behind a reply
        self.rewrites = False  # whether it changes what stands before that
        if self.templated:
            self._try_template()

    @property
    def ends(self):
        """Token ids at which a sampled reply is over."""
        ends = dict.fromkeys((self.end, self.tokenizer.eos_token_id))  # self.end first
        return [token for token in ends if token is not None]

    def render(self, messages, **options):
        """Return the template's text; without a system role, its text precedes the first turn."""
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
        """Return the object in a JSON text; UserError for a name that the template lacks."""
        flag = "--chat_template_kwargs"
        mend = 'give an object, such as {"enable_thinking": false}'
        arguments = jsonl.decoded(flag, 1, text.encode(), f"; {mend}")
        if not isinstance(arguments, dict):
            raise UserError(f"{flag}: {mend}")
        words = re.findall(r"\w+", self.tokenizer.chat_template) if self.templated else []
        for name in arguments:
            if name not in words or name in ("messages", "add_generation_prompt"):
                raise UserError(f"{flag}: no chat template takes {jsonl.shown(name)}; leave it out")
        return arguments

    def _try_template(self):
        """Set `behind`, `end` and `rewrites` by rendering a reply.

        A template rewrites if it puts more than white space between its prompt and the reply, such
        as an empty thought, or takes the reply's thought apart.
        """
        turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "@@@"}]
        prompt = self.render(turns[:1], add_generation_prompt=True)
        self.behind = self.render(turns).rsplit("@@@", 1)[-1]
        ids = self.tokenizer(self.behind, add_special_tokens=False).input_ids
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        self.end = next((token for token in ids if token in special), self.end)
        if prompt == self.render(turns[:1]):
            return
        for content in ("@@@", "<think>@@@</think>@@@"):
            turns[1]["content"] = content
            if without_space(self.render(turns)) != without_space(prompt + content + self.behind):
                self.rewrites = True

    def text(self, prompt):
        """Return what the model reads before it replies."""
        if self.templated:
            return self.render(messages_of(prompt), add_generation_prompt=True)
        if isinstance(prompt, str):
            return prompt
        text = "".join(f"{PLAIN_ROLES[turn['role']]} {turn['content']}" for turn in prompt)
        return text + PLAIN_ROLES["assistant"]

    def joined(self, prompt, reply, text):
        """Return a prompt and a reply to it as one text; `text` is that of the prompt alone."""
        if self.rewrites:
            whole = self.render([*messages_of(prompt), {"role": "assistant", "content": reply}])
            return whole.removesuffix(self.behind)
        return text + reply if self.templated or isinstance(prompt, str) else f"{text} {reply}"

    def ids(self, text):
        """Return token ids with at most one BOS: a template may render a second one."""
        special = not self.templated
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
            self.notes.add("second BOS removed")
        return ids

    def encode(self, example):
        """Return the Pair of a preference_data.Example."""
        _, prompt, chosen, rejected = example
        text = self.text(prompt)
        prompt_ids = self.ids(text)
        whole = {}  # reply -> ids of prompt and reply; a text to imitate (sft) has two equal sides
        for reply in {chosen, rejected}:
            whole[reply] = self.ids(self.joined(prompt, reply, text))
        boundary = common_prefix(prompt_ids, *whole.values())
        if boundary == 0:  # nothing before the first response token would predict it
            mend = "has no token of its own; lengthen it"
            raise UserError(f"{example.location}: prompt {text!r:.40} {mend}")
        if boundary < len(prompt_ids):
            self.notes.add("merged at the seam")
        sides = [self.ended(whole[reply][boundary:]) for reply in (chosen, rejected)]
        parts = self.cut(prompt_ids[:boundary], *sides)
        if parts != (prompt_ids[:boundary], *sides):
            self.notes.add("truncated")
        return Pair(*parts, example.location, plain(prompt), chosen)

    def ended(self, response):
        """Return the response with exactly one end token, if there is one, which is trained."""
        while response and response[-1] in self.ends:
            response = response[:-1]
            self.notes.add("end token in the text")
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
    """Return how many leading items all sequences share."""
    return len(os.path.commonprefix(sequences))


def without_space(text):
    return "".join(text.split())
