"""generate and its caches: what is written is what the model itself computes."""

import copy

import pytest
import torch
import transformers
from hf_small import each_memory, native, pair, some_tokens, stronger, write
from torch import Tensor
from transformers import DynamicCache

from helpers import assert_same, perturb
from hypermlp.models.generate import generate
from hypermlp.models.hf import HyperCache, HyperForCausalLM
from hypermlp.models.lm import LanguageModel


@each_memory
def test_padded_prompts_write_what_each_would_alone(mixer: str | tuple[str, ...]) -> None:
    net, model = pair(mixer=mixer)
    prompt = some_tokens(3, 7)
    mask = torch.ones_like(prompt)
    mask[0, :4] = mask[2, :2] = 0
    for beams in (1, 3):
        together = write(model, prompt, 15, attention_mask=mask, num_beams=beams, pad_token_id=3)
        for row in range(3):
            alone = prompt[row : row + 1, mask[row] != 0]
            assert together[row] == write(model, alone, 15, num_beams=beams, pad_token_id=3)[0]
            if beams == 1:
                assert together[row] == generate(net, alone, 15)[0].tolist()


@torch.no_grad()
def beam_search(net: LanguageModel, prompt: Tensor, count: int, beams: int) -> list[int]:
    """By full forwards, without ends."""
    found = [(0.0, prompt[0].tolist())]
    for _ in range(count):
        longer = []
        for total, tokens in found:
            scores = net(torch.tensor([tokens]))[0, -1].log_softmax(-1)
            longer += [(total + float(score), [*tokens, token]) for token, score in enumerate(scores)]
        found = sorted(longer, reverse=True)[:beams]
    return found[0][1][prompt.shape[1] :]


@each_memory
def test_beams_are_those_of_full_forwards(mixer: str | tuple[str, ...]) -> None:
    net, model = pair(mixer=mixer)
    prompt = some_tokens(2, 5)
    found = write(model, prompt, 12, num_beams=3, length_penalty=0.0)
    assert found == [beam_search(net, prompt[row : row + 1], 12, 3) for row in range(2)]


@each_memory
def test_sampling_is_the_same_with_and_without_a_cache(mixer: str | tuple[str, ...]) -> None:
    _, model = pair(mixer=mixer)
    prompt, found = some_tokens(2, 5), []
    for use_cache in (True, False):
        torch.manual_seed(7)
        found.append(write(model, prompt, do_sample=True, use_cache=use_cache, num_return_sequences=2))
    assert found[0] == found[1]
    torch.manual_seed(8)
    assert write(model, prompt, do_sample=True, num_return_sequences=2) != found[0]
    assert write(model, prompt, do_sample=True, top_k=1) == write(model, prompt)


@each_memory
def test_assisted_decoding_is_greedy_decoding(mixer: str | tuple[str, ...]) -> None:
    _, model = pair(mixer=mixer)
    prompt = some_tokens(1, 5)
    greedy = write(model, prompt, 30)
    other = HyperForCausalLM.wrap(native("softmax", depth=1).double())
    rather_alike = HyperForCausalLM.wrap(stronger(perturb(native(mixer), 1)).double())
    for assistant in (other, rather_alike, model):
        assert write(model, prompt, 30, assistant_model=assistant) == greedy
    assert write(model, prompt, 30, prompt_lookup_num_tokens=3) == greedy


def test_a_state_goes_back_to_the_last_crop() -> None:
    _, model = pair(mixer=("softmax", "gated_deltanet", "path"))
    tokens, more = some_tokens(2, 9), some_tokens(2, 3, seed=1)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :2] = mask[1, 8] = 0

    def read(new: Tensor, cache: HyperCache) -> Tensor:
        past = cache.get_seq_length()
        with torch.no_grad():
            return model(new, attention_mask=mask[:, : past + new.shape[1]], past_key_values=cache).logits

    plain, cache = model.generation_cache(), model.generation_cache()
    read(tokens[:, :7], plain)
    expected = read(more, plain)
    assert not cache.is_croppable
    read(tokens[:, :4], cache)
    cache.activate_past_recording()
    assert cache.is_croppable
    for part in tokens[:, 4:].split([2, 1, 2], 1):
        read(part, cache)
    copied = copy.deepcopy(cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 7
    again = copy.deepcopy(cache)
    assert_same(read(more, cache), expected)
    cache.crop(-3)
    assert_same(read(more, cache), expected)
    assert_same(read(more, again), expected)
    for held in (cache, copied):
        with pytest.raises(ValueError, match="cannot crop by 4 tokens: a state goes back to the last crop at most"):
            held.crop(-4)
    cache.stop_past_recording()
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(-1)


@each_memory
def test_a_static_cache_writes_the_same(mixer: str | tuple[str, ...]) -> None:
    _, model = pair(mixer=mixer)
    prompt = some_tokens(2, 5)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    for options in ({"attention_mask": mask, "pad_token_id": 3}, {"num_beams": 3}, {"prefill_chunk_size": 2}):
        assert write(model, prompt, 9, cache_implementation="static", **options) == write(model, prompt, 9, **options)
    last = model.generate(prompt, max_new_tokens=4, cache_implementation="static", return_dict_in_generate=True)
    cache = last.past_key_values
    assert (cache.get_seq_length(), cache.is_compileable) == (8, True)
    assert cache.get_max_length() == 13  # as much as the longest before, whose last token nobody reads
    cache.reset()
    assert_same(model(prompt, past_key_values=cache).logits, model(prompt).logits)
    for act in (lambda: cache.crop(-1), cache.activate_past_recording):
        with pytest.raises(ValueError, match="leave cache_implementation unset"):
            act()


@pytest.mark.parametrize("mixer", ["hyperglu", ("softmax", "gated_deltanet")], ids=str)
def test_generate_compiles_its_steps_to_one_graph(mixer: str | tuple[str, ...]) -> None:
    _, model = pair(mixer=mixer)
    prompt = some_tokens(2, 5)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "pad_token_id": 3}
    expected = write(model, prompt, 9, **options)
    compiled = transformers.CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager")
    compiled._compile_all_devices = True
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (9, 4):
            written = write(model, prompt, count, cache_implementation="static", compile_config=compiled, **options)
            assert written == [row[:count] for row in expected]
    assert hasattr(model, "_compiled_call")


@each_memory
def test_a_conversation_goes_on_from_its_cache(mixer: str | tuple[str, ...]) -> None:
    _, model = pair(mixer=mixer)
    prompt, cache = some_tokens(2, 5), model.generation_cache()
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[0, :2] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 3}
    first = model.generate(prompt, attention_mask=mask[:, :5], past_key_values=cache, **options)
    assert cache.get_seq_length() == 10  # the last token has not been read yet
    longer = torch.cat([first, some_tokens(2, 4, seed=1)], 1)
    expected = write(model, longer, attention_mask=mask)
    assert write(model, longer, attention_mask=mask, past_key_values=copy.deepcopy(cache)) == expected
    assert write(model, longer, attention_mask=mask, past_key_values=cache, prefill_chunk_size=3) == expected


def test_streaming_gives_tokens_as_they_come() -> None:
    class Collect(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    _, model = pair()
    prompt, streamer = some_tokens(1, 5), Collect()
    assert streamer.tokens == []
    written = write(model, prompt, streamer=streamer)[0]
    assert streamer.tokens == [*prompt[0].tolist(), *written, -1]


def test_a_cache_is_handled_row_by_row() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    tokens, more = some_tokens(2, 9), some_tokens(2, 3, seed=1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0

    def read() -> HyperCache:
        cache = model.generation_cache()
        model(tokens, attention_mask=mask, past_key_values=cache)
        return cache

    def go_on(cache: HyperCache, new: Tensor) -> Tensor:
        return model(new, past_key_values=cache).logits

    expected = go_on(read(), more)
    cropped = read()
    go_on(cropped, more)
    cropped.crop(0)
    cropped.crop(-3)
    assert cropped.get_seq_length() == 9
    assert_same(go_on(cropped, more), expected)
    twice = read()
    twice.batch_repeat_interleave(2)
    assert twice.batch_size == 4
    assert_same(go_on(twice, more.repeat_interleave(2, 0)), expected.repeat_interleave(2, 0))
    second = read()
    second.batch_select_indices(torch.tensor([1]))
    assert_same(go_on(second, more[1:]), expected[1:])
    second.reset()
    assert_same(go_on(second, tokens), model(tokens).logits)
    with pytest.raises(ValueError, match=r"crop \(3\) takes how many tokens to forget as a negative number"):
        cropped.crop(3)


def test_what_cannot_be_done_is_refused() -> None:
    _, model = pair()
    tokens = some_tokens(1, 5)
    with pytest.raises(ValueError, match=r"cache_implementation \('quantized'\) must be left unset"):
        write(model, tokens, cache_implementation="quantized")
    with pytest.raises(ValueError, match=r"past_key_values \(DynamicCache\) must be a HyperCache"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"attention_mask \(\(1, 1, 5, 5\)\) must be \(batch, time\)"):
        model(tokens, attention_mask=torch.ones(1, 1, 5, 5))
    _, recurrent = pair(mixer=("softmax", "mamba2"))
    with pytest.raises(ValueError, match=r"output_attentions is not available: not all mixers .* \(mamba2, softmax\)"):
        recurrent(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="one sequence in each row: leave it unset for packed documents"):
        model(tokens, output_attentions=True, position_ids=torch.tensor([[0, 1, 0, 1, 2]]))
    with pytest.raises(ValueError, match="call generate with a padded batch"):
        model.generate_batch([[1, 2]])
    with pytest.raises(ValueError, match=r"make it with model\.generation_cache"):
        write(model, tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds, one of the two"):
        model(tokens, inputs_embeds=torch.zeros(1, 5, 16).double())


def test_a_mixer_without_a_cache_names_the_option_that_does_without() -> None:
    net, model = pair(mixer="G-12!", length=30)
    prompt = some_tokens(2, 5)
    with pytest.raises(ValueError, match=r"this model \(G-12!\) has a mixer without a cache; .* use_cache=False"):
        write(model, prompt, 4)
    written = torch.tensor(write(model, prompt, 4, use_cache=False))
    whole = torch.cat([prompt, written], 1)
    for i in range(4):
        assert torch.equal(net(whole[:, : 5 + i])[:, -1].argmax(-1), written[:, i])
