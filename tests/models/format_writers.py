"""Writers of quantised matrices, independent of the readers: plain loops over the published layouts.

Each takes a matrix [out, in] and a stem, and returns the tensors to store and the matrix that they stand for.
"""

import json

import ml_dtypes
import numpy as np

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = [
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
]
CODES = dict(
    float32="F32",
    float16="F16",
    bfloat16="BF16",
    float8_e4m3fn="F8_E4M3",
    float8_e8m0fnu="F8_E8M0",
    int8="I8",
    uint8="U8",
    int32="I32",
    int64="I64",
)


def words(integers, bits):
    """Integers `[n, m]` packed along the last axis, int32 `[n, ⌈m · bits / 32⌉]`."""
    if 32 % bits:
        return words_of_stream(integers, bits)
    count = 32 // bits
    packed = np.zeros((len(integers), -(-integers.shape[1] // count)), np.uint64)
    for column in range(integers.shape[1]):
        packed[:, column // count] |= integers[:, column].astype(np.uint64) << np.uint64(
            bits * (column % count)
        )
    return packed.astype(np.uint32).view(np.int32)


def words_of_stream(integers, bits):
    """The same where integers reach over words: bit j of number i is bit i · bits + j of the row."""
    packed = np.zeros((len(integers), -(-integers.shape[1] * bits // 32)), np.uint64)
    for column in range(integers.shape[1]):
        for bit in range(bits):
            place = column * bits + bit
            value = integers[:, column].astype(np.uint64) >> np.uint64(bit) & np.uint64(1)
            packed[:, place // 32] |= value << np.uint64(place % 32)
    return packed.astype(np.uint32).view(np.int32)


def save(tensors, path):
    """A safetensors file, also of 8-bit floats, which `safetensors.numpy` does not write."""
    header, end = {}, 0
    for name, x in tensors.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": CODES[x.dtype.name], "shape": x.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())


def fp8(stem, w, block=None, scale_name="weight_scale_inv", per_row=False, scale_dtype=np.float32):
    """One scale, one per row, or one per block."""
    height, width = block or ((1, w.shape[1]) if per_row else w.shape)
    grid = np.zeros((-(-w.shape[0] // height), -(-w.shape[1] // width)), np.float32)
    wide = np.zeros_like(w)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            grid[i, j] = np.abs(w[part]).max() / 448
            if scale_dtype != np.float32:
                grid[i, j] = 2.0 ** np.ceil(np.log2(grid[i, j]))
            wide[part] = grid[i, j]
    stored = (w / wide).astype(ml_dtypes.float8_e4m3fn)
    scale = np.asarray(grid if block or per_row else grid[0, 0]).astype(scale_dtype)
    return {f"{stem}.weight": stored, f"{stem}.{scale_name}": scale}, stored.astype(np.float32) * wide


def integers_by_group(w, bits, size, symmetric):
    """Unsigned integers, scales and zero points `[out, groups]`, and the matrix."""
    groups, top = w.shape[1] // size, 2**bits - 1
    by_group = w.reshape(len(w), groups, size)
    low, high = by_group.min(-1), by_group.max(-1)
    if symmetric:
        high = np.abs(by_group).max(-1)
        low = -high
    scale = ((high - low) / top).astype(np.float16).astype(np.float32)
    zero = np.full(low.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scale), 1, top)
    q = np.clip(np.round(by_group / scale[..., None]) + zero[..., None], 0, top)
    dense = (q - zero[..., None]) * scale[..., None]
    return q.reshape(w.shape).astype(int), scale, zero.astype(int), dense.reshape(w.shape)


def gptq(stem, w, bits=4, size=16, symmetric=True, order=None, version=1):
    """`order` permutes the inputs before groups are formed, as desc_act does."""
    order = np.arange(w.shape[1]) if order is None else order
    q, scale, zero, dense = integers_by_group(w[:, order], bits, size, symmetric)
    back = np.argsort(order)
    group = np.arange(w.shape[1]) // size
    tensors = {
        f"{stem}.qweight": (words(q[:, back], bits).T),
        f"{stem}.qzeros": (words((zero - (version == 1)).T, bits)),
        f"{stem}.scales": (scale.T.astype(np.float16)),
        f"{stem}.g_idx": (group[back].astype(np.int32)),
    }
    return tensors, dense[:, back]


def awq(stem, w, size=16):
    q, scale, zero, dense = integers_by_group(w, 4, size, False)

    def pack(values):
        ordered = values.reshape(len(values), -1, 8)[..., AWQ_ORDER].reshape(len(values), -1)
        return words(ordered, 4)

    tensors = {f"{stem}.qweight": pack(q.T), f"{stem}.qzeros": pack(zero.T)}
    return {**tensors, f"{stem}.scales": (scale.T.astype(np.float16))}, dense


def packed_integers(stem, w, bits=4, size=16, symmetric=True, order=None):
    """compressed-tensors, "pack-quantized"."""
    order = np.arange(w.shape[1]) if order is None else order
    q, scale, zero, dense = integers_by_group(w[:, order], bits, size, symmetric)
    back = np.argsort(order)
    tensors = {
        f"{stem}.weight_packed": (words(q[:, back], bits)),
        f"{stem}.weight_scale": (scale),
        f"{stem}.weight_shape": np.array(w.shape),
    }
    if not symmetric:
        tensors[f"{stem}.weight_zero_point"] = words(zero.T, bits).T
    if np.any(order != np.arange(len(order))):
        tensors[f"{stem}.weight_g_idx"] = (np.arange(w.shape[1]) // size)[back].astype(np.int32)
    return tensors, dense[:, back]


def int8_rows(stem, w, symmetric=True):
    """compressed-tensors, "int-quantized" per channel."""
    q, scale, zero, dense = integers_by_group(w, 8, w.shape[1], symmetric)
    tensors = {
        f"{stem}.weight": ((q - 128).astype(np.int8)),
        f"{stem}.weight_scale": (scale),
    }
    if not symmetric:
        tensors[f"{stem}.weight_zero_point"] = (zero - 128).astype(np.int8)
    return tensors, dense


def nearest(values, table):
    return np.abs(values[..., None] - np.array(table)).argmin(-1)


def mx_blocks(w, size=32):
    """Codes of 4-bit floats and exponents of blocks along the last axis, and what they stand for."""
    by_block = w.reshape(*w.shape[:-1], -1, size)
    exponent = np.ceil(np.log2(np.abs(by_block).max(-1) / 6)).astype(int)
    codes = nearest(by_block / 2.0 ** exponent[..., None], FP4)
    dense = np.array(FP4)[codes] * 2.0 ** exponent[..., None]
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return packed, (exponent + 127).astype(np.uint8), dense.reshape(w.shape).astype(np.float32)


def nvfp4(stem, w, size=16):
    """compressed-tensors: scales of groups in FP8, divided by one number for the matrix."""
    by_group = w.reshape(len(w), -1, size)
    largest = np.abs(by_group).max(-1)
    scale_of_all = np.float32(448 * 6 / np.abs(w).max())
    scale = (largest / 6 * scale_of_all).astype(ml_dtypes.float8_e4m3fn)
    wide = scale.astype(np.float32) / scale_of_all
    codes = nearest(by_group / wide[..., None], FP4)
    dense = np.array(FP4, np.float32)[codes] * wide[..., None]
    codes = codes.reshape(w.shape)
    tensors = {
        f"{stem}.weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_global_scale": np.array([scale_of_all]),
    }
    return tensors, dense.reshape(w.shape)


def mxfp4(name, stack):
    """A stack `[experts, in, out]` in blocks along `in`."""
    blocks, scales, dense = mx_blocks(stack.swapaxes(1, 2))
    return {f"{name}_blocks": (blocks), f"{name}_scales": (scales)}, dense.swapaxes(1, 2)


def nf4(stem, w, size=64, nested=True):
    """bitsandbytes with or without a second quantisation of the scales."""
    flat = w.reshape(-1)
    flat = np.pad(flat, (0, -len(flat) % size)).reshape(-1, size)
    absmax = np.abs(flat).max(-1)
    tensors, state = {}, {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": list(w.shape)}
    if nested:
        offset, table = float(absmax.mean()), np.linspace(-1, 1, 256).astype(np.float32)
        centred = np.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
        outer = np.abs(centred).max(-1).astype(np.float32)
        fine = nearest(centred / outer[:, None], table)
        absmax = (table[fine] * outer[:, None]).reshape(-1)[: len(absmax)] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {
            f"{stem}.weight.absmax": (fine.reshape(-1)[: len(absmax)].astype(np.uint8)),
            f"{stem}.weight.nested_absmax": (outer),
            f"{stem}.weight.nested_quant_map": (table),
        }
    else:
        tensors = {f"{stem}.weight.absmax": (absmax.astype(np.float32))}
    codes = nearest(flat / absmax[:, None], NF4)
    dense = (np.array(NF4)[codes] * absmax[:, None]).reshape(-1)[: w.size].reshape(w.shape)
    codes = codes.reshape(-1)[: w.size + w.size % 2].astype(np.uint8)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors |= {
        f"{stem}.weight": ((codes[::2] << 4 | codes[1::2])[:, None]),
        f"{stem}.weight.quant_map": np.array(NF4, np.float32),
        f"{stem}.weight.quant_state.bitsandbytes__nf4": text,
    }
    return tensors, dense


def int8_scb(stem, w):
    """bitsandbytes, 8 bits."""
    row = np.abs(w).max(1)
    q = np.round(w / row[:, None] * 127)
    tensors = {f"{stem}.weight": (q.astype(np.int8)), f"{stem}.SCB": (row)}
    return {**tensors, f"{stem}.weight_format": np.array(0, np.uint8)}, q * row[:, None] / 127
