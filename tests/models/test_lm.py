"""The language model around any mixer: the laws of the mixers hold for whole models, hybrids included."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from helpers import assert_same, perturb
from hypermlp.batch import Batch
from hypermlp.mixers import DISTINCT
from hypermlp.models.generate import generate
from hypermlp.models.lm import LanguageModel, ModelCache, ModelConfig, count_parameters, match_inner_width
from hypermlp.train.optimisation import Recipe
from hypermlp.train.training import Training

VOCABULARY, WIDTH, LENGTH = 11, 16, 12
HYBRID = ("hyperglu", "softmax")
each_mixer = pytest.mark.parametrize("name", sorted(DISTINCT))
each_model = pytest.mark.parametrize(
    "changes",
    [{}, {"mixer": HYBRID}, {"style": "gpt2", "length": 40}, {"tied": False, "mixer": "hypermlp"}],
    ids=["plain", "hybrid", "gpt2", "untied"],
)


def model(name: str | tuple[str, ...] = "hyperglu", **changes: object) -> LanguageModel:
    torch.manual_seed(0)
    given = {"vocabulary": VOCABULARY, "width": WIDTH, "depth": 2, "length": LENGTH, "mixer": name, "inner": 32, **changes}
    return LanguageModel(ModelConfig(**given))


def exact(**changes: object) -> LanguageModel:
    net = model(**changes).double()
    perturb(net)
    return net


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@each_mixer
def test_logits_do_not_depend_on_the_future(name: str) -> None:
    tokens = some_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCABULARY
    torch.testing.assert_close(model(name)(tokens)[:, :7], model(name)(changed)[:, :7])


@each_mixer
def test_a_model_learns_a_constant_batch(name: str) -> None:
    net = model(name, tied=False)
    tokens, targets = some_tokens(4, 12), some_tokens(4, 12, seed=1)
    training = Training(net, Recipe(steps=150, lr=1e-2, warmup=7, final=0.0, weight_decay=0.0))
    losses = [training.update([Batch(tokens, targets)]).loss for _ in range(150)]
    assert losses[-1] < 0.2 * losses[0]
    assert (net(tokens).argmax(-1) == targets).float().mean() > 0.9


@each_model
def test_padding_packing_and_caching_are_exact(changes: dict[str, object]) -> None:
    net, tokens = exact(**changes), some_tokens(2, 12)
    alone = net(tokens[:1])
    mask = torch.ones(2, 15)
    mask[0, :3] = mask[1, 4:7] = 0
    padded = torch.zeros(2, 15, dtype=torch.long)
    padded[0, 3:] = tokens[0]
    padded[1, mask[1] != 0] = tokens[1]
    assert_same(net(padded, attention_mask=mask)[0, 3:], alone[0])
    bounds = [0, 5, 6, 12]
    packed = net(tokens[:1], cu_seqlens=torch.tensor(bounds))
    for a, b in pairwise(bounds):
        assert_same(packed[:, a:b], net(tokens[:1, a:b]))
    cache = net.new_cache(2)
    assert_same(torch.cat([net(part, cache=cache) for part in tokens.split([5, 1, 6], 1)], 1), net(tokens))
    assert cache.lengths.tolist() == [12, 12]


@each_model
def test_a_models_cache_is_handled_as_one(changes: dict[str, object]) -> None:
    net, tokens, more = exact(**changes), some_tokens(3, 9), some_tokens(3, 4, seed=1)
    cache = net.new_cache(3)
    net(tokens, cache=cache)
    expected = net(more, cache=cache.clone())
    assert_same(net(more[[2, 0]], cache=cache.select([2, 0])), expected[[2, 0]])
    assert_same(net(more, cache=ModelCache.stack([cache.select([0]), cache.select([1, 2])])), expected)
    beams = cache.clone()
    beams.reorder([1, 1, 0])
    assert_same(net(more[[1, 1, 0]], cache=beams), expected[[1, 1, 0]])
    elsewhere = net.new_cache(1)
    elsewhere.load_state_dict(cache.state_dict())
    net(more, cache=cache)
    cache.crop(9)
    assert_same(net(more, cache=cache), expected)
    assert_same(net(more, cache=elsewhere), expected)
    assert cache.nbytes == sum(layer.nbytes for layer in cache.layers)


@pytest.mark.parametrize("other", ["hello", [], model(depth=1).new_cache(1)])
def test_what_is_no_cache_of_this_model_is_refused(other: object) -> None:
    with pytest.raises(ValueError, match="new_cache"):
        model()(some_tokens(1, 1), cache=other)


def test_a_hybrid_that_cannot_go_back_changes_nothing_when_cropped() -> None:
    one_way = next(name for name in sorted(DISTINCT) if model(name).new_cache(1).one_way)
    net, tokens, more = exact(mixer=("softmax", one_way)), some_tokens(1, 9), some_tokens(1, 3, seed=1)
    cache = net.new_cache(1)
    net(tokens, cache=cache)
    expected = net(more, cache=cache.clone())
    assert cache.one_way
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop(4)
    assert_same(net(more, cache=cache), expected)


def test_mixers_take_turns_down_the_layers() -> None:
    net = model(HYBRID, depth=3)
    assert [type(block.mixer).__name__ for block in net.blocks] == ["HyperGLU", "SoftmaxAttention", "HyperGLU"]


@each_model
def test_checkpointing_changes_no_gradient(changes: dict[str, object]) -> None:
    net, tokens = exact(**changes), some_tokens(2, 12)
    found = []
    for net.checkpointing in (False, True):
        net.zero_grad()
        net(tokens).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    assert_same(found[1], found[0])


def test_the_head_is_the_embedding_unless_asked() -> None:
    tied, untied = model(), model(tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert count_parameters(untied) - count_parameters(tied) == VOCABULARY * WIDTH


def test_learned_positions_end_with_a_clear_error() -> None:
    with pytest.raises(ValueError, match="position 12 is beyond the 12 learned position embeddings; cut the input"):
        model(style="gpt2")(some_tokens(1, 13))


def test_config_round_trip_and_errors() -> None:
    config = model(HYBRID).config
    assert ModelConfig.from_dict(config.to_dict()) == config
    saved = model(init="paper").config.to_dict()
    assert saved.pop("init") == "paper"
    assert ModelConfig.from_dict(saved).init == "paper", "what was saved before there was a choice"
    with pytest.raises(ValueError, match=r"unknown model fields \['layers'\]; known are"):
        ModelConfig.from_dict({"layers": 2})
    with pytest.raises(ValueError, match=r"depth \(0\) must be a whole number of at least 1"):
        model(depth=0)
    with pytest.raises(ValueError, match="style"):
        model(style="bert")
    with pytest.raises(ValueError, match=r"tokens are torch\.float32"):
        model()(torch.zeros(1, 3))


def test_parameter_counts_are_matched_by_the_feed_forward() -> None:
    target = count_parameters(model("hyperglu"))
    inner = match_inner_width(target, lambda width: model("softmax", inner=width), 32)
    assert abs(count_parameters(model("softmax", inner=inner)) - target) < 0.01 * target


# Generation


def follow_greedily(net: LanguageModel, prompt: Tensor, count: int) -> Tensor:
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, net(tokens)[:, -1:].argmax(-1)], 1)
    return tokens[:, prompt.shape[1] :]


@each_mixer
def test_generation_with_a_cache_equals_full_forwards(name: str) -> None:
    net, prompt = exact(name=name), some_tokens(2, 5)
    assert generate(net, prompt, 30).tolist() == follow_greedily(net, prompt, 30).tolist()


@pytest.mark.parametrize("mixer", ["hyperglu", "softmax", "gla"])
def test_generation_without_a_cache_writes_what_it_writes_with_one(mixer: str) -> None:
    net = model(mixer=mixer, length=64)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    prompt = some_tokens(3, 5)
    written = generate(net, prompt, 12, attention_mask=mask, use_cache=False)
    assert written.tolist() == generate(net, prompt, 12, attention_mask=mask).tolist()


def test_a_model_without_a_cache_generates_by_whole_passes() -> None:
    net = model(mixer=("softmax", "G-12!"), length=32)
    assert not net.has_cache
    assert model().has_cache
    prompt = some_tokens(2, 3)
    with pytest.raises(ValueError, match="use_cache=False"):
        generate(net, prompt, 5)
    assert generate(net, prompt, 20, use_cache=False).tolist() == follow_greedily(net, prompt, 20).tolist()


def test_padded_prompts_generate_what_each_would_alone() -> None:
    net, prompt = exact(), some_tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    together = generate(net, prompt, 20, attention_mask=mask)
    for row in range(2):
        assert together[row].tolist() == generate(net, prompt[row : row + 1, mask[row] != 0], 20)[0].tolist()


def test_sampling_follows_the_distribution_and_its_seed() -> None:
    net, prompt = exact(), some_tokens(1, 4).expand(4000, 4)
    expected = net(prompt[:1])[0, -1].softmax(-1).detach()
    found = generate(net, prompt, 1, temperature=1.0, seed=3)[:, 0]
    assert torch.equal(found, generate(net, prompt, 1, temperature=1.0, seed=3)[:, 0])
    share = torch.bincount(found, minlength=VOCABULARY) / len(found)
    assert (share - expected).abs().max() < 0.04
    best = expected.topk(2).indices.tolist()
    assert set(generate(net, prompt, 1, temperature=1.0, top_k=2)[:, 0].tolist()) == set(best)
    narrow = generate(net, prompt, 1, temperature=1.0, top_p=float(expected.max()) / 2)[:, 0]
    assert set(narrow.tolist()) == {int(expected.argmax())}


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_sampling_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        generate(model(), some_tokens(1, 3), 1, **bad)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model(), some_tokens(1, 0), 1)
