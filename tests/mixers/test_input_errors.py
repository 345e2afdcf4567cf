"""What the layer refuses, with a message that says rule, value and remedy; and the smallest inputs that it takes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from helpers import each_impl, make_layer, precision, randn

FLOAT = torch.float64
GOOD = (2, 5, 16)


def cu(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    "x, options, message",
    [
        (torch.ones(2, 5, 15, dtype=FLOAT), {}, "x has shape (2, 5, 15); it must be (batch, time, n_embd = 16)"),
        (torch.ones(5, 16, dtype=FLOAT), {}, "x has shape (5, 16); it must be (batch, time, n_embd = 16)"),
        (torch.ones(1, 2, 5, 16, dtype=FLOAT), {}, "x has shape (1, 2, 5, 16); it must be (batch, time"),
        (torch.ones(GOOD, dtype=torch.int64), {}, "x has dtype torch.int64; a mixer takes floating-point vectors"),
        (torch.ones(GOOD), {}, "x is torch.float32 and the layer torch.float64; cast one with .to(...)"),
        (torch.ones(GOOD, dtype=FLOAT, device="meta"), {}, "x is on meta and the layer on cpu; move one with .to(...)"),
    ],
    ids=["width", "too flat", "too deep", "integers", "dtype", "device"],
)
def test_input_refused(x: Tensor, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layer()(x, **options)


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(2, 6), "attention_mask has shape (2, 6); it must be (batch, time) = (2, 5), nonzero = real"),
        (torch.ones(5), "attention_mask has shape (5,); it must be (batch, time) = (2, 5)"),
        (torch.ones(2, 1, 5, 5), "attention_mask has shape (2, 1, 5, 5); it must be (batch, time) = (2, 5)"),
        (torch.ones(2, 5, device="meta"), "attention_mask is on meta and x on cpu; move it with .to(x.device)"),
    ],
    ids=["length", "flat", "four axes", "device"],
)
def test_mask_refused(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layer()(randn(*GOOD), attention_mask=mask)


@pytest.mark.parametrize(
    "bounds, message",
    [
        (cu(0, 3, 3, 5), "cu_seqlens must increase from entry to entry: [0, 3, 3, 5]"),
        (cu(0, 4, 2, 5), "cu_seqlens must increase from entry to entry: [0, 4, 2, 5]"),
        (cu(1, 3, 5), "cu_seqlens must run from 0 to the 5 tokens of x, not from 1 to 5"),
        (cu(0, 3), "cu_seqlens must run from 0 to the 5 tokens of x, not from 0 to 3"),
        (cu(0, 3, 9), "cu_seqlens must run from 0 to the 5 tokens of x, not from 0 to 9"),
        (cu(0, 5, dtype=torch.float32), "cu_seqlens must be a whole-number tensor of shape (n + 1,), not torch.float32"),
        (cu(0, 1, dtype=torch.bool), "cu_seqlens must be a whole-number tensor of shape (n + 1,), not torch.bool"),
        (cu(0, 5)[None], "cu_seqlens must be a whole-number tensor of shape (n + 1,), not torch.int64 (1, 2)"),
        (cu(), "cu_seqlens must be a whole-number tensor of shape (n + 1,), not torch.int64 (0,)"),
        (cu(0, 5).to("meta"), "cu_seqlens is on meta and x on cpu; move it with .to(x.device)"),
    ],
    ids=["equal", "falling", "start", "short", "long", "float", "bool", "two axes", "empty", "device"],
)
def test_cu_seqlens_refused(bounds: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layer()(randn(1, 5, 16), cu_seqlens=bounds)


def test_cu_seqlens_needs_one_batch_row() -> None:
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of 1, x has 2; flatten the documents into one row"):
        make_layer()(randn(*GOOD), cu_seqlens=cu(0, 5))


def test_mask_and_cu_seqlens_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"attention_mask \(padding\) or cu_seqlens \(packing\), not both"):
        make_layer()(randn(1, 5, 16), attention_mask=torch.ones(1, 5), cu_seqlens=cu(0, 5))


@each_impl
def test_identity_layout_has_no_sliding_window(impl: str, chunk: int | None) -> None:
    layer = make_layer(dtype=precision(impl), block_size=6, aligner_kind="identity")
    x = randn(1, 7, 16, dtype=precision(impl))
    message = r"parameters for block_size \(6\) slots .* 7 tokens needs a larger block_size, or aligner_kind=\"offset\""
    with pytest.raises(ValueError, match=message):
        layer(x, impl=impl, chunk_T=chunk)
    assert layer(x, cu_seqlens=cu(0, 6, 7), impl=impl, chunk_T=chunk).isfinite().all()  # each document fits


def test_unknown_implementation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"impl \('fast'\) must be one of 'auto', 'dense', 'chunked'"):
        make_layer()(randn(*GOOD), impl="fast")


@pytest.mark.parametrize("rows", [0, -3])
def test_strip_height_must_be_positive(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"chunk_T \({rows}\) must be a whole number of at least 1, or None"):
        make_layer()(randn(*GOOD), chunk_T=rows)


@each_impl
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("changes", [{}, {"attn_kind": "relu"}, {"aligner_kind": "identity"}, {"use_rope": True}], ids=str)
@pytest.mark.parametrize("shape", [(2, 0, 16), (0, 5, 16), (0, 0, 16)], ids=str)
def test_empty_input_gives_empty_output(
    shape: tuple[int, ...], changes: dict, masked: bool, impl: str, chunk: int | None
) -> None:
    layer = make_layer(dtype=precision(impl), **changes)
    x = torch.zeros(shape, dtype=precision(impl), requires_grad=True)
    mask = torch.ones(shape[:2]) if masked else None
    y = layer(x, attention_mask=mask, impl=impl, chunk_T=chunk)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    for p in layer.parameters():
        assert p.grad is not None
        assert (p.grad == 0).all()


@each_impl
def test_no_documents(impl: str, chunk: int | None) -> None:
    layer = make_layer(dtype=precision(impl))
    x = torch.zeros(1, 0, 16, dtype=precision(impl))
    assert layer(x, cu_seqlens=cu(0), impl=impl, chunk_T=chunk).shape == x.shape


@each_impl
def test_any_nonzero_whole_number_is_a_real_token(impl: str, chunk: int | None) -> None:
    layer, x = make_layer(dtype=precision(impl)), randn(1, 5, 16, dtype=precision(impl))
    masks = [torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([[0, -1, 2, 0, 1]]), torch.tensor([[0.0, 1, 1, 0, 1]])]
    masks.append(masks[0].bool())
    first, *others = (layer(x, attention_mask=m, impl=impl, chunk_T=chunk) for m in masks)
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize("low", [float("-inf"), -1e9, torch.finfo(torch.float32).min])
def test_an_additive_mask_is_refused(low: float) -> None:
    """It would be taken for its opposite: 0 is added to the scores of real tokens."""
    mask = torch.zeros(2, 5)
    mask[0, :2] = low
    with pytest.raises(ValueError, match="is not added to scores; give mask == 0"):
        make_layer()(randn(*GOOD), attention_mask=mask)


def test_lists_for_tensors() -> None:
    layer, x = make_layer(), randn(1, 5, 16)
    assert torch.equal(layer(x, cu_seqlens=[0, 2, 5]), layer(x, cu_seqlens=cu(0, 2, 5)))
    with pytest.raises(ValueError, match="cu_seqlens is a str; give a tensor or a list of whole numbers"):
        layer(x, cu_seqlens="0, 5")
    with pytest.raises(ValueError, match="attention_mask is a list; it must be a tensor"):
        layer(x, attention_mask=[[1, 1, 1, 1, 1]])
