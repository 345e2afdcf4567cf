"""Losses, gradient checkpointing, Trainer, adapters, torch.compile."""

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_small import native, pair, some_tokens
from torch import Tensor

from helpers import assert_same, gradients
from hypermlp.models.hf import HyperForCausalLM, lora_config
from hypermlp.models.saved import load_model


def test_labels_give_the_loss_of_each_next_token() -> None:
    net, model = pair()
    tokens = some_tokens(3, 8)
    labels = tokens.clone()
    labels[0, :5] = labels[2, 7] = -100
    each = F.cross_entropy(net(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
    counted = labels[:, 1:] != -100
    output = model(tokens, labels=labels)
    assert_same(output.loss, each[counted].mean(), 1e-6)  # the library computes losses in float32
    assert_same(model(tokens, labels=labels, num_items_in_batch=100).loss, each[counted].sum() / 100, 1e-6)
    assert torch.equal(model(tokens, labels=labels, return_dict=False)[0], output.loss)


def test_gradient_checkpointing_reads_blocks_again_and_changes_nothing() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    tokens, calls = some_tokens(2, 12), []
    model.train().model.blocks[0].mixer.register_forward_pre_hook(lambda *_: calls.append(1))
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
    before = HyperForCausalLM.wrap(native()).state_dict()
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


@pytest.mark.usefixtures("fresh_compiler")
def test_forward_compiles_without_a_break() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    tokens = some_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (m(tokens, attention_mask=mask, labels=tokens) for m in (compiled, model))
    assert_same(found.logits, expected.logits)
    assert_same(found.loss, expected.loss)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_label_smoothing_shifts_the_labels(tmp_path: Path) -> None:
    """Trainer asks a table of class names whether its own smoothed loss must do so."""
    _, losses = trained(tmp_path, 1, label_smoothing_factor=0.1)
    rows = [Rows()[i] for i in range(4)]
    tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        log_p = HyperForCausalLM.wrap(native()).train()(tokens).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    counted = targets != -100
    each = -log_p.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    smoothed = 0.9 * each[counted].mean() - 0.1 * log_p[counted].mean()
    assert losses[0] == pytest.approx(smoothed.item(), rel=1e-3)


def test_prompt_tuning_learns_embeddings_before_the_text() -> None:
    _, model = pair(mixer=("hyperglu", "softmax"))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned, tokens = peft.get_peft_model(model, config), some_tokens(2, 6)
    tuned.double()
    before = [p.detach().clone() for p in tuned.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    tuned(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
    optimiser.step()
    assert all(
        not torch.equal(p, old) for p, old in zip((p for p in tuned.parameters() if p.requires_grad), before, strict=True)
    )
    tuned.eval()
    prompt = tuned.get_prompt(2)
    expected = model(inputs_embeds=torch.cat([prompt, model.get_input_embeddings()(tokens)], 1)).logits
    assert_same(tuned(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits, expected, 1e-6)


def test_prefix_tuning_is_refused_with_what_to_use_instead() -> None:
    _, model = pair(mixer="softmax")
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    tokens = some_tokens(2, 6)
    with pytest.raises(ValueError, match="instead of prefix tuning, use PromptTuningConfig or a LoraConfig"):
        tuned(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_adapters_of_parameters_that_are_no_modules() -> None:
    """target_parameters, for the lag factors; hooks of PEFT's give them while the module is called."""
    _, model = pair(length=12)
    tokens = some_tokens(2, 9)
    before = model(tokens).logits
    config = peft.LoraConfig(r=2, target_parameters=["mixer.op1.A"], target_modules=[], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double()
    after = adapted(tokens).logits
    assert (after - before).abs().max() > 1e-6
    after.square().sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in adapted.parameters() if p.requires_grad)
