"""A Hugging Face round trip: save, load with the Auto classes, fine-tune with LoRA, merge, generate.

    python examples/hugging_face_lora.py

Needs transformers and peft: pip install 'hypermlp[hf]' peft
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hypermlp import LanguageModel, ModelConfig
from hypermlp.models import hf  # registers the model type with the Auto classes

FIRST = "the quick brown fox jumps over the lazy dog. " * 2
SECOND = "the quick brown cat sleeps under the old table. " * 2


def fine_tune(model: torch.nn.Module, tokens: torch.Tensor, steps: int, rate: float) -> None:
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for step in range(1, steps + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 30 == 0 or step == steps:
            print(f"step {step:3d}   loss {loss.item():.3f}")


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    new = model.generate(**tokenizer("the quick", return_tensors="pt"), max_new_tokens=40, do_sample=False)
    print("it writes:", tokenizer.decode(new[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        base, adapter = Path(temporary) / "base", Path(temporary) / "adapter"
        net = LanguageModel(ModelConfig(vocabulary=257, width=64, depth=2, length=128))
        hf.export(net, base, {"kind": "bytes"})

        tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base)
        first, second = (tokenizer(text, return_tensors="pt").input_ids for text in (FIRST, SECOND))
        print("training of all parameters, on a first text")
        fine_tune(model, first, options.steps, 3e-3)
        write(model, tokenizer)

        print("LoRA on the readout side, as the paper advises, on a second text")
        adapted = get_peft_model(model, hf.lora_config(r=16))
        adapted.print_trainable_parameters()
        fine_tune(adapted, second, 3 * options.steps, 1e-2)
        adapted.save_pretrained(adapter)

        merged = adapted.merge_and_unload()
        merged.save_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            torch.testing.assert_close(model(second).logits, merged(second).logits)
        print("merged, saved and loaded: the same logits")
        write(model, tokenizer)


if __name__ == "__main__":
    main()
