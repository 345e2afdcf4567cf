# %% [markdown]
# # Packing, padding and streaming
#
# Three ways to feed the same tokens to a layer, and how exactly they agree: each number below is a relative difference.

# %%
import torch

from hypermlp import HyperGLU, HyperGLUConfig

torch.manual_seed(0)
torch.set_grad_enabled(False)
layer = HyperGLU(HyperGLUConfig(n_embd=64, n_head=2, block_size=64)).double()  # double: to see how exact it is
documents = [torch.randn(length, 64, dtype=torch.float64) for length in (20, 33, 47)]
alone = [layer(document[None])[0] for document in documents]


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    return f"{float((found - wanted).norm() / wanted.norm()):.1e}"


# %% [markdown]
# **Packing.** All documents in one row, without padding. `cu_seqlens` holds their bounds; no document sees another.

# %%
bounds = torch.tensor([0, 20, 53, 100])
packed = layer(torch.cat(documents)[None], cu_seqlens=bounds)[0]
print("packed:", difference(packed, torch.cat(alone)))

# %% [markdown]
# **Padding.** One document per row, padded on the left (or anywhere). `attention_mask` says which tokens are real.

# %%
padded = torch.zeros(3, 47, 64, dtype=torch.float64)
mask = torch.zeros(3, 47)
for row, document in enumerate(documents):
    padded[row, 47 - len(document) :] = document
    mask[row, 47 - len(document) :] = 1
y = layer(padded, attention_mask=mask)
print("padded:", difference(y[mask.bool()], torch.cat(alone)))

# %% [markdown]
# **Streaming.** A cache holds what the layer needs of the past; tokens come in pieces of any size.

# %%
streamed = []
for document in documents:
    cache = layer.new_cache(batch_size=1)
    streamed.append(torch.cat([layer(piece[None], cache=cache)[0] for piece in document.split(7)]))
print("streamed:", difference(torch.cat(streamed), torch.cat(alone)))

# %% [markdown]
# **Beyond block_size** the layer is an exact sliding window, and so is its cache: it does not grow with the stream.

# %%
stream = torch.randn(1, 500, 64, dtype=torch.float64)
cache = layer.new_cache(batch_size=1)
pieces, sizes = [], []
for piece in stream.split(1, dim=1):
    pieces.append(layer(piece, cache=cache))
    sizes.append(cache.nbytes)
print("500 tokens, window of 64:", difference(torch.cat(pieces, dim=1), layer(stream)))
print("bytes of the cache after 100 and 500 tokens:", sizes[99], sizes[499])

# %% [markdown]
# **Going back.** `crop` forgets the newest tokens, as speculative decoding needs; what follows is as if they had never come.

# %%
cache = layer.new_cache(batch_size=1)
layer(documents[2][None, :30], cache=cache)
layer(torch.randn(1, 5, 64, dtype=torch.float64), cache=cache)  # a draft that is rejected
cache.crop(30)
rest = layer(documents[2][None, 30:], cache=cache)[0]
print("after a rejected draft:", difference(rest, alone[2][30:]))
