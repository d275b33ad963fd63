"""Files of `torch.save`, read without torch and without running what they name.

A file is a zip archive of one pickle and the bytes of every storage. The pickle may name the functions and
storage types in `REBUILD` and `STORAGES` and nothing else: any other name is an error before it is imported.
Objects can contain one another so that they have 2^n parts: none is compared, hashed or shown in an error but
short strings.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..config import ModelError, abbreviate, is_integer, require_file
from .stored import StoredTensor, numpy_dtype, require_names

STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "BoolStorage": "BOOL",
}
LARGEST_PICKLE = 8_000_000  # bytes, without the storages
LARGEST_READ = 8_000_000  # bytes at a time of the rest: the list of the storages
LONGEST_NAME = 1000  # characters of a tensor's name, or of a storage's
MOST_AXES = 64  # of a tensor, as in NumPy
MOST_ARGUMENTS = 16  # of a call
DEEPEST = 100  # objects within objects
LOAD_MARK: Any = pickle._Unpickler.dispatch[pickle.MARK[0]]
INSTRUCTIONS = (  # that `torch.save` writes, with any protocol
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL),
    *(pickle.REDUCE, pickle.BUILD, pickle.BINPERSID, pickle.MEMOIZE),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG, pickle.LONG1),
    *(pickle.UNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.DICT, pickle.SETITEM, pickle.SETITEMS),
)
LOCAL_HEADER = 30  # bytes before the name of an entry of a zip archive


class StorageType(NamedTuple):
    """A type of storage that a pickle names."""

    dtype: str


class Storage(NamedTuple):
    """A storage that a pickle refers to."""

    dtype: str
    key: str


class TensorView(NamedTuple):
    """A tensor as a pickle describes it: a part of a storage."""

    storage: Storage
    offset: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]


def rebuild_tensor(storage: Any, offset: Any, lengths: Any, strides: Any, *_: Any) -> TensorView:
    """Stands in for `torch._utils._rebuild_tensor_v2`, with its arguments.

    Args:
        storage: the storage that holds the elements.
        offset: the offset of the first element.
        lengths: the lengths of the axes.
        strides: the strides of the axes, in elements.
        *_: not needed to read.
    """
    axes = all(isinstance(part, tuple) and len(part) <= MOST_AXES for part in (lengths, strides))
    valid = axes and isinstance(storage, Storage) and len(lengths) == len(strides)
    if not valid or not all(is_integer(n) and 0 <= n < 2**62 for n in (offset, *lengths, *strides)):
        raise pickle.UnpicklingError("a tensor must be a part of a storage")
    return TensorView(storage, offset, lengths, strides)


def rebuild_parameter(tensor: Any, *_: Any) -> Any:
    """Stands in for `torch._utils._rebuild_parameter`: returns the tensor itself."""
    return tensor


def ordered_dict() -> OrderedDict[str, Any]:
    """Stands in for `collections.OrderedDict`, whose items follow."""
    return OrderedDict()


REBUILD = {
    ("collections", "OrderedDict"): ordered_dict,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
}


class TensorUnpickler(pickle._Unpickler):
    """Unpickles dicts of tensors in Python, so that a malformed file cannot exhaust the memory."""

    stack: list[Any]
    metastack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return StorageType(STORAGES[name])
        if (module, name) not in REBUILD:
            raise pickle.UnpicklingError(f"it names {abbreviate(f'{module}.{name}')}, which no tensor needs")
        return REBUILD[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        valid = isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[1], StorageType)
        if not valid or not is_name(pid[0]) or pid[0] != "storage" or not is_name(pid[2]):
            raise pickle.UnpicklingError("a storage must be stated by type and key")
        return Storage(pid[1].dtype, pid[2])

    def load_build(self) -> None:
        """Drop the attributes of a dict; nothing else may have any."""
        self.stack.pop()
        if not isinstance(self.stack[-1], OrderedDict):
            raise pickle.UnpicklingError("only a dict may have attributes")

    def load_reduce(self) -> None:
        """Call one of the functions in `REBUILD`."""
        arguments, function = self.stack.pop(), self.stack[-1]
        if not any(function is known for known in REBUILD.values()):
            raise pickle.UnpicklingError("it calls a function that does not build a tensor")
        if not isinstance(arguments, tuple) or len(arguments) > MOST_ARGUMENTS:
            raise pickle.UnpicklingError(f"a call must have at most {MOST_ARGUMENTS} arguments")
        self.stack[-1] = function(*arguments)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values, which take turns, to the dict that is last."""
        target, keys = self.stack[-1], items[::2]
        if not isinstance(target, dict) or not all(map(is_name, keys)):
            raise pickle.UnpicklingError(
                f"the keys of its dicts must be strings of at most {LONGEST_NAME} characters"
            )
        target.update(zip(keys, items[1::2], strict=True))

    def load_bytearray8(self) -> None:
        raise pickle.UnpicklingError("it holds an array of bytes, which no tensor needs")

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it holds an instruction that no tensor needs")

    def load_mark(self) -> None:
        if len(self.metastack) >= DEEPEST:
            raise pickle.UnpicklingError(f"it is nested more than {DEEPEST} deep")
        LOAD_MARK(self)

    for unused in {*range(256)} - {code for (code,) in INSTRUCTIONS}:
        dispatch[unused] = refuse
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.MARK[0]] = load_mark


def is_name(value: object) -> bool:
    """Whether a value is a string short enough to be the name of a tensor or of a storage."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME


class ArchiveFile(io.FileIO):
    """A file of which no reader takes more than `LARGEST_READ` bytes at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > LARGEST_READ:
            raise ValueError(f"the list of its storages must be at most {LARGEST_READ} bytes")
        return super().read(size)


def open_torch_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Raises ModelError for a damaged one, or one that holds more than tensors."""
    require_file(path)
    try:
        with ArchiveFile(path) as file, zipfile.ZipFile(file) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            tensors = read_pickle(archive, entries)
        require_names(path, tensors)
        data = np.memmap(path, np.uint8, "r")
        return {name: tensor_of(view, entries, data, path) for name, view in tensors.items()}
    except ModelError:
        raise
    except Exception as error:  # a damaged pickle raises errors of many types
        text = " ".join(str(error).split())
        raise ModelError(
            f"{path} must be a dict of tensors written by torch.save; it cannot be read ({abbreviate(text)})"
        ) from None


def read_pickle(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> dict[str, TensorView]:
    """The tensors that the pickle of an archive describes, by name."""
    if "data.pkl" not in entries:
        raise ValueError("the archive has no data.pkl")
    if entries["data.pkl"].file_size > LARGEST_PICKLE:
        raise ValueError(f"data.pkl must be at most {LARGEST_PICKLE} bytes")
    if "byteorder" in entries and first_bytes(archive, entries["byteorder"], 8) != b"little":
        raise ValueError("its byte order must be little")
    result = TensorUnpickler(io.BytesIO(first_bytes(archive, entries["data.pkl"], LARGEST_PICKLE))).load()
    if not isinstance(result, dict) or not result:
        raise ValueError("it does not hold a dict")
    for name, value in result.items():
        if not isinstance(value, TensorView):
            raise ValueError(f"{abbreviate(name)} is not a tensor")
    return result


def first_bytes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, count: int) -> bytes:
    """The first bytes of an entry, whatever its size. Raises ValueError for a compression without bounds.

    Args:
        archive: the archive.
        entry: an entry of it.
        count: the number of bytes.
    """
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{abbreviate(entry.filename)} must be stored or deflated")
    with archive.open(entry) as file:
        return file.read(count)


def tensor_of(
    view: TensorView, entries: dict[str, zipfile.ZipInfo], data: np.ndarray, path: Path
) -> StoredTensor:
    """The array of a tensor, memory-mapped.

    Args:
        view: the part of a storage that holds the tensor.
        entries: the entries of the archive, by name.
        data: the bytes of the file.
        path: the path of the file.
    """
    entry = entries[f"data/{view.storage.key}"]
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its storages must not be compressed")
    header = data[entry.header_offset : entry.header_offset + LOCAL_HEADER]
    name_length, extra_length = header[26:30].view(np.dtype("<u2"))
    begin = entry.header_offset + LOCAL_HEADER + int(name_length) + int(extra_length)
    dtype = numpy_dtype(view.storage.dtype)
    storage = data[begin : begin + entry.file_size // dtype.itemsize * dtype.itemsize].view(dtype)
    last = view.offset + sum((n - 1) * stride for n, stride in zip(view.lengths, view.strides, strict=True))
    if 0 not in view.lengths and last >= len(storage):
        raise ValueError("a tensor ends behind its storage")
    if math.prod(view.lengths) > len(storage):
        raise ValueError("a tensor is larger than its storage")
    strides = tuple(stride * dtype.itemsize for stride in view.strides)
    start = storage[0 if 0 in view.lengths else view.offset :]
    array = np.lib.stride_tricks.as_strided(start, view.lengths, strides, writeable=False)
    return StoredTensor(array, view.storage.dtype, path)
