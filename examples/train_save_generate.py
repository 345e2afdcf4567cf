"""Train a small language model on Python's own source, save it, load it again, and let it write.

    python examples/train_save_generate.py --out my-model

`hypermlp train` does more: text corpora, checkpoints, exact resume, several processes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from hypermlp import LanguageModel, ModelConfig, generate
from hypermlp.models.saved import load_model, save_model

CONTEXT, BATCH = 64, 16


def train(model: LanguageModel, data: torch.Tensor, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([data[i : i + CONTEXT + 1] for i in starts.tolist()])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step:4d}   loss {loss.item():.3f} nats per byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mixer", default="hyperglu", help="any name of `hypermlp mixers`; two with a comma make a hybrid")
    parser.add_argument("--out", type=Path, help="folder of the saved model (default: a temporary one)")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = torch.tensor(list(inspect.getsource(argparse).encode() + inspect.getsource(json).encode()))
    mixers = tuple(options.mixer.split(","))
    model = LanguageModel(ModelConfig(vocabulary=256, width=64, depth=2, length=CONTEXT, mixer=mixers))
    train(model, data, options.steps)

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        save_model(model, folder)  # config.json and model.safetensors
        model = load_model(folder)
        print(f"saved and loaded: {sorted(path.name for path in folder.iterdir())}")

    prompt = "def parse_"
    new = generate(model, torch.tensor([list(prompt.encode())]), 200, temperature=0.7, top_p=0.95, seed=0)
    print(prompt + bytes(new[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
