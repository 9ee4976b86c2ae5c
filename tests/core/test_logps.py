"""Log-probs against full float64 logits; the head's self-test; memory; dropout; checkpointing."""

import copy

import pytest
import torch
import transformers

import main_distributed
from config import Config
from ddp_utils import UserError, checks, distributed
from lm import logps, models
from lm.logps import Pair

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
WIDE = dict(intermediate_size=64, num_key_value_heads=2, max_position_embeddings=128)
PAD = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA = transformers.LlamaConfig(**SIZES, **WIDE, **PAD)


def build(config, factor=3.0):
    """A random model, its weights scaled so that mistakes show, its biases and sinks not 0."""
    torch.manual_seed(0)
    # a copy: models write their attention into it; eager experts are the only ones in float64
    config = copy.deepcopy(config)
    model = models.auto_class(config).from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
            elif factor > 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return models.no_dropout(model)


def some_pairs(*sizes):
    """Pairs of so many tokens in prompt, chosen and rejected, different everywhere."""
    generator = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(3, 97, (length,), generator=generator).tolist()

    return [Pair(*map(ids, lengths), f"row {row}", "") for row, lengths in enumerate(sizes)]


PAIRS = some_pairs((3, 5, 9), (7, 7, 7), (11, 9, 5))


def by_hand(model, pair, dtype=torch.float64):
    """(chosen, rejected) of one pair: one row at a time, all logits, log softmax, sum."""
    model = model.to(dtype)
    found = []
    for response in (pair.chosen, pair.rejected):
        logits = model(torch.tensor([pair.prompt + response])).logits[0]
        logs = logits[len(pair.prompt) - 1 : -1].log_softmax(-1)
        found.append(logs[range(len(response)), response].sum())
    return torch.stack(found)


def test_the_gradient_equals_that_of_full_logits_in_float64():
    model = build(LLAMA)
    found = _gradient(model, sum(map(torch.sum, logps.Scorer(model)(logps.collate(PAIRS)))))
    model = build(LLAMA).double()
    expected = _gradient(model, sum(by_hand(model, pair).sum() for pair in PAIRS))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def _gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def test_prompt_and_padding_do_not_count():
    batch = logps.collate(PAIRS)
    assert batch.tokens.tolist() == [[5, 7, 9], [9, 7, 5]]
    # six rows of 11 + 9 - 1 tokens; a prompt of 3 predicts from its last token, place 2
    width = batch.ids.shape[1]
    assert batch.ids.shape == (6, 19)
    assert batch.hidden_index[:5].tolist() == [2, 3, 4, 5, 6]
    assert batch.hidden_index[5:12].tolist() == list(range(width + 6, width + 13))


def test_a_packed_row_by_hand():
    pairs = [Pair([7, 8], [1, 2, 3], [4, 5], "", ""), Pair([9], [6], [3, 2, 1], "", "")]
    batch = logps.collate(pairs, shared=True)
    #                             prompt chosen rejected | prompt rejected
    assert batch.ids.tolist() == [[7, 8, 1, 2, 4, 9, 3, 2]]
    assert batch.model_kwargs["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert batch.model_kwargs["packing"].spans == [(2, 2, 1), (1, 0, 2)]
    #                              7 8 -> 1 2 3, 9 -> 6, 7 8 -> 4 5, 9 -> 3 2 1
    assert batch.hidden_index.tolist() == [1, 2, 3, 5, 1, 4, 5, 6, 7]
    assert batch.targets.tolist() == [1, 2, 3, 6, 4, 5, 3, 2, 1]
    assert batch.cells.tolist() == [[0, 0, 0, 1, 2, 2, 3, 3, 3], [0, 1, 2, 0, 0, 1, 0, 1, 2]]
    assert batch.tokens.tolist() == [[3, 1], [2, 3]] and batch.longest == 3


def test_dropout_is_off_by_p_and_the_model_stays_in_training_mode():
    sizes = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=97, resid_pdrop=0.5)
    config = transformers.GPT2Config(**sizes, **PAD)
    model = models.no_dropout(transformers.GPT2LMHeadModel(config))
    assert model.training
    scorer, batch = logps.Scorer(model), logps.collate(PAIRS)
    assert torch.equal(scorer(batch)[0], scorer(batch)[0])


OWN_DROPOUT = {  # what these models call it, in modules that are not nn.Dropout
    "seed-oss": transformers.SeedOssConfig(
        **SIZES, **WIDE, **PAD, head_dim=8, residual_dropout=0.5
    ),
    "starcoder-2": transformers.Starcoder2Config(
        **SIZES, **WIDE, **PAD, residual_dropout=0.5, embedding_dropout=0.5
    ),
    "starcoder": transformers.GPTBigCodeConfig(
        n_embd=32, n_layer=2, n_head=4, vocab_size=97, attn_pdrop=0.5, **PAD
    ),
}


@pytest.mark.parametrize("name", OWN_DROPOUT)
def test_dropout_of_any_name_is_off(name):
    model = transformers.AutoModelForCausalLM.from_config(OWN_DROPOUT[name])
    scorer, batch = logps.Scorer(models.no_dropout(model)), logps.collate(PAIRS)
    assert torch.equal(scorer(batch)[0], scorer(batch)[0])


def test_complaint_13_a_reference_in_another_precision_is_refused():
    model = build(LLAMA)
    now = torch.stack(logps.Scorer(model)(logps.collate(PAIRS)), -1).detach()
    rounded = torch.stack(logps.Scorer(model.bfloat16())(logps.collate(PAIRS)), -1).detach()
    broken = now.clone()
    broken[1, 0] = float("nan")
    bound = checks.noise(logps.Scorer(build(LLAMA)), torch.tensor([9, 9, 9]))
    locations = [pair.location for pair in PAIRS]
    checks.check_reference(now, now + 5e-4, bound, locations)
    for reference, row in ((rounded, "[012]"), (broken, "1")):
        with pytest.raises(UserError, match=f"row {row}: before the first step the policy's log-p"):
            checks.check_reference(now, reference, bound, locations)


def test_a_cpu_computes_in_bf16_only_where_it_is_asked_for():
    for settings, expected in (
        ({}, (torch.float32, None)),
        ({"base_dtype": "bf16"}, (torch.bfloat16, torch.bfloat16)),
        ({"base_dtype": "bf16", "use_mixed_precision": False}, (torch.bfloat16, None)),
    ):
        config = Config(fine_tuning="lora", **settings)
        assert main_distributed.precision_of(config, torch.device("cpu")) == expected


def test_the_precision_is_among_the_facts_that_log_probs_depend_on():
    """Both the dtype of the weights and that of autocast."""
    found = set()
    for weights in (torch.float32, torch.bfloat16):
        for autocast in (None, torch.bfloat16, torch.float16):
            scorer = logps.Scorer(build(LLAMA).to(weights), autocast)
            found.add(str(scorer.numerics(torch.device("cpu"))))
    assert len(found) == 6


def test_only_the_rows_that_are_used_are_scored():
    scorer = logps.Scorer(build(LLAMA))
    counts = []
    scorer.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].tokens.shape[1]))
    expected = torch.stack([by_hand(build(LLAMA), pair) for pair in PAIRS]).float()
    for rows in (None, [], [1], [0, 2], [0, 1, 2]):
        counts.clear()
        scores = logps.score(scorer, PAIRS, distributed.World(), 2, rows=rows)
        rows = range(3) if rows is None else rows
        used = torch.tensor([row in rows for row in range(3)])
        assert sum(counts) == len(rows)
        torch.testing.assert_close(scores[used], expected[used], rtol=1e-5, atol=1e-4)
        assert scores.shape == (3, 2) and scores[~used].isnan().all()
