"""Pages out of and into the KV pools with their XXH3 in the same pass: the words that are written are those hashed.

XXH3 of 64 bits after its specification (xxHash 0.8, inputs above 240 bytes): eight sums take 64-byte stripes, keys
slide by 8 bytes a stripe, every 16 stripes the sums are scrambled. A stripe is loaded once, goes to its place and into
the sums from the same register: bytes that change in the source meanwhile cannot be hashed and copied differently.

Shapes: G = pages moved, Y = bytes of one page over all lanes, P = pages of the pool, W = bytes of one page in one lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_hashed
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.llvm import I32, I64, load, shifted, store
from serinus.kernels.cpu.scalar import at, carray, cgutils, fetch_add, intrinsic, ir
from serinus.kernels.ref import hashed_pages as reference

_Arguments = fields("ticket lanes pages rows row_stride lane_count page_count inward store keys sums row_bytes")
_FIELDS = 12
_SERIAL_BYTES = 1 << 17
"""Below this many bytes the start of a second thread costs more than it saves."""
_STREAM_BYTES = 1 << 20
"""From so many bytes on, what is aligned is written past the caches: by the time it is read it would have left them,
and a line that is not there needs not be read to be written."""
_SHORTEST = 241
"""XXH3 treats shorter inputs in other ways; so does the reference."""
_HASH, _STORE, _STREAM = 0, 1, 2
"""What becomes of the words beside their hash: nothing, they are written, they are written past the caches."""

_STRIPE, _BLOCK, _SECRET_BYTES, _LAST_KEY, _MERGE_KEY = 64, 16, 192, 121, 11
_SECRET: Final = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype=np.uint8,
)
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5, _AVALANCHE = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0x165667919E3779F9
_BEGIN: Final = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], dtype=np.uint64)

_I128 = ir.IntType(128)
_SUMS = ir.VectorType(I64, 8)


def hashed_pages(
    lanes: Sequence[Tensor], pages_G: NDArray[np.int64], rows_GY: NDArray[np.uint8] | None, seed: int,
    inward: bool = False,
) -> NDArray[np.uint64]:  # fmt: skip
    """Move pages and hash them; see the reference."""
    table_L3 = np.array([(lane.data_ptr(), lane.stride(0), lane.shape[1]) for lane in lanes], dtype=np.int64)
    width, count = check_hashed(lanes, pages_G, rows_GY), len(pages_G)
    if width < _SHORTEST or (table_L3[:, 2] % _STRIPE).any() or not pages_G.flags.c_contiguous:
        return reference.hashed_pages(lanes, pages_G, rows_GY, seed, inward)
    sums_G8 = np.empty((count, 8), dtype=np.uint64)
    sums_G8[:] = _BEGIN
    keys, rows, row_stride, store = _keys(seed), 0, 0, _HASH
    if rows_GY is not None:
        rows, row_stride = _address(rows_GY), rows_GY.strides[0]
        is_aligned = not (table_L3 % _STRIPE).any() if inward else not (rows | row_stride) % _STRIPE
        store = _STREAM if is_aligned and count * width >= _STREAM_BYTES else _STORE
    arguments = _Arguments(
        0, _address(table_L3), _address(pages_G), rows, row_stride, len(table_L3), count, inward, store,
        _address(keys), _address(sums_G8), width,
    )  # fmt: skip
    _body(VERSION)(arguments, 1 if count * width < _SERIAL_BYTES else thread_count())
    return sums_G8[:, 0]


def warm() -> None:
    """Compile, or load from the disk."""
    _body(VERSION)


def _address(array: NDArray[Any]) -> int:
    """Of its first byte; array.ctypes takes ten times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


def _keys(seed: int) -> NDArray[np.uint64]:
    """XXH3's secret for a seed."""
    words = _SECRET.view(np.uint64).copy()
    words[0::2] += np.uint64(seed)
    words[1::2] -= np.uint64(seed)
    return words


@cache
def _body(version: int) -> Body:
    def move_hashed(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        lane_count, count, inward, storing, keys = a[5], a[6], a[7], a[8], a[9]
        lanes = carray(at(a[1]), lane_count * 3, np.int64)
        pages = carray(at(a[2]), count, np.int64)
        while True:
            g = fetch_add(a.ctypes.data, 1)
            if g >= count:
                break
            sums, row, stripe = a[10] + g * _STRIPE, a[3] + g * a[4], 0
            for i in range(lane_count):
                source = lanes[3 * i] + pages[g] * lanes[3 * i + 1]
                left = lanes[3 * i + 2] // _STRIPE
                target = row
                row += left * _STRIPE
                if inward:
                    source, target = target, source
                if i == lane_count - 1:
                    left -= 1  # the last stripe has a key of its own
                while left > 0:
                    some = min(left, _BLOCK - stripe)
                    key = keys + 8 * stripe
                    if storing == _HASH:
                        absorb(sums, key, target, source, some, 0)
                    elif storing == _STREAM:
                        absorb(sums, key, target, source, some, 2)
                    else:
                        absorb(sums, key, target, source, some, 1)
                    source, target = source + some * _STRIPE, target + some * _STRIPE
                    left, stripe = left - some, stripe + some
                    if stripe == _BLOCK:
                        scramble(sums, keys + _SECRET_BYTES - _STRIPE)
                        stripe = 0
                if i == lane_count - 1:
                    if storing == _HASH:
                        absorb(sums, keys + _LAST_KEY, target, source, 1, 0)
                    else:
                        absorb(sums, keys + _LAST_KEY, target, source, 1, 1)
            merge(sums, keys + _MERGE_KEY, a[11])
        publish()

    return compile_body(move_hashed)


def _all(number: int) -> Any:
    return ir.Constant(_SUMS, [number] * 8)


@intrinsic()
def absorb(builder: Any, sums: Any, key: Any, target: Any, source: Any, count: Any, STORE: int) -> None:
    """Add `count` stripes to the sums at an address; the first has the key at `key`, each next one 8 bytes on.

    STORE: 0 hashes only, 1 also writes the stripes to `target`, 2 does so past the caches (64-byte aligned).
    """
    writes, past = STORE > 0, STORE == 2
    total = cgutils.alloca_once(builder, _SUMS)
    builder.store(load(builder, sums, _SUMS, 8), total)
    swap = ir.Constant(ir.VectorType(I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
    with cgutils.for_range(builder, count, intp=I64) as loop:
        here = builder.mul(loop.index, I64(_STRIPE))
        words = load(builder, builder.add(source, here), _SUMS, 1)
        if writes:
            written = store(builder, words, builder.add(target, here), _STRIPE if past else 1)
            if past:
                written.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        mixed = builder.xor(words, load(builder, builder.add(key, builder.mul(loop.index, I64(8))), _SUMS, 1))
        product = builder.mul(builder.and_(mixed, _all(0xFFFFFFFF)), builder.lshr(mixed, _all(32)))
        step = builder.add(product, builder.shuffle_vector(words, words, swap))
        builder.store(builder.add(builder.load(total), step), total)
    store(builder, builder.load(total), sums, 8)


@intrinsic()
def scramble(builder: Any, sums: Any, key: Any) -> None:
    """Scramble the sums at an address, with the key at another, as XXH3 does after each block of 16 stripes."""
    found = load(builder, sums, _SUMS, 8)
    mixed = builder.xor(builder.xor(found, builder.lshr(found, _all(47))), load(builder, key, _SUMS, 1))
    store(builder, builder.mul(mixed, _all(_P32_1)), sums, 8)


@intrinsic()
def merge(builder: Any, sums: Any, key: Any, byte_count: Any) -> None:
    """The eight sums become the hash, which takes the place of the first."""

    def word(address: Any, index: int) -> Any:
        return load(builder, shifted(builder, address, 8 * index), I64, 1)

    result = builder.mul(byte_count, I64(_P64_1))
    for i in range(0, 8, 2):
        pair = [builder.zext(builder.xor(word(sums, i + k), word(key, i + k)), _I128) for k in (0, 1)]
        wide = builder.mul(*pair)
        high = builder.trunc(builder.lshr(wide, _I128(64)), I64)
        result = builder.add(result, builder.xor(builder.trunc(wide, I64), high))
    result = builder.xor(result, builder.lshr(result, I64(37)))
    result = builder.mul(result, I64(_AVALANCHE))
    result = builder.xor(result, builder.lshr(result, I64(32)))
    store(builder, result, sums, 8)


@intrinsic()
def publish(builder: Any) -> None:
    """What was written past the caches is seen by other threads before whatever this one writes next."""
    builder.fence("seq_cst")
