"""What the kernels for few and for many rows share: packed weights to float16, and what is done with a product."""

import triton
import triton.language as tl

ASM = tl.constexpr(
    not triton.knobs.runtime.interpret
)  # the interpreter knows no assembly: same arithmetic, spelled out
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def pairs4(word, zero):
    """The four pairs of a word of 4-bit weights, less the zero: int32 -> 4 tensors float16 [..., 2], exact."""
    if ASM:
        # 0x6400 is 1024 in float16, whose low bits count ones: OR-ing a nibble in adds it; four bits up it adds 16
        # times itself, which 1/16 (0x2c00) undoes: (1024 + 16 q) / 16 + (960 - 1024 - zero). All of it is exact.
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 high, sixteenth, bias;
            mov.b32 sixteenth, 0x2c002c00;
            mov.b32 bias, 0x63806380;
            sub.rn.f16x2 bias, bias, $5;
            shr.u32 high, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xEA;
            lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xEA;
            lop3.b32 $2, high, 0x000f000f, 0x64006400, 0xEA;
            lop3.b32 $3, high, 0x00f000f0, 0x64006400, 0xEA;
            sub.rn.f16x2 $0, $0, $5;
            fma.rn.f16x2 $1, $1, sixteenth, bias;
            sub.rn.f16x2 $2, $2, $5;
            fma.rn.f16x2 $3, $3, sixteenth, bias;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [word, (zero | 0x6400) * 0x10001],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return _halves(a), _halves(b), _halves(c), _halves(d)
    else:
        return _pair(word, zero, 0, 15), _pair(word, zero, 4, 15), _pair(word, zero, 8, 15), _pair(word, zero, 12, 15)


@triton.jit
def pairs8(word, zero):
    """The two pairs of a word of 8-bit weights, less the zero: int32 -> 2 tensors float16 [..., 2], exact."""
    if ASM:
        a, b = tl.inline_asm_elementwise(
            """{
            .reg .b32 high;
            shr.u32 high, $2, 8;
            lop3.b32 $0, $2, 0x00ff00ff, 0x64006400, 0xEA;
            lop3.b32 $1, high, 0x00ff00ff, 0x64006400, 0xEA;
            sub.rn.f16x2 $0, $0, $3;
            sub.rn.f16x2 $1, $1, $3;
            }""",
            "=&r,=&r,r,r",
            [word, (zero | 0x6400) * 0x10001],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return _halves(a), _halves(b)
    else:
        return _pair(word, zero, 0, 255), _pair(word, zero, 8, 255)


@triton.jit
def _halves(word):
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _pair(word, zero, SHIFT: tl.constexpr, MASK: tl.constexpr):
    low = ((word >> SHIFT) & MASK) - zero
    high = ((word >> (SHIFT + 16)) & MASK) - zero
    return tl.join(low.to(tl.float16), high.to(tl.float16))


@triton.jit
def unpack(words, zero, valid, SHAPE: tl.constexpr, BITS: tl.constexpr):
    """A chunk's words at `words` [..., 128] -> float16 [*SHAPE = (..., 8 row8, 4 quad, 4 rows of 8), 2, 2, 2]: the last
    three axes are bits 0, 2 and 1 of k in the quad's 8."""
    word = tl.reshape(tl.load(words, mask=valid, other=0), SHAPE)
    if BITS == 4:
        p0, p1, p2, p3 = pairs4(word, zero)
    else:
        p0, p1 = pairs8(word, zero)
        p2, p3 = pairs8(tl.reshape(tl.load(words + 128, mask=valid, other=0), SHAPE), zero)
    return tl.join(tl.join(p0, p2), tl.join(p1, p3))


@triton.jit
def finite16(y):
    """To float16, clamped to its finite range (NaN stays)."""
    y = tl.where(y > FP16_MAX, FP16_MAX, y)
    return tl.where(y < -FP16_MAX, -FP16_MAX, y).to(tl.float16)


@triton.jit
def activate(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or with gelu's tanh form. tanh(z) = 2 sigmoid(2 z) - 1, so gelu is gate * sigmoid(2 z)."""
    if GELU:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        return gate * tl.sigmoid(gate) * up
