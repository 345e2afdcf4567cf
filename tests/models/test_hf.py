"""The language model within Hugging Face transformers: what comes out is what the model itself computes."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from helpers import assert_same, gradients, perturb
from hypermlp.data.tokenizers import ByteTokenizer, Tokenizer, find_tokenizer, train_bpe
from hypermlp.mixers import MIXERS
from hypermlp.models.generate import generate
from hypermlp.models.hf import HyperCache, HyperConfig, HyperForCausalLM, export, fast_tokenizer, lora_config
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.models.saved import load_model, save_model

VOCABULARY, LENGTH = 11, 12
each_model = pytest.mark.parametrize(
    "changes",
    [{"mixer": ("hyperglu", "softmax")}, {"style": "gpt2", "length": 60}, {"tied": False, "mixer": "hypermlp"}],
    ids=["hybrid", "gpt2", "untied"],
)
# A window, a window beside a growing cache, a state.
each_memory = pytest.mark.parametrize("mixer", ["hyperglu", ("hyperglu", "softmax"), "mamba2"], ids=str)


def native(mixer: str | tuple[str, ...] = "hyperglu", **changes: object) -> LanguageModel:
    torch.manual_seed(0)
    given = {"vocabulary": VOCABULARY, "width": 16, "depth": 2, "length": LENGTH, "mixer": mixer, "inner": 32, **changes}
    net = LanguageModel(ModelConfig(**given)).eval()
    return stronger(perturb(net))


@torch.no_grad()
def stronger(net: LanguageModel) -> LanguageModel:
    """Larger matrices, so that what is written depends on the whole past."""
    for p in net.blocks.parameters():
        if p.dim() == 2:
            p *= 3
    return net


def pair(**changes: object) -> tuple[LanguageModel, HyperForCausalLM]:
    """A model in float64, and a view of it."""
    net = native(**changes).double()
    return net, HyperForCausalLM.wrap(net)


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def write(model: HyperForCausalLM, prompt: Tensor, count: int = 25, **options: object) -> list[list[int]]:
    """The new tokens."""
    out = model.generate(
        prompt, max_new_tokens=count, **{"do_sample": False, "attention_mask": torch.ones_like(prompt), **options}
    )
    return out[:, prompt.shape[1] :].tolist()


# Folders


@each_model
def test_folders_are_read_in_both_directions(changes: dict[str, object], tmp_path: Path) -> None:
    net, tokens = native(**changes), some_tokens(2, 9)
    save_model(net, tmp_path / "native")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert isinstance(model, HyperForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path / "native").plain() == net.config
    assert torch.equal(model(tokens).logits, net(tokens))
    model.save_pretrained(tmp_path / "theirs")
    assert torch.equal(load_model(tmp_path / "theirs")(tokens), net(tokens))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")(tokens).logits, net(tokens))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("native", "theirs"))
    assert set(ours) == set(theirs)
    assert ("head.weight" in theirs) is not net.config.tied


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_every_mixer_is_loaded_whole_and_writes_what_it_would(name: str, tmp_path: Path) -> None:
    net, prompt = native(name), some_tokens(2, 5)
    save_model(net, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert write(model, prompt) == generate(net, prompt, 25).tolist()  # past the length


def test_a_models_type_is_kept(tmp_path: Path) -> None:
    save_model(native().bfloat16(), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_what_a_checkpoint_lacks_begins_as_in_a_new_model(tmp_path: Path) -> None:
    net = native("mamba2")
    save_model(net, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = "blocks.1.mixer.A_log"
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert ((found[lost] > 0) & (found[lost] < math.log(16))).all()  # log of a number from 1 to 16


def test_the_vocabulary_can_grow(tmp_path: Path) -> None:
    _, model = pair()
    tokens = some_tokens(1, 5)
    before = model(tokens).logits
    model.resize_token_embeddings(VOCABULARY + 3)
    assert_same(model(tokens).logits[..., :VOCABULARY], before)
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).config.vocabulary == VOCABULARY + 3


def test_a_bad_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"depth \(0\) must be a whole number of at least 1"):
        HyperConfig(depth=0)


# Generation


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


@pytest.mark.parametrize("mixer", ["hyperglu", ("hyperglu", "softmax")], ids=str)
def test_assisted_decoding_is_greedy_decoding(mixer: str | tuple[str, ...]) -> None:
    _, model = pair(mixer=mixer)
    prompt = some_tokens(1, 5)
    greedy = write(model, prompt, 30)
    other = HyperForCausalLM.wrap(native("softmax", depth=1).double())
    rather_alike = HyperForCausalLM.wrap(stronger(perturb(native(mixer), 1)).double())
    for assistant in (other, rather_alike, model):
        assert write(model, prompt, 30, assistant_model=assistant) == greedy
    assert write(model, prompt, 30, prompt_lookup_num_tokens=3) == greedy


def test_assisted_decoding_is_refused_where_tokens_cannot_be_taken_back() -> None:
    _, one_way = pair(mixer=("softmax", "gla"))
    _, model = pair()
    for options in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="assisted decoding takes tokens back, and a recurrent mixer cannot"):
            write(one_way, some_tokens(1, 5), **options)
    with pytest.raises(ValueError, match="a recurrent mixer cannot"):
        write(model, some_tokens(1, 5), assistant_model=one_way)


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


def test_forward_makes_a_cache_when_asked_and_not_in_training() -> None:
    _, model = pair()
    tokens = some_tokens(2, 6)
    first = model(tokens[:, :4], use_cache=True)
    assert_same(model(tokens[:, 4:], past_key_values=first.past_key_values).logits, model(tokens).logits[:, 4:])
    assert model(tokens).past_key_values is None
    assert model.train()(tokens, use_cache=True).past_key_values is None


def test_what_cannot_be_done_is_refused() -> None:
    _, model = pair()
    tokens = some_tokens(1, 5)
    with pytest.raises(ValueError, match=r"cache_implementation \('static'\) must be left unset"):
        write(model, tokens, cache_implementation="static")
    with pytest.raises(ValueError, match=r"past_key_values \(DynamicCache\) must be a HyperCache"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"attention_mask \(\(1, 1, 5, 5\)\) must be \(batch, time\)"):
        model(tokens, attention_mask=torch.ones(1, 1, 5, 5))
    with pytest.raises(ValueError, match="takes input_ids alone"):
        model(tokens, output_hidden_states=True)


# Training


def test_labels_give_the_loss_of_each_next_token() -> None:
    net, model = pair()
    tokens = some_tokens(3, 8)
    labels = tokens.clone()
    labels[0, :5] = labels[2, 7] = -100
    each = F.cross_entropy(net(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
    counted = labels[:, 1:] != -100
    output = model(tokens, labels=labels)
    assert_same(output.loss, each[counted].mean())
    assert_same(model(tokens, labels=labels, num_items_in_batch=100).loss, each[counted].sum() / 100)
    assert torch.equal(model(tokens, labels=labels, return_dict=False)[0], output.loss)


def test_gradient_checkpointing_reads_blocks_again_and_changes_nothing() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    tokens, calls = some_tokens(2, 12), []
    model.train().blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    found = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        found.append(gradients(model))
    assert_same(found[1], found[0])
    assert len(calls) == 1 + 2


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Four sequences of which different numbers of tokens count."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens = some_tokens(4, 12)[row]
        labels = tokens.clone()
        labels[: 2 * row] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def trained(folder: Path, steps: int, **changes: object) -> tuple[HyperForCausalLM, list[float]]:
    model = HyperForCausalLM.wrap(native())
    options = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant", **changes}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_trainer_trains_and_saves(tmp_path: Path) -> None:
    model, losses = trained(tmp_path, 12, gradient_checkpointing=True)
    assert losses[-1] < 0.9 * losses[0]
    tokens = some_tokens(1, 9)
    assert torch.equal(load_model(tmp_path / "model").eval()(tokens), model.eval()(tokens).logits)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_accumulated_gradients_count_tokens_and_not_batches(tmp_path: Path) -> None:
    changes = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
    whole, _ = trained(tmp_path, 1, **changes)
    parts, _ = trained(tmp_path, 1, per_device_train_batch_size=1, gradient_accumulation_steps=4, **changes)
    before = native().state_dict()
    assert_same(dict(parts.named_parameters()), dict(whole.named_parameters()), 1e-5)
    assert any((value - before[name]).abs().max() > 1e-3 for name, value in whole.state_dict().items())


@pytest.mark.parametrize("mixer", ["hyperglu", "softmax", "gla"])
def test_adapters_learn_and_merge(mixer: str) -> None:
    _, model = pair(mixer=mixer, length=64)
    tokens = some_tokens(8, 40)  # enough for projections to be joined
    before = model(tokens).logits
    adapted = peft.get_peft_model(model, lora_config(r=4)).train()
    assert_same(adapted(tokens).logits, before)
    optimiser = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = adapted(tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    names = {name.split(".")[-4] for name, p in adapted.named_parameters() if p.grad is not None}
    assert names == {"v", "o"}
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapted.parameters() if p.requires_grad)
    assert losses[2] < losses[0]
    adapted.eval()
    after = adapted(tokens).logits
    assert (after - before).abs().max() > 1e-3
    prompt = tokens[:2, :5]
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    cached, uncached = (adapted.generate(input_ids=prompt, use_cache=use, **options).tolist() for use in (True, False))
    assert cached == uncached
    merged = adapted.merge_and_unload()
    assert_same(merged(tokens).logits, after)


@torch.no_grad()
def test_adapters_are_not_passed_over_by_the_native_step() -> None:
    """In float32 one token at a time goes through a kernel that reads weights; an adapter must keep it away."""
    model = HyperForCausalLM.wrap(native())
    adapted = peft.get_peft_model(model, lora_config(r=4, init_lora_weights=False)).eval()
    tokens = some_tokens(2, 8)
    cache, base = model.generation_cache(), model.generation_cache()
    stepwise = torch.cat([adapted(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(8)], 1)
    assert_same(stepwise, adapted(tokens).logits, 1e-4)
    with adapted.disable_adapter():
        without = torch.cat([adapted(tokens[:, t : t + 1], past_key_values=base).logits for t in range(8)], 1)
    assert (stepwise - without).abs().max() > 1e-3


def test_forward_compiles_without_a_break() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    tokens = some_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (m(tokens, attention_mask=mask, labels=tokens) for m in (compiled, model))
    assert_same(found.logits, expected.logits)
    assert_same(found.loss, expected.loss)


# Tokenizers

TEXTS = [
    "",
    "a b  c\n\t d",
    "naïve 日本語 \N{GRINNING FACE}\u0000\u007f\u00ad",
    "<|endoftext|> is text",
    "".join(map(chr, range(300))),
]


@pytest.mark.parametrize("make", [ByteTokenizer, lambda: train_bpe(["the cat and the hat", "日本"], 280)], ids=["bytes", "bpe"])
def test_tokens_are_those_of_the_native_tokenizer(make: type[Tokenizer], tmp_path: Path) -> None:
    own = make()
    save_model(native(vocabulary=own.vocabulary), tmp_path / "native", own.to_dict())
    export(load_model(tmp_path / "native"), tmp_path / "exported", own.to_dict())
    read = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("native", "exported")]
    for tokenizer in (fast_tokenizer(own.to_dict()), *read):
        assert (len(tokenizer), tokenizer.eos_token_id) == (own.vocabulary, own.end)
        for text in TEXTS:
            tokens = own.encode(text).tolist()
            assert tokenizer(text).input_ids == tokens
            assert tokenizer.decode(tokens, skip_special_tokens=True) == own.decode(tokens) == text
            assert tokenizer.decode([*tokens, own.end], skip_special_tokens=True) == text
    again = find_tokenizer(str(tmp_path / "exported"))
    assert (again.end, again.vocabulary) == (own.end, own.vocabulary)
    assert [again.encode(text).tolist() for text in TEXTS] == [own.encode(text).tolist() for text in TEXTS]


def test_an_exported_model_writes_batches_of_text_until_their_end(tmp_path: Path) -> None:
    net = native(vocabulary=257)
    with torch.no_grad():
        net.embedding.weight[256] = 3 * net.embedding.weight.abs().max()  # the end of a document is likely
    export(net, tmp_path, {"kind": "bytes"})
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == 256
    batch = tokenizer(["one", "a longer prompt"], padding=True, return_tensors="pt")
    torch.manual_seed(0)
    written = model.generate(**batch, max_new_tokens=200, do_sample=True)
    for row, prompt in zip(written, ["one", "a longer prompt"], strict=True):
        assert tokenizer.decode(row, skip_special_tokens=True).startswith(prompt)
        new = row[batch.input_ids.shape[1] :].tolist()
        assert 256 in new
        assert set(new[new.index(256) :]) == {256}


def test_without_the_library_every_name_tells_the_cure() -> None:
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "peft"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
from hypermlp.models import hf
uses = [
    lambda: hf.HyperConfig(depth=2), lambda: hf.HyperForCausalLM.from_pretrained("x"), lambda: hf.HyperCache(False),
    lambda: hf.HyperTokenizer.from_pretrained("x"), lambda: hf.fast_tokenizer({"kind": "bytes"}), lambda: hf.lora_config(),
]
for use in uses:
    try:
        use()
    except ImportError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split("pip install ")[1] for line in said] == ["'hypermlp[hf]'"] * 5 + ["peft"]
