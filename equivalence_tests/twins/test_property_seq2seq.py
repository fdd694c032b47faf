"""Whatever the arguments and the sentences: the whole models of both packages say the same."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import builtin
import scratch
from equivalence_tests.instruments import strategies
from equivalence_tests.instruments.differences import compare_group, compare_tensors
from equivalence_tests.instruments.inputs import Case
from equivalence_tests.instruments.side_by_side import fast_path
from equivalence_tests.twins.properties import Ledger, Tally, assert_same, everything
from scratch.decoding import new_cache

NAME = "scratch.Seq2SeqTransformer"


def both(case: Case) -> tuple[scratch.Seq2SeqTransformer, builtin.Seq2SeqTransformer]:
    theirs = case.construct(builtin)
    return case.construct(scratch, weights_of=theirs), theirs


@given(case=strategies.seq2seq_cases())
def test_logits_and_gradients_agree(ledger: Ledger, case: Case) -> None:
    with fast_path(False):
        actual, expected = (everything(case, model) for model in both(case))
    ledger.add(NAME, "logits and gradients, float64", assert_same(case, actual, expected))


@given(case=strategies.seq2seq_cases())
def test_attention_maps_agree(ledger: Ledger, case: Case) -> None:
    recorded = []
    for model in both(case):
        with scratch.record_attention(model.eval()) as maps:
            model(**case.inputs())
        recorded.append(dict(maps))
    comparisons = compare_group(*recorded, call=repr(case))
    assert len(comparisons) >= 3
    assert all(x.passed for x in comparisons), "\n".join(str(x) for x in comparisons if not x.passed)
    ledger.add(NAME, "attention maps", Tally(1, len(comparisons), sum(x.identical for x in comparisons)))


@given(case=strategies.seq2seq_cases(), beam_size=st.integers(1, 3), fast=st.booleans())
def test_generated_tokens_agree(ledger: Ledger, case: Case, beam_size: int, fast: bool) -> None:
    src_ids = case.inputs()["src_ids"]
    with fast_path(fast):
        ours, theirs = (model.eval().generate(src_ids, max_len=7, beam_size=beam_size) for model in both(case))
    comparison = compare_tensors(ours, theirs, name="tokens", relative_bound=0, call=repr(case))
    assert comparison.passed, str(comparison)
    ledger.add(NAME, "generated tokens, greedily and by beams", Tally(1, 1, 1))


@given(case=strategies.seq2seq_cases())
def test_decoding_with_a_cache_is_recomputation(ledger: Ledger, case: Case) -> None:
    model, _ = both(case)
    inputs: dict[str, Tensor] = case.inputs()
    src_ids, tgt_ids = inputs["src_ids"], inputs["tgt_ids"]
    with torch.no_grad():
        memory = model.eval().encode(src_ids)
        cache = new_cache(model.transformer.decoder.num_layers)
        steps = [model.decode(tgt_ids[:, : n + 1], memory, src_ids, cache=cache)[:, -1] for n in range(tgt_ids.size(1))]
        comparison = compare_tensors(torch.stack(steps, dim=1), model(src_ids, tgt_ids), name="logits", call=repr(case))
    assert comparison.passed, str(comparison)
    ledger.add(NAME, "cached decoding against recomputation", Tally(1, 1, int(comparison.identical)))
