"""Operations that a layer needs, counted from its sizes: two for each multiply-add, only slots that exist."""

from __future__ import annotations

from hypermlp.config import HyperGLUConfig


def pairs(time: int, window: int | None = None) -> int:
    """Pairs of a row and a slot it sees."""
    if window is None or time <= window:
        return time * (time + 1) // 2
    return window * (window + 1) // 2 + (time - window) * window


def hyper(config: HyperGLUConfig, batch: int, time: int) -> int:
    """One forward of HyperGLU or HyperMLP; a training step is three times that."""
    assert config.qk_rank is not None
    assert config.vo_rank is not None
    C, G, H = config.n_embd, config.routing_heads, config.n_head
    per_token = C * (2 * config.qk_rank + 2 * config.vo_rank)
    per_token += C * config.qk_rank * config.use_qk_gate + C * config.vo_rank * config.use_vo_gate
    per_token += C * 2 * config.conv_kernel_size * config.use_kv_conv
    per_pair = config.qk_rank + config.vo_rank
    if config.use_op1:
        per_token += C * G * config.op1_rank
        per_pair += 2 * G * config.op1_rank
    if config.use_op2:
        per_token += C * H * config.op2_rank
        per_pair += 2 * H * config.op2_rank
    return 2 * batch * (time * per_token + pairs(time, config.block_size) * per_pair)


def softmax(width: int, batch: int, time: int) -> int:
    """One forward of softmax attention with 4 width² parameters."""
    return 2 * batch * (time * 4 * width**2 + pairs(time) * 2 * width)
