"""Forty families of chat templates: prompts, replies, masks and ends are those of transformers.

A template is made here from what its family writes around a text. {% generation %} marks what is
trained, with all of the end, so that apply_chat_template says which tokens these are.
"""

import datetime
import json
import re
from types import SimpleNamespace

import pytest
from test_pairs import chat_tokenizer, tokenizer
from tokenizers import processors
from transformers.utils import chat_template_utils

from conftest import ROOT
from ddp_utils import UserError, distributed
from lm import chat, instruction_data
from lm.chat_template import Encoder
from prompt_baking import trajectories

# user, after: before and behind a user's text; reply: before a reply; own: more of it, which is
# trained; end: behind a reply, to its last special token; rest: what follows. last: the end of the
# last reply, tail: another part of it behind the conversation; prompt: for generation, if it is not
# "reply"; always: it is behind every conversation; plain: what looks like special tokens
FAMILIES = json.loads((ROOT / "tests/data/template_families.json").read_text(encoding="utf-8"))
SPECIAL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\]~!?b[\[\]]|\[e~\[")
DAY = "2024-07-26"
ASKED = [{"role": "user", "content": "Hi"}]
TALK = [*ASKED, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Who?"}]
REPLY = {"role": "assistant", "content": "Me."}


def literal(text):
    """The text as an expression; {role} is that of the turn, and {%Y} a format of today's date."""
    text = json.dumps(text).replace("{role}", '" ~ m.role ~ "')
    text = re.sub("{(%[^}]*)}", r'" ~ strftime_now("\1") ~ "', text)
    return f"{{{{ {text} }}}}"


def template_of(family):
    part = {name: literal(family.get(name, "")) for name in ("begin", "own", "rest", "tail")}
    part |= {name: literal(family[name]) for name in ("user", "after", "reply", "end")}
    part["last"] = literal(family.get("last", family["end"]))
    part["prompt"] = literal(family.get("prompt", family["reply"]))
    is_asked = f"add_generation_prompt or {str(family.get('always', False)).lower()}"
    text = (
        "@begin{% for m in messages %}{% if m.role == 'assistant' %}@reply{% generation %}@own"
        "{{ m.content }}{% if loop.last %}@last{% else %}@end{% endif %}{% endgeneration %}"
        "{% if not (loop.last and is_tailed) %}@rest{% endif %}"
        "{% else %}@user{{ m.content }}@after{% endif %}{% endfor %}"
        "{% if is_asked %}@prompt{% else %}{% generation %}@tail{% endgeneration %}{% endif %}"
    )
    text = text.replace("is_asked", is_asked).replace("is_tailed", str("tail" in family).lower())
    return re.sub("@([a-z]+)", lambda name: part[name[1]], text)


@pytest.fixture(params=FAMILIES)
def made(request, monkeypatch):
    """A family, its tokenizer and its encoder, on a day in 2024."""
    family = FAMILIES[request.param]
    clock = SimpleNamespace(now=lambda: datetime.datetime.fromisoformat(DAY))
    monkeypatch.setattr(chat_template_utils, "datetime", clock)
    tok = tokenizer(bos=False, merges=[])
    texts = [text for text in family.values() if isinstance(text, str)]
    names = {*SPECIAL.findall(" ".join(texts))} - {*family.get("plain", ()), "</s>", "<s>"}
    tok.add_special_tokens({"additional_special_tokens": sorted(names)})
    tok.chat_template = template_of(family)
    return family, tok, Encoder(tok, date=DAY)


def end_of(family):
    return family.get("last", family["end"]) + family.get("tail", "")


def trained(tok, family, turns):
    """Ids and mask by transformers, up to the last trained token, and the end that is added."""
    own = tok.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = own["input_ids"], own["assistant_masks"]
    length = len(mask) - mask[::-1].index(1)
    end = [] if SPECIAL.search(end_of(family)) else [tok.eos_token_id]
    return ids[:length] + end, mask[:length] + [1] * len(end)


@pytest.mark.parametrize("prompt", [ASKED, TALK], ids=len)
def test_ids_masks_and_ends_are_those_of_apply_chat_template(made, prompt):
    family, tok, encoder = made
    asked = tok.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    ids, mask = trained(tok, family, [*prompt, REPLY])
    count = mask[::-1].index(0)  # of the last reply
    pair = encoder.encode("f:1", prompt, "Me.", "No.")[0]
    assert (pair.prompt, pair.chosen) == (ids[:-count], ids[-count:])
    assert encoder.prompt_ids(prompt) == chat.prompt_of(prompt, encoder) == asked
    assert trajectories.prompt(encoder, "", "Hi") == encoder.prompt_ids(ASKED)
    text = instruction_data.encode(encoder, "f:1", prompt, "Me.")[0]
    assert text.prompt + text.reply == ids
    if SPECIAL.search(family["end"]):  # otherwise the end of an earlier reply cannot be found
        assert [0] * len(text.prompt) + text.scored == mask
    assert encoder.ends[0] == pair.chosen[-1]  # where sampling stops


def test_a_reply_that_brings_its_end_gets_it_once(made):
    family, tok, encoder = made
    pair = encoder.encode("f:1", TALK, "Me.", "No.")[0]
    end = end_of(family) or tok.eos_token
    ends = {end, end.strip(), f"{end}\n", f"{end} {end}", tok.decode(pair.chosen[-1])}
    expected = instruction_data.encode(encoder, "f:1", TALK, "Me.")[0]
    for brought in ends:
        turns = [TALK[0], {**TALK[1], "content": f"Hello.{brought}"}, TALK[2]]
        reply = f"Me.{brought}"
        assert encoder.encode("f:1", turns, reply, f"No.{brought}")[0][:3] == pair[:3]
        assert instruction_data.encode(encoder, "f:1", turns, reply)[0][:3] == expected[:3]
    sampled = encoder.ids(f"Me.{end}")[0]  # sampling may return the last token, or not
    assert encoder.texts([sampled[:-1], sampled]) == ["Me.", "Me."]


def test_a_reply_with_another_turn_is_an_error(made):
    family, tok, encoder = made
    starts = [family["end"] + family.get("rest", "") + family["user"].replace("{role}", "user")]
    starts += [family["reply"]] * bool(SPECIAL.match(family["reply"]))
    if not SPECIAL.search(family["end"]):
        starts = []
    for start in filter(lambda start: start not in family.get("plain", ()), starts):
        for reply in (f"Me.{start}Why?", {**REPLY, "content": f"{start}Me."}):
            with pytest.raises(UserError, match="^reply: contains .*; remove it, use messages"):
                encoder.encode("f:1", ASKED, reply, "No.")
    for text in ("<think>Hm.</think>Me.", "User: a[0] </b> ###"):  # ordinary texts
        assert encoder.one_turn(text) == text


def test_no_end_at_all_is_a_warning(monkeypatch, capsys):
    """There is none without eos_token, unless a template writes one; summary.json keeps it."""
    monkeypatch.setattr(distributed, "warnings", [])
    ended = "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"
    plain = ended.replace("<|eot|>", "\n")
    cases = (None, "</s>", ""), (ended, None, ""), (None, None, "."), (plain, None, ".")
    for template, eos, lines in cases:
        tok = chat_tokenizer(template, bos=False)
        tok.eos_token = eos
        encoder = Encoder(tok)
        assert (encoder.end is None) == bool(lines)
        shown = capsys.readouterr().out
        assert shown.startswith("warning: replies will not stop: ") == (lines != "")
        assert distributed.warnings == shown.splitlines()
        distributed.warnings.clear()
    assert "set eos_token in tokenizer_config.json, or use --chat_template" in shown


def test_an_end_that_the_tokenizer_adds_is_there_once_and_not_behind_a_prompt():
    """add_eos_token, which many notebooks set, puts </s> behind each text."""
    tok = tokenizer(merges=[])
    bos, eos = tok.convert_tokens_to_ids(["<s>", "</s>"])
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    assert tok("Hi").input_ids[-1] == eos
    encoder = Encoder(tok)
    pair = encoder.encode("f:1", "Hi", " Me.", " No.</s>")[0]
    assert [tok.decode(ids) for ids in pair[:3]] == ["<s>Hi", " Me.</s>", " No.</s>"]
    turns = [{"role": "user", "content": "Hi"}]
    for ids in (chat.prompt_of(turns, encoder), trajectories.prompt(encoder, "", "Hi")):
        assert ids == encoder.prompt_ids("Hi") == pair.prompt
