"""Preference files -> token ids of each pair, and a report of what is in them."""

import collections

from ddp_utils import UserError, batching, formats, records


def read(path, encoder, limit=-1, on_bad_record="error"):
    """The usable pairs of a data file and its report.

    Rows that cannot teach (equal sides, empty responses, prompts that differ) are dropped and
    counted; malformed ones raise UserError, or with "skip" are counted, too.
    """
    name, seen, unread = None, set(), set()

    def make(record, row):
        nonlocal name
        name = name or formats.find_format(record)
        example = formats.example(record, name)
        pair = encoder.encode(example)
        if not (pair.chosen and pair.rejected):  # a tokenizer may drop letters and have no end
            raise formats.Unusable("empty response")
        if pair.chosen == pair.rejected:
            raise formats.Unusable("identical once cut")
        if (pair.text, example.chosen, example.rejected) in seen:
            encoder.counts["same as an earlier row"].append(row)
        if (pair.text, example.rejected, example.chosen) in seen:
            encoder.counts["opposite of an earlier row"].append(row)
        seen.add((pair.text, example.chosen, example.rejected))
        unread.update(formats.unread(record, name))
        return pair

    pairs, counted = collect(path, encoder, make, limit, on_bad_record)
    sides = ("prompt", "chosen", "rejected")
    lengths = {side: [len(getattr(pair, side)) for pair in pairs] for side in sides}
    longer = sum(len(pair.chosen) > len(pair.rejected) for pair in pairs)
    facts = report(path, name, encoder, counted, unread, lengths)
    return pairs, {**facts, "chosen_is_longer": round(longer / len(pairs), 3)}


def collect(path, encoder, make, limit, on_bad_record):
    """What make(record, row number) gives for each usable row, and {"rows", "used", "dropped"}.

    UserError if a row is malformed (with "skip" it is dropped), or if no row is usable.
    """
    usable, dropped, first_error = [], collections.defaultdict(list), None
    encoder.counts.clear()
    rows = records.read(path, limit, skip=True)  # what is no JSON is a record with an error
    for record in rows:
        row = record.where.rsplit(":", 1)[1]
        try:
            if isinstance(record.data, UserError):
                raise record.data
            usable.append(make(record, row))
        except formats.Unusable as reason:
            dropped[str(reason)].append(row)
        except UserError as error:
            first_error = first_error or error
            dropped["malformed"].append(row)
    if first_error and on_bad_record == "error":
        mend = f", or skip {len(dropped['malformed'])} of {len(rows)} rows: --on_bad_record skip"
        raise UserError(f"{first_error}{mend if usable else ''}") from first_error
    if not usable:
        reasons = ", ".join(f"{len(bad)} {reason}" for reason, bad in dropped.items())
        raise UserError(f"{path}: 0 usable rows of {len(rows)}: {reasons}")
    return usable, {"rows": len(rows), "used": len(usable), "dropped": dict(dropped)}


def report(path, name, encoder, counted, unread, lengths):
    """What a person would want to know of a data file before training on it.

    lengths: of each part of a row, the tokens in every row.
    """
    return {
        "file": str(path),
        "format": name,
        "fields_not_read": ", ".join(sorted(map(records.shown, unread))),
        "template": encoder.templated,
        **counted,
        **encoder.counts,
        "mean_tokens": {part: round(sum(n) / len(n), 1) for part, n in lengths.items()},
    }


def describe(split, report):
    """The report of one file as one line."""
    tokens = ", ".join(f"{mean:g} {part}" for part, mean in report["mean_tokens"].items())
    line = f"{split}: {report['rows']} rows of {report['format']}, {report['used']} used"
    if "split" in report:
        parts = [f"{rows} {name}" for name, rows in report["split"].items()]
        line += f", split into {', '.join(parts)}"
    notes = [line, f"tokens {tokens}"]
    if "chosen_is_longer" in report:
        notes += [f"chosen longer in {report['chosen_is_longer']:.0%}"]
    notes += [f"{len(rows)} {reason}" for reason, rows in report["dropped"].items()]
    notes += [f"{len(x)} {name}" for name, x in report.items() if x and isinstance(x, list)]
    notes += [f"not read: {report['fields_not_read']:.100}"] if report["fields_not_read"] else []
    return "; ".join(notes)


def split_by_prompt(pairs, seed, shares=(0.85, 0.05, 0.10)):
    """Cut pairs into train, validation and test so that no prompt stands in two of them."""
    prompts = sorted({pair.text for pair in pairs})
    visit = batching.order(len(prompts), seed, epoch=-1)
    edges = [round(len(prompts) * sum(shares[: k + 1])) for k in range(len(shares))]
    place = {}
    for turn, index in enumerate(visit):
        place[prompts[index]] = next(k for k, edge in enumerate(edges) if turn < edge)
    return [[pair for pair in pairs if place[pair.text] == k] for k in range(len(shares))]
