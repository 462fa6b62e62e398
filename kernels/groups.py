"""Formats that store a group of neighbours in memory as small codes and one scale, and how many bytes that takes. Needs no torch.

A group is ``group`` consecutive elements in memory order; the last one is filled up with zeros. With ``a`` the largest finite magnitude
in it,

    scale = max(a / top rounded up to a bfloat16, 2^-126)          value = code * scale

``top`` is the largest code. Rounded up, the scale clips nothing; it is at most ``a / top * (1 + 2^-7)``. bfloat16 has the exponents of
float32, so neither the largest nor the smallest float needs another scale, and the codes lose at most 1/128 of their resolution, which a
float32 scale would give back for 1.6 % (8 bits, groups of 128) to 6 % (4 bits, groups of 64) more bytes. From 2^-126 on a scale has a
reciprocal that is finite and not denormal.

A group that holds an infinity or a NaN stores its scale negated. In such a group, and only there, the outermost codes are the infinities
and one code more is NaN; finite values use codes up to ``flagged_top``, one step less, and their scale is made of finite values only.

The stored buffer: first the codes of all groups (element order; of two 4-bit codes in a byte the first is in the low half), then the
scales.

Bounds, for a finite ``x`` and what comes back for it in float32 (rounded to a narrower type, that is half a unit in the last place more):

    int8, int4, nearest       |error| <= scale * (1/2 + 2^-16)      the 2^-16 is two roundings of x * (1 / scale), which is at most 127
    int8, int4, stochastic    |error| <= scale * (1 + 2^-9)         the expectation is within scale * 2^-9 (`dyngran.kernels.quantize`)
    fp8_e4m3                  |error| <= max(|x| * 2^-4, scale * 2^-10) * (1 + 2^-16)
    fp8_e5m2                  |error| <= max(|x| * 2^-3, scale * 2^-17) * (1 + 2^-16)

Group-wise absmax scaling after Dettmers et al., 8-bit Optimizers via Block-wise Quantization (ICLR 2022), section 2; e4m3 and e5m2 after
Micikevicius et al., FP8 Formats for Deep Learning (2022), table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 2  # a bfloat16
LEAST_SCALE = 2.0**-126
MIN_GROUP, MAX_GROUP = 16, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Codes of one format. Integers are two's complement, floats are sign, ``exponent_bias``ed exponent and ``mantissa_bits``.

    ``infinity`` and ``negative_infinity`` and ``nan`` are codes, as unsigned numbers, of a group whose scale is negated.
    """

    name: str
    bits: int
    top: float
    flagged_top: float
    infinity: int
    negative_infinity: int
    nan: int
    default_group: int = 128
    mantissa_bits: int = 0
    exponent_bias: int = 0

    @property
    def is_integer(self) -> bool:
        return self.mantissa_bits == 0


INT8 = Format(name="int8", bits=8, top=127, flagged_top=126, infinity=0x7F, negative_infinity=0x81, nan=0x80)
INT4 = Format(name="int4", bits=4, top=7, flagged_top=6, infinity=0x7, negative_infinity=0x9, nan=0x8, default_group=64)
FP8_E4M3 = Format(
    name="fp8_e4m3",
    bits=8,
    top=448,
    flagged_top=416,
    infinity=0x7E,  # 448: the format has no infinity of its own
    negative_infinity=0xFE,
    nan=0x7F,
    mantissa_bits=3,
    exponent_bias=7,
)
FP8_E5M2 = Format(
    name="fp8_e5m2",
    bits=8,
    top=57344,
    flagged_top=57344,
    infinity=0x7C,
    negative_infinity=0xFC,
    nan=0x7F,
    mantissa_bits=2,
    exponent_bias=15,
)
FORMATS = {known.name: known for known in (FP8_E4M3, FP8_E5M2, INT8, INT4)}


def find_format(name: str, group: int) -> Format:
    """The format of that name. Raises ValueError if there is none, or ``group`` is not a power of two from 16 to 1024."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}: one of {', '.join(FORMATS)}")
    if not MIN_GROUP <= group <= MAX_GROUP or group & (group - 1):
        raise ValueError(f"group must be a power of two from {MIN_GROUP} to {MAX_GROUP}, got {group}")
    return FORMATS[name]


def default_group(format: str) -> int:
    """Elements of a group where nobody says otherwise: 128, for int4 64. Raises ValueError if the format is unknown."""
    return find_format(format, MIN_GROUP).default_group


def code_bytes(format: str, num_elements: int, group: int) -> int:
    """Bytes of the codes, with which a stored buffer begins. Raises as `find_format`."""
    return -(-num_elements // group) * (group * find_format(format, group).bits // 8)


def stored_bytes(format: str, num_elements: int, group: int) -> int:
    """Bytes of a stored buffer; the number of elements may be symbolic. Raises as `find_format`."""
    return code_bytes(format, num_elements, group) + -(-num_elements // group) * SCALE_BYTES
