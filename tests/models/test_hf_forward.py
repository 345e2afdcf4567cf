"""The forward signature of transformers' models: every argument means what it means there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hf_small import VOCABULARY, each_memory, native, pair, some_tokens, write
from torch import Tensor
from transformers import DataCollatorWithFlattening

from helpers import assert_same, gradients
from hypermlp.mixers import DISTINCT
from hypermlp.models.hf import HyperCache, HyperConfig, HyperForCausalLM

STYLES = pytest.mark.parametrize("style", ["llama", "gpt2"])


@STYLES
def test_embeddings_may_be_given_in_place_of_tokens(style: str) -> None:
    net, model = pair(style=style, length=60)
    tokens = some_tokens(2, 9)
    embedded = model.get_input_embeddings()(tokens)
    assert_same(model(inputs_embeds=embedded).logits, net(tokens))
    prompt = {"inputs_embeds": embedded, "attention_mask": torch.ones_like(tokens)}
    assert model.generate(**prompt, max_new_tokens=12, do_sample=False).tolist() == write(model, tokens, 12)


def test_hidden_states_are_the_inputs_of_the_blocks_and_the_output() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    tokens, seen = some_tokens(2, 9), []
    for block in model.model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    output = model(tokens, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert_same(output.hidden_states[0], model.get_input_embeddings()(tokens), 0)
    for found, expected in zip(output.hidden_states[:2], seen, strict=True):
        assert_same(found, expected, 0)
    assert_same(model.head(output.hidden_states[2]), output.logits)
    assert model(tokens).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(tokens).hidden_states) == 3


def test_only_the_logits_asked_for_are_computed() -> None:
    _, model = pair()
    tokens, rows = some_tokens(2, 9), []
    model.head.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[1]))
    whole = model(tokens).logits
    assert_same(model(tokens, logits_to_keep=2).logits, whole[:, -2:])
    assert_same(model(tokens, logits_to_keep=torch.tensor([0, 4])).logits, whole[:, [0, 4]])
    assert rows == [9, 2, 2]
    rows.clear()
    write(model, tokens, 3)
    assert rows == [1, 1, 1]  # the prompt is read for its last logits alone


def test_outputs_come_as_a_tuple_or_by_name() -> None:
    _, model = pair()
    tokens = some_tokens(1, 5)
    named = model(tokens, labels=tokens, use_cache=False)
    loss, logits = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    (hidden,) = model.model(tokens, use_cache=False, return_dict=False)
    assert_same(model.head(hidden), logits)
    assert [type(part) for part in model(tokens, return_dict=False)] == [Tensor, HyperCache]


def test_further_arguments_are_accepted() -> None:
    _, model = pair()
    tokens = some_tokens(1, 5)
    assert_same(model(tokens, cache_position=torch.arange(5), tokenizer=object()).logits, model(tokens).logits, 0)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "grad"])
@each_memory
def test_a_loop_of_ones_own_goes_on_from_the_cache_it_is_given(mixer: object, recorded: bool, training: bool) -> None:
    _, model = pair(mixer=mixer)
    model.train(training)
    tokens = some_tokens(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with torch.set_grad_enabled(recorded):
        expected, past = model(tokens, attention_mask=mask, use_cache=False).logits, None
        for part in (slice(0, 4), slice(4, 6), slice(6, 7)):
            out = model(tokens[:, part], attention_mask=mask[:, : part.stop], past_key_values=past)
            assert_same(out.logits[mask[:, part] != 0], expected[:, part][mask[:, part] != 0])
            past = copy.deepcopy(out.past_key_values)
        model.config.use_cache = False
        assert model(tokens).past_key_values is None


@each_memory
def test_gradients_pass_a_cache_that_was_empty_and_no_other(mixer: object) -> None:
    _, model = pair(mixer=mixer)
    tokens = some_tokens(2, 6)

    def loss_gradients(**options: object) -> dict[str, Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens, **options).loss.backward()
        return gradients(model)

    expected = loss_gradients(use_cache=False)
    assert all(g.norm() > 0 for g in expected.values())
    assert_same(loss_gradients(use_cache=True), expected)
    cache = model.generation_cache()
    assert_same(loss_gradients(past_key_values=cache), expected)
    later = model(tokens, labels=tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=False"):
        later.loss.backward()


def test_a_cache_that_nobody_reads_is_not_made() -> None:
    """A training step calls each mixer once."""
    _, model = pair()
    calls = []
    for mixer in model.model.mixers:
        mixer.register_forward_hook(lambda *_: calls.append(1))
    out = model(some_tokens(1, 5))
    assert len(calls) == 2
    out.past_key_values.reorder_cache(torch.tensor([0, 0]))
    assert len(calls) == 4
    assert out.past_key_values.batch_size == 2


# Documents packed without padding


def packed(sizes: list[int]) -> tuple[Tensor, list[Tensor]]:
    """position_ids and documents."""
    documents = list(some_tokens(1, sum(sizes))[0].split(sizes))
    return torch.cat([torch.arange(size) for size in sizes])[None], documents


@STYLES
@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_documents_are_read_as_if_alone(name: str, style: str) -> None:
    net, model = pair(mixer=name, style=style, length=60)
    positions, documents = packed([5, 1, 7, 3])
    tokens = torch.cat(documents)[None]
    expected = torch.cat([net(document[None]) for document in documents], 1)
    assert_same(model(tokens, position_ids=positions).logits, expected)
    bounds = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)
    assert_same(model(tokens, cu_seq_lens_q=bounds).logits, expected)
    assert_same(model(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits, expected)
    # Rows of several documents, and padding beside them
    rows = torch.stack([tokens[0], tokens[0].flip(0)])
    other = torch.cat([torch.arange(9), torch.arange(7)])
    found = model(rows, position_ids=torch.stack([positions[0], other])).logits
    assert_same(found[:1], expected)
    assert_same(found[1:], torch.cat([net(part[None]) for part in rows[1].split([9, 7])], 1))
    longer, mask = F.pad(tokens, (2, 3)), F.pad(torch.ones_like(tokens), (2, 3))
    found = model(longer, position_ids=F.pad(positions, (2, 3)), attention_mask=mask).logits
    assert_same(found[:, 2:-3], expected)


def test_a_flattening_collator_gives_the_loss_of_the_documents() -> None:
    net, model = pair()
    _, documents = packed([5, 4, 7])
    batch = DataCollatorWithFlattening()([{"input_ids": document.tolist()} for document in documents])
    found = model(**batch).loss
    each = torch.cat([F.cross_entropy(net(d[None])[0, :-1], d[1:], reduction="none") for d in documents])
    assert_same(found, each.mean(), 1e-6)


def test_documents_train_as_they_would_alone() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    positions, documents = packed([5, 4, 7])
    weights = torch.randn(16, VOCABULARY, dtype=torch.float64)
    model.train()
    (model(torch.cat(documents)[None], position_ids=positions).logits[0] * weights).sum().backward()
    found = gradients(model)
    model.zero_grad()
    together = torch.cat([model(document[None]).logits[0] for document in documents])
    (together * weights).sum().backward()
    assert_same(found, gradients(model))


def test_positions_that_run_on_are_one_document() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    tokens = some_tokens(2, 9)
    with torch.no_grad():
        output = model(tokens, position_ids=torch.arange(3, 12)[None])
        assert_same(output.logits, model(tokens).logits, 0)
        assert output.past_key_values is not None
        assert model(tokens, position_ids=torch.zeros(2, 9, dtype=torch.long)).past_key_values is None  # packed
    with pytest.raises(ValueError, match=r"position_ids have shape \(2, 4\); they must be \(batch, time\)"):
        model(tokens, position_ids=torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mixer", ["hyperglu", "softmax", "gated_deltanet", "mamba"])
@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents_compile_without_a_break(mixer: str, padded: bool) -> None:
    _, model = pair(mixer=mixer, depth=1)
    positions, documents = packed([5, 4, 7])
    given = {"input_ids": torch.cat(documents)[None], "position_ids": positions}
    if padded:
        given = {name: F.pad(value, (2, 1)) for name, value in given.items()}
        given["attention_mask"] = F.pad(torch.ones_like(positions), (2, 1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = compiled(**given).logits, model(**given).logits
    assert_same(found[:, 2:-1] if padded else found, expected[:, 2:-1] if padded else expected)


@each_memory
def test_generation_ignores_what_positions_say_beyond_the_mask(mixer: str | tuple[str, ...]) -> None:
    """generate passes position_ids along; with a cache they follow from what it has seen."""
    model = HyperForCausalLM.wrap(native(mixer))
    tokens, cache = some_tokens(2, 6), model.generation_cache()
    with torch.no_grad():
        model(tokens[:, :4], past_key_values=cache, position_ids=torch.arange(4)[None])
        found = model(tokens[:, 4:], past_key_values=cache, position_ids=torch.tensor([[4, 5]])).logits
        assert_same(found, model(tokens).logits[:, 4:], 1e-4)


def test_a_cache_and_gradient_checkpointing_exclude_each_other() -> None:
    model = HyperForCausalLM(HyperConfig(vocabulary=VOCABULARY, width=16, depth=1, length=12)).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"while gradient checkpointing trains: call model\.eval\(\) first"):
        model(some_tokens(1, 3), past_key_values=model.generation_cache())
    assert len(write(model, some_tokens(1, 3), 4)[0]) == 4  # generates without a cache


@STYLES
def test_borders_of_documents_run_over_all_rows(style: str) -> None:
    net, model = pair(style=style, length=60)
    tokens = some_tokens(2, 8)
    found = model(tokens, cu_seq_lens_q=torch.tensor([0, 3, 8, 14, 16], dtype=torch.int32)).logits
    expected = [torch.cat([net(row[None, a:b])[0] for a, b in parts]) for row, parts in zip(tokens, CUTS, strict=True)]
    assert_same(found, torch.stack(expected))


CUTS = [[(0, 3), (3, 8)], [(0, 6), (6, 8)]]


def test_positions_that_jump_forward_are_those_of_one_document() -> None:
    net, model = pair()
    tokens = some_tokens(1, 8)
    assert_same(model(tokens, position_ids=torch.tensor([[0, 1, 2, 5, 6, 7, 8, 20]])).logits, net(tokens))
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1]])
    found = model(tokens, attention_mask=mask, position_ids=torch.arange(8)[None]).logits
    assert_same(found[:, mask[0] != 0], net(tokens[:, mask[0] != 0]))


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    net, model = pair()
    for forward in (net, model):
        with pytest.raises(
            ValueError, match=f"token {token} is outside the vocabulary, 0 to {VOCABULARY - 1}; use the tokenizer"
        ):
            forward(torch.tensor([[1, token]]))


@pytest.mark.parametrize("mixer", ["softmax", "hyperglu", ("hyperglu", "softmax")], ids=str)
def test_attentions_are_what_the_outputs_are_made_of(mixer: object) -> None:
    _, model = pair(mixer=mixer, length=5)
    tokens, mask = some_tokens(2, 9), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    whole = model(tokens, attention_mask=mask, output_attentions=True)
    assert [w.shape for w in whole.attentions] == [(2, 2, 9, 9)] * 2
    assert not whole.attentions[1][0, :, :2].any()
    assert not whole.attentions[1][0, :, :, :2].any()
    assert_same(whole.logits[mask != 0], model(tokens, attention_mask=mask).logits[mask != 0])
    assert_same(whole.attentions[1][0, :, 2:, 2:], model(tokens[:1, 2:], output_attentions=True).attentions[1][0])
    whole.attentions[1].retain_grad()
    whole.logits[0, -1].sum().backward()
    assert whole.attentions[1].grad[0].norm() > 0
    with torch.no_grad():
        past = None
        for end in (4, 5, 6, 7, 8, 9):
            begin = 0 if past is None else past.get_seq_length()
            step = model(
                tokens[:, begin:end], attention_mask=mask[:, :end], past_key_values=past, use_cache=True, output_attentions=True
            )
            past = step.past_key_values
            for found, expected in zip(step.attentions, whole.attentions, strict=True):
                assert_same(found, expected[:, :, begin:end, :end])
    assert model(tokens).attentions is None
    model.set_attn_implementation("eager")
    assert_same(model(tokens, attention_mask=mask).logits[mask != 0], whole.logits[mask != 0])
