"""Norms of whole rows, one program a row, in float32; reference.py says what is computed."""

import triton
import triton.language as tl


@triton.jit
def _normed(x, w, N: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.arange(0, COLUMNS)
    value = tl.load(x + c, mask=c < N, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, axis=0) / N + EPS)
    return value * root * tl.load(w + c, mask=c < N, other=0.0)


@triton.jit
def rms_norm(x, w, y, N: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr):
    """y [rows, N] = norm of x [rows, N] times w [N]."""
    row, c = tl.program_id(0), tl.arange(0, COLUMNS)
    value = _normed(x + row * N, w, N, EPS, COLUMNS)
    tl.store(y + row * N + c, value.to(y.dtype.element_ty), mask=c < N)


@triton.jit
def add_norm(y, w, x, N: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [rows, N] += norm of y [rows, N] times w [N]."""
    row, c = tl.program_id(0), tl.arange(0, COLUMNS)
    old = tl.load(x + row * N + c, mask=c < N, other=0.0)
    tl.store(x + row * N + c, old + _normed(y + row * N, w, N, EPS, COLUMNS), mask=c < N)
