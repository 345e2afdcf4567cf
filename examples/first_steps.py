# %% [markdown]
# # The first quarter of an hour
#
# A layer, what it reads, a small model trained, the same with softmax attention, and the result in a folder. It runs on one
# core in about a minute, with no network and no GPU.
#
# ## A layer
#
# `HyperGLU` takes and gives what any causal self-attention does: (batch, time, width).

# %%
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from hypermlp import HyperGLU, HyperGLUConfig, LanguageModel, ModelConfig, load_model, save_model
from hypermlp.studies.demo import reading
from hypermlp.studies.task_models import open_task_model

torch.manual_seed(0)
layer = HyperGLU(HyperGLUConfig(n_embd=64, n_head=2, block_size=128))
x = torch.randn(2, 100, 64)
y = layer(x)
print("in", tuple(x.shape), "out", tuple(y.shape))

future = x.clone()
future[:, 60:] = 0
print("the future changes nothing:", torch.allclose(layer(future)[:, :60], y[:, :60], atol=1e-5))

# %% [markdown]
# ## What a trained layer reads
#
# Two small models come with the package. `hypermlp:copying` has learned to write down, in order, the data tokens that it has
# seen among blanks. Behind the token `copy` it gives one answer after the other. Most answers read where their token stood, or
# up to two places behind it, as far as the layer's short convolutions carry a token.

# %%
copying = open_task_model("hypermlp:copying")
seen = reading(copying.model, copying.setting, copying.inputs[0], copying.targets[0])
print("tokens: ", " ".join(seen["tokens"]))
for right, given, shares in zip(seen["right"], seen["given"], seen["shares"], strict=True):
    place = max(range(len(shares)), key=lambda token: shares[token])
    around = " ".join(seen["tokens"][max(0, place - 2) : place + 1])
    print(f"answer {given:>2} (right: {right:>2}) reads most at token {place:>2}, behind: {around}")

# %% [markdown]
# `hypermlp explore` draws the same for every head and token: the scores, what mixing makes of them, which tokens are read.
#
# ## Train one
#
# The task: twelve random tokens, a mark, and the same twelve again. The loss counts the second half alone.

# %%
VOCABULARY, LENGTH, MARK = 16, 12, 0


def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    whole = torch.cat([data, torch.full((rows, 1), MARK), data], dim=1)
    return whole[:, :-1], whole[:, LENGTH + 1 :]  # what is read, and what is to be written behind the mark


def train(mixer: str, steps: int = 150) -> tuple[LanguageModel, float]:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocabulary=VOCABULARY, width=32, depth=1, length=2 * LENGTH, mixer=mixer))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs, targets = batch(32, generator)
        loss = F.cross_entropy(model(inputs)[:, LENGTH:].flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    inputs, targets = batch(256, generator)
    with torch.no_grad():
        right = (model.eval()(inputs)[:, LENGTH:].argmax(-1) == targets).float().mean()
    return model, float(right)


model, accuracy = train("hyperglu")
print(f"HyperGLU copies {accuracy:.0%} of the tokens after 150 steps")

# %% [markdown]
# ## Compare
#
# Any name or label of `hypermlp mixers` takes the layer's place. One seed and 150 steps are too few to rank mixers:
# `hypermlp study run` tunes every mixer, gives all the same number of parameters, and repeats with several seeds.

# %%
for mixer in ("softmax", "gla"):
    print(f"{mixer:<8} {train(mixer)[1]:.0%}")

# %% [markdown]
# ## Save it, load it
#
# A saved model is a folder of plain data. `hypermlp export` writes one that Hugging Face's Auto classes load.

# %%
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary) / "copier"
    save_model(model, folder)
    print(sorted(path.name for path in folder.iterdir()))
    again = load_model(folder).eval()
inputs, _ = batch(1, torch.Generator().manual_seed(2))
print("the same after loading:", torch.equal(again(inputs), model(inputs)))
