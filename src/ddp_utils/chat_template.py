"""A row's texts -> token ids of prompt, chosen and rejected.

The three share one prompt: the common prefix of the tokens of prompt, prompt + chosen and
prompt + rejected. Where a tokenizer merges across the boundary, the merged token belongs to the
response, so that no response token is lost and no prompt token is trained.
"""

import contextlib
import json
import os.path
import re

import transformers
from jinja2 import TemplateError

from ddp_utils import UserError, data, models
from ddp_utils.logps import Pair

# what a template would leave out in silence if it has not the word
IN_TEMPLATES = {"tool", "developer", "tools", "tool_calls", "reasoning_content"}
PLAIN_ROLES = {"system": "\n\nSystem:", "user": "\n\nHuman:", "assistant": "\n\nAssistant:"}


class Encoder:
    """Turns one row into a Pair: template, prompt boundary, end of the reply, truncation.

    chat_template: "auto" (the tokenizer's, if it has one), "none", or a .jinja file. kwargs: what
    the template is given besides the messages, a JSON object as text. `notes` collects what was
    mended, the reader of a file counts and clears them after each row; and sets `row_kwargs`, what
    the row gives its template.
    """

    def __init__(
        self, tokenizer, chat_template="auto", max_length=1024, truncation="keep_end", kwargs=""
    ):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.keep_end = truncation == "keep_end"
        self.notes = set()
        self.row_kwargs = {}
        if chat_template not in ("auto", "none"):
            if not data.resolve(chat_template).is_file():
                raise UserError(f"--chat_template: no file {chat_template}; or give auto, or none")
            tokenizer.chat_template = data.content(chat_template)
        self.templated = chat_template != "none" and bool(tokenizer.chat_template)
        self.words = set(re.findall(r"\w+", tokenizer.chat_template) if self.templated else ())
        self.kwargs = self.arguments(kwargs or {}, "--chat_template_kwargs")
        special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.end = tokenizer.eos_token_id
        self.behind = ""  # what the template writes behind a reply
        if self.templated:
            self._try_template()
        tokenizer("")  # whose backend then neither truncates nor pads

    def facts(self) -> list:
        """Return what the token ids depend on, besides rows and code."""
        words = sorted(self.tokenizer.get_vocab().items())
        if self.tokenizer.is_fast:
            words = self.tokenizer.backend_tokenizer.to_str()
        special = self.tokenizer.special_tokens_map
        template = self.tokenizer.chat_template if self.templated else ""
        shape = self.kwargs, self.max_length, self.keep_end
        return [words, special, template, *shape, transformers.__version__]

    @property
    def ends(self):
        """Token ids at which a sampled reply is over."""
        ends = dict.fromkeys((self.end, self.tokenizer.eos_token_id))  # self.end first
        return [token for token in ends if token is not None]

    def render(self, messages, **options):
        """Return the template's text; without a system role, its text precedes the first turn."""
        try:
            options |= self.kwargs | self.row_kwargs
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except (TemplateError, *models.FAULTS) as error:  # it is a program
            if messages[0]["role"] != "system" or len(messages) < 2:
                raise UserError(f"--chat_template: {models.first_line(error)}") from error
            system, first, *rest = messages
            first = {**first, "content": f"{system['content']}\n\n{first['content']}"}
            return self.render([first, *rest], **options)

    def arguments(self, value, place):
        """Return an object, perhaps of a JSON text; UserError for a name that no template takes."""
        mend = 'give an object, such as {"enable_thinking": false}'
        if isinstance(value, str):
            value = data.decode(value, place, hint=f"; {mend}")
        if not isinstance(value, dict):
            raise UserError(f"{place}: {mend}")
        for name in value:
            if name not in self.words or name in ("messages", "add_generation_prompt"):
                says = f"no chat template takes {data.shown(name)}; leave it out"
                raise UserError(f"{place}: {says}")
        return value

    def check_shown(self, turns):
        """Raise UserError for what the template, or the plain transcript, has no word for."""
        for turn in turns:
            for name in IN_TEMPLATES & {*turn, turn["role"]} - self.words:
                raise UserError(f"{name} is not in the chat template; give --chat_template FILE")

    def _try_template(self):
        """Set `behind` and `end`, and add to `words`, by rendering a reply."""
        turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "@@@"}]
        with contextlib.suppress(UserError):  # one that writes whatever role there is
            if "@@@" in self.render([{"role": "@", "content": "@@@"}, *turns[:1]]):
                self.words |= {"tool", "developer"}
        self.behind = self.render(turns).rsplit("@@@", 1)[-1]
        ids = self.tokenizer(self.behind, add_special_tokens=False).input_ids
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        self.end = next((token for token in ids if token in special), self.end)

    def text(self, prompt):
        """Return what the model reads before it replies."""
        self.check_shown(prompt if isinstance(prompt, list) else ())
        if self.templated:
            return self.render(messages_of(prompt), add_generation_prompt=True)
        if isinstance(prompt, str):
            return prompt
        text = "".join(f"{PLAIN_ROLES[turn['role']]} {turn['content']}" for turn in prompt)
        return text + PLAIN_ROLES["assistant"]

    def joined(self, prompt, reply, text):
        """Return a prompt and a reply to it as one text; `text` is that of the prompt alone."""
        turn = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        self.check_shown([turn])
        if self.templated:
            whole = self.render([*messages_of(prompt), turn]).removesuffix(self.behind)
            # a template may write the prompt otherwise once there is a reply
            if whole.startswith(text) or whole.startswith(self.render(messages_of(prompt))):
                return whole
            return whole if isinstance(reply, dict) else text + reply
        return text + reply if isinstance(prompt, str) else f"{text} {reply}"

    def ids(self, *texts):
        """Return the token ids of texts with at most one BOS: a template may render a second one.

        The others begin like the first one. Up to its last special token they are tokenized once if
        a template rendered it: a tokenizer splits a text at these before all else.
        """
        start = stop = 0
        for match in self.special.finditer(texts[0]) if self.templated else ():
            start, stop = match.span()
        shared = texts[0][:stop]
        if not all(text.startswith(shared) for text in texts):
            start, shared = 0, ""
        head, *rests = self.tokenize(shared, *(text[start:] for text in texts))
        bos = self.tokenizer.bos_token_id
        ids_of_texts = []
        for rest in rests:
            ids = head[:-1] + rest  # the special token is in both
            while bos is not None and ids[:2] == [bos, bos]:
                ids = ids[1:]
                self.notes.add("second BOS removed")
            ids_of_texts.append(ids)
        return ids_of_texts

    def tokenize(self, *texts):
        """Return the token ids of each text."""
        options = {"add_special_tokens": not self.templated}
        if not self.tokenizer.is_fast:
            return self.tokenizer([*texts], verbose=False, **options).input_ids
        # without offsets, which take as long again
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, **options)
        return [encoding.ids for encoding in encodings]

    def encode(self, example):
        """Return the Pair of a preference_data.Example."""
        _, prompt, chosen, rejected = example
        text = self.text(prompt)
        replies = [chosen] if chosen == rejected else [chosen, rejected]  # equal: to imitate (sft)
        wholes = [self.joined(prompt, reply, text) for reply in replies]
        prompt_ids, *whole_ids = self.ids(text, *wholes)
        boundary = common_prefix(prompt_ids, *whole_ids)
        if boundary == 0:  # nothing before the first response token would predict it
            mend = "has no token of its own; lengthen it"
            raise UserError(f"{example.location}: prompt {text!r:.40} {mend}")
        if boundary < len(prompt_ids):
            self.notes.add("merged at the seam")
        sides = [self.ended(ids[boundary:]) for ids in (whole_ids[0], whole_ids[-1])]
        parts = self.cut(prompt_ids[:boundary], *sides)
        if parts != (prompt_ids[:boundary], *sides):
            self.notes.add("truncated")
        return Pair(*parts, example.location, plain(prompt), reply_text(chosen))

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


def reply_text(reply):
    """Return the text of a reply: of a message its content or, if that is empty, its tool calls."""
    if isinstance(reply, str):
        return reply
    return reply["content"] or json.dumps(reply.get("tool_calls", ""))


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
