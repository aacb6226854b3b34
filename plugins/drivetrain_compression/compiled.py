"""Codes that a compiler has made for this processor: one pass over memory in place of ten.

With operations of torch an encoding goes over its numbers some ten times; ``blocks.c`` does the
same in one pass. The file is compiled once on a machine, with the user's own compiler, and kept in
the user's cache folder; without a compiler operations of torch go on doing it. Integers and the
numbers that come back are the same bit by bit, so ranks need not agree on it. A line of the log
says which way it is. Tensors of other devices always take operations of torch.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from abc import abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.compression.compressor import Codec
from drivetrain.config.option import option
from drivetrain.errors import in_words
from drivetrain.log import get_logger
from drivetrain.runtime.world import cache_folder

logger = get_logger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("blocks.c", "topk.c"))

COMPILERS = ("cc", "gcc", "clang")

FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",  # a product and a sum are rounded one after the other, as in torch
    "-fno-math-errno",
    "-fno-trapping-math",
)

COMPILES_S = 120.0
"""Seconds that a compiler may take; it needs about two."""

_CAN_WRITE = 0o022
"""The bits of a folder's mode by which others may put files into it."""


class Format(IntEnum):
    """The formats of the sources."""

    INT8 = 0
    INT4 = 1
    ONEBIT = 2
    TOPK = 3


class Then(IntEnum):
    """Use of the numbers of a message, as the sources number it."""

    WRITE = 0
    ADD = 1
    KEEP = 2


class KernelError(Exception):
    """The kernels cannot be used; the message says why."""


class Kernels:
    """The functions of the sources.

    Args:
        path: the library.

    Attributes:
        path: the library.

    Raises:
        KernelError: the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        pointer, numel = ctypes.c_void_p, ctypes.c_int64
        try:
            library = ctypes.CDLL(str(path))
            self._encode, self._decode = library.encode, library.decode
        except (OSError, AttributeError) as error:
            raise KernelError(f"cannot load {path}: {error}; remove it") from error
        self._encode.argtypes = [ctypes.c_int, *[pointer] * 3, numel, numel]
        self._decode.argtypes = [ctypes.c_int, ctypes.c_int, *[pointer] * 3, numel, numel]
        self._encode.restype = self._decode.restype = None

    def encode(
        self, form: Format, values: Tensor, errors: Tensor | None, message: Tensor, figure: int
    ) -> None:
        """Write numbers, plus the errors of each, as a message."""
        addresses = _numbers(values), _numbers(errors), _address(message, torch.uint8)
        self._encode(form, *addresses, values.numel(), figure)

    def decode(
        self,
        form: Format,
        then: Then,
        message: Tensor,
        values: Tensor,
        errors: Tensor | None,
        figure: int,
    ) -> None:
        """Write the numbers of a message, add them, or keep their errors."""
        addresses = _address(message, torch.uint8), _numbers(values), _numbers(errors)
        self._decode(form, then, *addresses, values.numel(), figure)


def _numbers(tensor: Tensor | None) -> int | None:
    return None if tensor is None else _address(tensor, torch.float32)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor; of another kind, the kernels would write beside it."""
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor of {dtype}, found one of {tensor.dtype} with strides "
            f"{tensor.stride()}"
        )
    return tensor.data_ptr()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledOptions:
    """Options of all methods with kernels."""

    compiled: bool = option(
        True, help="whether a compiler of C makes the code for this processor, if there is one"
    )


OptionsT = TypeVar("OptionsT", bound=CompiledOptions)


class Compiled(Codec[OptionsT]):
    """A code of blocks, in operations of torch and, on the CPU, compiled.

    Attributes:
        form: of the kernels.
    """

    form: ClassVar[Format]

    @property
    @abstractmethod
    def figure(self) -> int:
        """The option for kernels: numbers of a block, or numbers of a chunk that are sent."""

    @abstractmethod
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        """Write numbers as bytes, on any device."""

    @abstractmethod
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        """Write the numbers that bytes stand for, on any device."""

    @override
    def get_ready(self, device: torch.device) -> None:
        self._kernels(device)

    @override
    def encode(self, values: Tensor, message: Tensor) -> None:
        self.encode_gradients(values, message)

    @override
    def encode_gradients(
        self,
        values: Tensor,
        message: Tensor,
        *,
        errors: Tensor | None = None,
        draws: torch.Generator | None = None,
    ) -> None:
        if kernels := self._kernels(values.device):
            kernels.encode(self.form, values, errors, message, self.figure)
        else:
            self.encode_by_torch(values if errors is None else values + errors, message)

    @override
    def decode(self, message: Tensor, values: Tensor) -> None:
        if kernels := self._kernels(values.device):
            kernels.decode(self.form, Then.WRITE, message, values, None, self.figure)
        else:
            self.decode_by_torch(message, values)

    @override
    def add(self, message: Tensor, values: Tensor) -> None:
        if kernels := self._kernels(values.device):
            kernels.decode(self.form, Then.ADD, message, values, None, self.figure)
        else:
            super().add(message, values)

    @override
    def keep(self, values: Tensor, message: Tensor, errors: Tensor) -> None:
        if kernels := self._kernels(values.device):
            kernels.decode(self.form, Then.KEEP, message, values, errors, self.figure)
        else:
            super().keep(values, message, errors)

    def _kernels(self, device: torch.device) -> Kernels | None:
        return kernels() if device.type == "cpu" and self.config.compiled else None


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels, compiled if nobody has yet; None, and a line of the log, without them."""
    try:
        found = loaded(_cache_folder() / "kernels")
    except KernelError as error:
        logger.announce(
            "methods for slow links encode with operations of torch, which take more processor "
            f"time than compiled codes: {error}"
        )
        return None
    logger.announce(f"methods for slow links encode with compiled kernels: {found.path}")
    return found


def _cache_folder() -> Path:
    try:
        return cache_folder()
    except RuntimeError as error:  # a user without a name, as in some containers
        raise KernelError(f"{error} Set XDG_CACHE_HOME to a folder of yours") from error


def loaded(folder: Path) -> Kernels:
    """Return the kernels of a folder, which are compiled anew if their file is broken.

    Raises:
        KernelError: they cannot be built, or loaded.
    """
    path = built(folder)
    try:
        return Kernels(path)
    except KernelError:
        path.unlink(missing_ok=True)
        return Kernels(built(folder))


def built(folder: Path) -> Path:
    """Return the library in a folder, compiled if it is not there.

    Its name is made of the source, the options, and all that the compiler knows of itself and of
    this processor: on another processor, or with another compiler, there is another library.
    Processes that compile at once do not wait for each other: each puts the same file in place.

    Raises:
        KernelError: there is no compiler, it fails, or the folder is no place for a library.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelError(f"found none of the C compilers {', '.join(COMPILERS)}; install one")
    known = _run([compiler, *FLAGS, "-E", "-dM", "-x", "c", os.devnull])
    try:
        texts = [each.read_text(encoding="utf-8") for each in SOURCES]
        name = sha256("\0".join([known, *FLAGS, *texts]).encode()).hexdigest()
        path = folder / f"{name}.so"
        for each in (folder.parent, folder):  # who can rename one of them can replace the library
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(each)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                made = Path(draft) / path.name
                _run([compiler, *FLAGS, "-o", str(made), *map(str, SOURCES), "-lm"])
                made.replace(path)
    except OSError as error:
        raise KernelError(f"cannot keep a library in {folder}: {in_words(error)}") from error
    return path


def _check_owner(folder: Path) -> None:
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & _CAN_WRITE:
        raise KernelError(
            f"expected {folder} to be yours and written by you alone, found mode "
            f"{status.st_mode & 0o777:o} and owner {status.st_uid}; remove it"
        )


def _run(command: list[str]) -> str:
    """Return the output of a compiler."""
    try:
        ended = subprocess.run(  # noqa: S603 - the user's own compiler, without a shell
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILES_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"cannot compile with {command[0]}: {in_words(error)}") from error
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise KernelError(f"{command[0]} cannot compile {SOURCES[0].parent}: {said}")
    return ended.stdout
