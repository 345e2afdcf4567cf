"""Saved folders and tokenizers in both directions, and for tools that do not know this package."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_small import LENGTH, VOCABULARY, each_model, native, pair, some_tokens, write
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from helpers import assert_same
from hypermlp.data.tokenizers import ByteTokenizer, Tokenizer, find_tokenizer, train_bpe
from hypermlp.mixers import DISTINCT
from hypermlp.models.generate import generate
from hypermlp.models.hf import HyperConfig, HyperForCausalLM, HyperForSequenceClassification, export, fast_tokenizer
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.models.saved import load_model, save_model


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
    assert set(theirs) == {name if name == "head.weight" else f"model.{name}" for name in ours}
    assert ("head.weight" in theirs) is not net.config.tied


@pytest.mark.parametrize("name", sorted(DISTINCT))
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
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in weights.items())
    fresh = found[f"model.{lost}"]
    assert ((fresh > 0) & (fresh < math.log(16))).all()  # log of a number from 1 to 16


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


def test_a_folder_in_several_files_loads(tmp_path: Path) -> None:
    net, tokens = native(), some_tokens(2, 9)
    HyperForCausalLM.wrap(net).save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(load_model(tmp_path)(tokens), net(tokens))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, net(tokens))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ValueError, match=r"index\.json cannot be read .*save the model again"):
        load_model(tmp_path)


def test_the_configuration_says_what_tools_look_for(tmp_path: Path) -> None:
    config = HyperConfig(vocabulary=VOCABULARY, width=16, depth=1, length=LENGTH, eos_token_id=3, own_note="mine")
    HyperForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["HyperForCausalLM"]
    assert (values["dtype"], values["eos_token_id"], values["use_cache"]) == ("bfloat16", 3, True)
    assert values["own_note"] == "mine"
    assert values["auto_map"]["AutoModelForCausalLM"] == "modeling_hypermlp.HyperForCausalLM"
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.hidden_size, again.num_hidden_layers, again.vocab_size, again.own_note) == (16, 1, VOCABULARY, "mine")


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"])
def test_other_models_take_the_backbone_of_a_saved_one(auto: str, tmp_path: Path) -> None:
    net, tokens = native(), some_tokens(2, 9)
    save_model(net, tmp_path / "old")
    export(net, tmp_path / "new", {"kind": "bytes"})
    seen = []
    net.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    net(tokens)
    for name in ("old", "new"):
        model = getattr(transformers, auto).from_pretrained(tmp_path / name, num_labels=5)
        assert torch.equal(model.base_model(tokens).last_hidden_state, seen[0])
        if auto != "AutoModel":
            model.config.pad_token_id = VOCABULARY
            logits = model(tokens).logits
            assert logits.shape == ((2, 5) if "Sequence" in auto else (2, 9, 5))
            assert model.score.weight.std() > 0.005  # begun, not left as memory had it
        model.save_pretrained(tmp_path / "again")
        again = getattr(transformers, auto).from_pretrained(tmp_path / "again")
        assert torch.equal(again.base_model(tokens).last_hidden_state, seen[0])


def test_a_sequence_gets_the_class_of_its_last_real_token() -> None:
    torch.manual_seed(0)
    config = HyperConfig(vocabulary=VOCABULARY, width=16, depth=1, length=LENGTH, num_labels=3, pad_token_id=0)
    model = HyperForSequenceClassification(config).eval()
    tokens = some_tokens(1, 6).clamp(min=1)
    right = F.pad(tokens, (0, 3))
    found = model(right, attention_mask=(right != 0).long()).logits
    assert_same(found, model(tokens).logits, 1e-6)
    loss = model(tokens, labels=torch.tensor([2])).loss
    assert_same(loss, F.cross_entropy(found, torch.tensor([2])), 1e-6)


def test_trust_is_enough_for_a_tool_that_does_not_know_this_package(tmp_path: Path) -> None:
    """Run elsewhere, as a tool would: nothing there imports hypermlp by itself."""
    net, tokens = native(vocabulary=257), some_tokens(1, 5)
    export(net, tmp_path, {"kind": "bytes"})
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code" in str(error), "hypermlp" in sys.modules)
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r})
print(type(model).__module__, tokenizer.eos_token_id)
print(model(torch.tensor({tokens.tolist()})).logits[0, -1].double().sum().item())
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    refused, loaded, total = said.stdout.splitlines()
    assert refused == "True False"
    assert loaded == "hypermlp.models.hf.heads 256"
    assert float(total) == pytest.approx(net(tokens)[0, -1].double().sum().item(), rel=1e-5)


def test_begins_as_the_native_model_does() -> None:
    config = ModelConfig(vocabulary=VOCABULARY, width=16, depth=2, length=LENGTH, mixer=("mamba2", "hyperglu"))
    torch.manual_seed(0)
    expected = LanguageModel(config).blocks.state_dict()
    torch.manual_seed(0)
    found = HyperForCausalLM(HyperConfig(**config.to_dict())).model.blocks.state_dict()
    assert_same(found, expected, 0)


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


def test_the_words_of_other_models_mean_the_same() -> None:
    config = HyperConfig(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, max_position_embeddings=20)
    assert config.plain() == ModelConfig(vocabulary=VOCABULARY, width=48, depth=2, length=20)  # the feed-forward follows, too
    assert config.num_attention_heads == 2  # as the mixers have them
    assert HyperConfig(num_attention_heads=4).plain().heads == 4
    assert not hasattr(HyperConfig(mixer="mamba"), "num_attention_heads")
    remembered = HyperConfig(mixer=("softmax", "mamba", "hyperglu"), depth=4).layer_types
    assert remembered == ["full_attention", "linear_attention", "sliding_attention", "full_attention"]
    values = config.to_dict()
    assert (values["hidden_size"], values.get("num_attention_heads"), values.get("n_embd", 1)) == (48, 2, 1)
    assert "hidden_size" in values
    assert "hidden_size" not in list(values)  # and so in no file
    again = HyperConfig.from_dict({**values, "width": 32, "inner": None})
    assert (again.hidden_size, again.inner) == (32, ModelConfig(vocabulary=9, width=32, depth=1, length=9).inner)


def test_the_plans_name_what_a_model_has() -> None:
    for mixer, split in (("softmax", True), ("gated_softmax", True), ("hyperglu", False), (["softmax", "hyperglu"], False)):
        model = HyperForCausalLM(HyperConfig(vocabulary=VOCABULARY, width=16, depth=2, length=LENGTH, mixer=mixer))
        names = {name.replace(f".{i}.", ".*.") for name, _ in model.named_modules() for i in range(2) if f".{i}." in name}
        assert all(name in names or "*" not in name for name in model.tp_plan)
        assert ("model.blocks.*.mixer.o" in model.tp_plan) == split
        assert {"head", "model.embedding", "model.blocks.*.ffn.down"} <= set(model.tp_plan)


def test_a_folder_says_where_the_package_can_be_had(tmp_path: Path) -> None:
    export(native(vocabulary=257), tmp_path, {"kind": "bytes"})
    script = (tmp_path / "modeling_hypermlp.py").read_text().replace("hypermlp.models.hf", "not_installed")
    with pytest.raises(ImportError, match=r"needs that package: pip install 'hypermlp\[hf\]'"):
        exec(script, {})


def test_the_chat_template_marks_what_the_assistant_says(tmp_path: Path) -> None:
    export(native(vocabulary=257), tmp_path, {"kind": "bytes"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "user: hi\nassistant: yes\nuser: so\n"
    assert tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True) == "user: hi\nassistant: "
    found = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, own in zip(found["input_ids"], found["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(said) == "yes\n"
