"""Numbers in fewer bytes: blocks of integers or signs with a scale each, bfloat16, the largest.

``int8``, ``int4``: a block of B numbers x becomes a scale s = max|x| / q and integers round(x / s)
of -q to q, with q = 127 for 8 bits and q = 7 for 4. The error of a number is at most s / 2, or s if
chance rounds::

    | scales, fp32: one per block | integers: one per number, or two in a byte |

Blocks and their all-to-all are those of Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023 (arXiv 2306.10209), sections 3.1 and 3.3. It keeps no
errors; here gradients have error feedback, with which rounding to the nearest needs no chance
(Karimireddy et al., ICML 2019, theorem II: any contraction converges at the rate of SGD). Updates
of parameters have it, too (``drivetrain.compression.compressor``); that training goes on as well
with rounded values of parameters is what experiments of the ZeRO++ paper found.

With ``rounding: stochastic`` a gradient is rounded up with a chance of the share of s that is above
the lower integer: then its mean is the gradient, and SGD converges without any error that is kept
(Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017, section 3). With feedback, chance must still be a contraction. The mean square of the
error of a number x is at most x^2 + s^2 / 8, as for |x| = s / 4, and the largest number of a block,
q s, has no error. So all B errors together are smaller than the block as long as B - 1 < 8 q^2: for
all blocks of 8 bits, and for 4 bits up to B = 392. For larger ones there is no proof.

``bf16``: numbers rounded to bfloat16, half the bytes, and the range of fp32. The rounding is that
of Micikevicius et al., "Mixed Precision Training", ICLR 2018, and Kalamkar et al., "A Study of
BFLOAT16 for Deep Learning Training", 2019 (arXiv 1905.12322). A ring that adds in bfloat16 rounds
at every hop; here a number is rounded once on its way to the sum, which is fp32, and once on its
way back.

``onebit``: a block of B numbers x becomes a scale a = mean |x| and the signs of the numbers, zero
counting as positive; each number comes back as a or -a::

    | scales, fp32: one per block | signs: eight in a byte |

Of all scales this one has the least error: |x|^2 - (sum |x|)^2 / B for the whole block, so sending
a block is always better than sending nothing. Only with error feedback do signs converge at the
rate of SGD: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019, algorithm 1 and theorem II; summed in two phases as Tang et al.,
"DoubleSqueeze", ICML 2019. 1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888) sends momenta by
such a code. A strategy decides whether gradients or momenta cross.

``topk``: of a chunk of 4,096 numbers the 64 of largest size are sent. Each chunk has a codebook of
4 values: the numbers that are sent fall into 4 bins over three standard deviations to both sides of
zero, and the codebook holds the mean of each bin::

    | codebooks, 4 x fp32 per chunk | places, 12 bits each | bins, 2 bits each |

So 64 numbers take 128 bytes where fp32 takes 16,384: 128 times fewer. A codebook of its own lets a
chunk of small numbers keep its values beside a chunk of large numbers. The code is that of Sarfi et
al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv 2508.15706); there it
carries pseudo-gradients of many local steps. Here it carries the gradients of each step, with error
feedback: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018. No bin reaches over
zero, so that a code never has a larger error than sending nothing, as their analysis needs.

With operations of torch an encoding goes over its numbers some ten times; ``blocks.c`` and
``topk.c`` do the same in one pass. Each is compiled once on a machine, with the user's own
compiler, and kept in the user's cache folder; without a compiler operations of torch go on doing
it. Integers and the numbers that come back are the same bit by bit, so ranks need not agree on it.
A line of the log says which way it is. Tensors of other devices always take operations of torch.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives.volume import ParameterSpan
from drivetrain.compression.compressor import Codec, Fidelity, NoMethodOptions
from drivetrain.config.schema import option
from drivetrain.errors import ConfigError, in_words
from drivetrain.log import get_logger
from drivetrain.runtime.world import cache_folder

# --- codes that a compiler has made for this processor ---

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


# --- blocks of integers with a scale each ---

_SCALE_BYTES = 4

_GROUP_BLOCKS = 8
"""Blocks of any length whose integers, or eight signs each, fill bytes."""

_WORD_BITS = 32
"""Bits of the 4 bytes that a group fills."""

_UPPER = 16
"""Two 4-bit integers of -7 to 7 are a sum of one byte: the first, and 16 times the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleOptions(CompiledOptions):
    """Options of all blocks with a scale each, and all those of ``onebit``."""

    block: int = option(
        256, help="numbers that share a scale; fewer are more exact", minimum=16, maximum=65536
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions(ScaleOptions):
    """Options of ``int8`` and ``int4``."""

    rounding: Literal["nearest", "stochastic"] = option(
        "nearest",
        help="how gradients are rounded: to the nearest integer, or by chance to one of both "
        "neighbors, so that the mean is right",
    )
    feedback: bool = option(
        True,
        help="whether errors of gradients are kept for the next step; false only with rounding: "
        "stochastic",
    )

    def __post_init__(self) -> None:
        if not self.feedback and self.rounding == "nearest":
            raise ConfigError(
                "expected links.far.options.feedback: true with rounding: nearest, found false: "
                "errors that nobody keeps would push all steps the same way; take rounding: "
                "stochastic, or leave feedback out"
            )


ScaleOptionsT = TypeVar("ScaleOptionsT", bound=ScaleOptions)


class Scaled(Compiled[ScaleOptionsT]):
    """Blocks of numbers of few bits, with a scale each.

    Attributes:
        bits: of a number.
    """

    bits: ClassVar[int]

    @override
    def nbytes(self, numel: int) -> int:
        return self._scale_bytes(numel) - (-numel * self.bits // 8)

    @property
    @override
    def group(self) -> int:
        return max(_GROUP_BLOCKS, _WORD_BITS // self.bits) * self.config.block

    @property
    @override
    def figure(self) -> int:
        return self.config.block

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.config.block) * _SCALE_BYTES

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the bytes of the numbers."""
        edge = self._scale_bytes(numel)
        return message[:edge].view(torch.float32), message[edge:]

    def _in_rows(
        self, values: Tensor, scales: Tensor, others: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield all whole blocks, each a row, and then the last block if that is shorter."""
        block = self.config.block
        whole = values.numel() // block
        edge = whole * block
        if whole:
            yield values[:edge].view(-1, block), scales[:whole], others[:edge].view(-1, block)
        if edge < values.numel():
            yield values[None, edge:], scales[whole:], others[None, edge:]


class Blocks(Scaled[BlockOptions]):
    """Blocks of numbers with a scale each; a subclass says how integers become bytes.

    Attributes:
        steps: the largest integer.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.THEORY
    Config: ClassVar[type] = BlockOptions
    steps: ClassVar[int]

    def __init__(self, config: BlockOptions) -> None:
        super().__init__(config)
        self.keeps_feedback = config.feedback
        self.draws = config.rounding == "stochastic"

    @override
    def fidelity_of(self, use: str) -> Fidelity:
        if use == "parameters":
            return Fidelity.EMPIRICAL
        fed_back = use == "gradients" and self.draws and self.keeps_feedback
        proved = not fed_back or self.config.block <= 8 * self.steps**2
        return self.fidelity if proved else Fidelity.EMPIRICAL

    @override
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        scaled, place = self._scaled(values, message)
        # A scale of few denormal steps is rounded much: quotients may be above all integers.
        self.write(scaled.round_().clamp_(-self.steps, self.steps), place)

    @override
    def encode_gradients(
        self,
        values: Tensor,
        message: Tensor,
        *,
        errors: Tensor | None = None,
        draws: torch.Generator | None = None,
    ) -> None:
        if draws is None or not self.draws:
            super().encode_gradients(values, message, errors=errors)
            return
        scaled, place = self._scaled(values if errors is None else values + errors, message)
        lower = scaled.floor()
        share = scaled.sub_(lower)  # exact, so that no draw rounds up too often
        drawn = torch.rand(scaled.shape, generator=draws, device=scaled.device)
        # The largest number of a block is an integer but for a rounding of its division.
        lower.add_(drawn < share).clamp_(-self.steps, self.steps)
        self.write(lower, place)

    def _scaled(self, values: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
        """Write the scales; return the scaled numbers, and the bytes for their integers."""
        scales, place = self._parts(message, values.numel())
        scaled = torch.empty_like(values)
        for numbers, units, quotients in self._in_rows(values, scales, scaled):
            # Unlike a norm, an absolute value and a maximum are vectorized on the CPU.
            torch.abs(numbers, out=quotients)
            torch.amax(quotients, dim=1, out=units).div_(self.steps)
            # A block of zeros has the scale 0: any other divisor gives its zeros back.
            divisors = units.masked_fill(units == 0, 1.0).unsqueeze(1)
            torch.div(numbers, divisors, out=quotients)
        return scaled, place

    @override
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        self.read(place, values)
        for numbers, units, _ in self._in_rows(values, scales, values):
            numbers.mul_(units.unsqueeze(1))

    @abstractmethod
    def write(self, integers: Tensor, place: Tensor) -> None:
        """Write integers, fp32, as bytes, uint8; the integers may be changed."""

    @abstractmethod
    def read(self, place: Tensor, integers: Tensor) -> None:
        """Write the integers, fp32, that bytes stand for."""


class Int8(Blocks):
    """Integers of 8 bits."""

    summary: ClassVar[str] = "blocks of 8-bit integers with a scale: a quarter of the bytes of fp32"
    bits: ClassVar[int] = 8
    steps: ClassVar[int] = 127
    form: ClassVar[Format] = Format.INT8

    @override
    def write(self, integers: Tensor, place: Tensor) -> None:
        place.view(torch.int8).copy_(integers)

    @override
    def read(self, place: Tensor, integers: Tensor) -> None:
        integers.copy_(place.view(torch.int8))


class Int4(Blocks):
    """Integers of 4 bits, two in a byte: one of each half of the numbers."""

    summary: ClassVar[str] = "blocks of 4-bit integers with a scale: an eighth of the bytes of fp32"
    parameters: ClassVar[bool] = False  # nobody has shown training with such values
    bits: ClassVar[int] = 4
    steps: ClassVar[int] = 7
    form: ClassVar[Format] = Format.INT4

    @override
    def write(self, integers: Tensor, place: Tensor) -> None:
        lower, upper = integers.tensor_split([place.numel()])
        lower[: upper.numel()].add_(upper, alpha=_UPPER)
        place.view(torch.int8).copy_(lower)

    @override
    def read(self, place: Tensor, integers: Tensor) -> None:
        lower, upper = integers.tensor_split([place.numel()])
        bytes_ = place.view(torch.int8)
        lower.copy_(bytes_)
        # Lower ones are between -8 and 8, so the nearest multiple of 16 is the upper one's.
        upper.copy_(bytes_[: upper.numel()].add(_UPPER // 2).bitwise_right_shift_(4))
        lower[: upper.numel()].sub_(upper, alpha=_UPPER)


# --- numbers rounded to bfloat16 ---

_BYTES = 2


class Bf16(Codec[NoMethodOptions]):
    """Numbers in bfloat16."""

    summary: ClassVar[str] = "each number rounded to bfloat16: half the bytes of fp32"
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING
    group = 2

    @override
    def encodes(self, span: ParameterSpan, dtype: torch.dtype) -> bool:
        return dtype.itemsize > _BYTES and super().encodes(span, dtype)

    @override
    def nbytes(self, numel: int) -> int:
        return _BYTES * numel

    @override
    def encode(self, values: Tensor, message: Tensor) -> None:
        message.view(torch.bfloat16).copy_(values)

    @override
    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message.view(torch.bfloat16))


_BITS = 8

_SIGNS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(1),
    np.float32(-1),
)
"""The signs that each byte stands for, (256, 8)."""


class OneBit(Scaled[ScaleOptions]):
    """Signs with a scale for each block."""

    summary: ClassVar[str] = "the sign of each number, a scale per block: a 28th of the bytes"
    fidelity: ClassVar[Fidelity] = Fidelity.THEORY
    parameters: ClassVar[bool] = False  # of values, little but the sign would be left
    keeps_feedback = True
    Config: ClassVar[type] = ScaleOptions
    bits: ClassVar[int] = 1
    form: ClassVar[Format] = Format.ONEBIT

    @override
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        for rows, means, _ in self._in_rows(values, scales, values):
            torch.mean(rows.abs(), 1, out=means)
        _pack_signs(values, place)

    @override
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        scales, place = self._parts(message, values.numel())
        _unpack_signs(place, values)
        for rows, means, _ in self._in_rows(values, scales, values):
            rows.mul_(means.unsqueeze(1))


def _pack_signs(numbers: Tensor, place: Tensor) -> None:
    """Set the bits of numbers that are not negative, the first one the lowest of the first byte."""
    if numbers.device.type == "cpu":  # numpy compares and packs several times as fast as torch
        signs = np.greater_equal(numbers.numpy(), 0)
        place.copy_(torch.from_numpy(np.packbits(signs, bitorder="little")))
        return
    filled = torch.zeros(place.numel() * _BITS, dtype=torch.uint8, device=numbers.device)
    filled[: numbers.numel()] = numbers >= 0
    weights = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=numbers.device)
    torch.sum(filled.view(-1, _BITS) * weights, 1, dtype=torch.uint8, out=place)


def _unpack_signs(place: Tensor, values: Tensor) -> None:
    """Write the signs that bytes stand for as numbers of 1 and -1."""
    if place.device.type == "cpu":
        whole = values.numel() // _BITS
        edge = whole * _BITS
        # Without a check of indices, numpy writes into the tensor itself.
        np.take(_SIGNS, place[:whole].numpy(), 0, values[:edge].view(whole, _BITS).numpy(), "clip")
        last = torch.from_numpy(_SIGNS[place[whole:].numpy()])
        values[edge:] = last.view(-1)[: values.numel() - edge]
        return
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=place.device)
    bits = place[:, None].bitwise_right_shift(shifts).bitwise_and_(1)
    values.copy_(bits.view(-1)[: values.numel()]).mul_(2).sub_(1)


CHUNK = 4096
"""Numbers of a chunk: a place in it has 12 bits."""

_BINS, _DEVIATIONS = 4, 3.0
_BOOK_BYTES = 4 * _BINS


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKOptions(CompiledOptions):
    """Options of ``topk``."""

    keep: int = option(
        64, help="numbers of each 4,096 that are sent; a multiple of 4", minimum=4, maximum=1024
    )

    def __post_init__(self) -> None:
        if self.keep % 4:
            raise ConfigError(
                f"expected links.far.options.keep to be a multiple of 4, found {self.keep}; four "
                "bins fill a byte"
            )


class TopK(Compiled[TopKOptions]):
    """The largest numbers of each chunk."""

    summary: ClassVar[str] = (
        "the 64 largest of each 4,096 numbers, with 2-bit values: 1/128 of the bytes"
    )
    fidelity: ClassVar[Fidelity] = Fidelity.THEORY
    parameters: ClassVar[bool] = False  # of values, almost all would be zeros
    sparse: ClassVar[bool] = True
    keeps_feedback = True
    group = 4 * CHUNK  # a chunk may have an odd number of bytes
    Config: ClassVar[type] = TopKOptions
    form: ClassVar[Format] = Format.TOPK

    @override
    def nbytes(self, numel: int) -> int:
        each = _BOOK_BYTES + self.config.keep * 3 // 2 + self.config.keep // 4
        return self._chunks(numel) * each

    @property
    @override
    def figure(self) -> int:
        return self.config.keep

    @override
    def encode_by_torch(self, values: Tensor, message: Tensor) -> None:
        books, place_bytes, bin_bytes = self._parts(message, values.numel())
        places = torch.empty(len(books), self.config.keep, dtype=torch.int64, device=values.device)
        numbers = values.new_empty(places.shape)
        for chunks, found, taken in _in_pieces(values, places, numbers):
            found.copy_(self._largest(chunks.abs()))
            torch.gather(chunks, 1, found, out=taken)
        bins = _write_books(numbers, books)
        _write_places(places.view(-1), place_bytes)
        _write_bins(bins.view(-1), bin_bytes)

    @override
    def decode_by_torch(self, message: Tensor, values: Tensor) -> None:
        books, place_bytes, bin_bytes = self._parts(message, values.numel())
        numbers = books.gather(1, _read_bins(bin_bytes).view(-1, self.config.keep))
        places = _read_places(place_bytes).view(-1, self.config.keep)
        for chunks, found, taken in _in_pieces(values, places, numbers):
            chunks.zero_().scatter_(1, found, taken)

    def _largest(self, sizes: Tensor) -> Tensor:
        """Return the places of the largest numbers of each chunk.

        A chunk is a table of some rows; only the columns with the largest maxima are searched. As
        many columns as numbers are sent are enough: if a number of another column were among the
        largest, the maxima of all these columns would be as large.

        Args:
            sizes: absolute values, (chunks, 4,096).

        Returns:
            int64, (chunks, keep), in the order of places: so equal numbers make equal messages on
            every machine.
        """
        keep = self.config.keep
        height = 2 ** (((CHUNK // keep).bit_length() - 1) // 2)  # so both searches are alike long
        width = CHUNK // height
        maxima = sizes.view(-1, height, width).amax(1)
        columns = maxima.topk(keep, dim=1, sorted=False).indices
        starts = torch.arange(0, CHUNK, width, device=sizes.device)
        searched = (starts[:, None] + columns[:, None, :]).flatten(1)
        largest = sizes.gather(1, searched).topk(keep, dim=1, sorted=False).indices
        return searched.gather(1, largest).sort(dim=1).values

    def _chunks(self, numel: int) -> int:
        return -(-numel // CHUNK)

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return codebooks (chunks, 4), the bytes of places and the bytes of bins."""
        chunks = self._chunks(numel)
        first, second = chunks * _BOOK_BYTES, chunks * self.config.keep * 3 // 2
        books, places, bins = message.split_with_sizes(
            [first, second, message.numel() - first - second]
        )
        return books.view(torch.float32).view(chunks, _BINS), places, bins


def _in_pieces(
    values: Tensor, places: Tensor, numbers: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield all whole chunks, and then a shorter last chunk.

    Args:
        values: 1-D.
        places: of the numbers that are sent, (chunks, keep).
        numbers: those that are sent, (chunks, keep).

    Yields:
        Chunks, a view of (some, 4,096), and the rows of places and numbers that belong to them. For
        the shorter chunk: a copy with zeros behind, of which changes go to the values afterwards.
    """
    whole = values.numel() // CHUNK
    rows, last = values[: whole * CHUNK].view(-1, CHUNK), values[whole * CHUNK :]
    if whole:
        yield rows, places[:whole], numbers[:whole]
    if last.numel():
        padded = values.new_zeros(1, CHUNK)
        padded[0, : last.numel()] = last
        yield padded, places[whole:], numbers[whole:]
        last.copy_(padded[0, : last.numel()])


def _write_books(numbers: Tensor, books: Tensor) -> Tensor:
    """Write the mean of each bin of each chunk; return the bin of each number.

    Args:
        numbers: those that are sent, (chunks, keep).
        books: (chunks, 4).
    """
    doubles = numbers.double()  # squares of large numbers of fp32 are finite, too
    widths = doubles.square().mean(1, keepdim=True).sqrt_().mul_(2 * _DEVIATIONS / _BINS)
    scaled = torch.nan_to_num(doubles / widths) + _BINS / 2
    bins = scaled.floor_().clamp_(0, _BINS - 1).to(torch.int64)
    # Of NaN and infinity, sums are such; double precision makes their order harmless.
    sums = doubles.new_zeros(books.shape).scatter_add_(1, bins, doubles)
    counts = doubles.new_zeros(books.shape).scatter_add_(1, bins, torch.ones_like(doubles))
    books.copy_(sums / counts.clamp_(min=1))
    return bins


def _write_places(places: Tensor, message: Tensor) -> None:
    """Write two places of 12 bits in three bytes."""
    first, second = places.view(-1, 2).unbind(1)
    three = message.view(-1, 3)
    three[:, 0] = first & 255
    three[:, 1] = (first >> 8) | ((second & 15) << 4)
    three[:, 2] = second >> 4


def _read_places(message: Tensor) -> Tensor:
    low, middle, high = message.view(-1, 3).to(torch.int64).unbind(1)
    return torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1).view(-1)


def _write_bins(bins: Tensor, message: Tensor) -> None:
    """Write four bins of 2 bits in a byte."""
    one, two, three, four = bins.view(-1, 4).unbind(1)
    message.copy_(one | (two << 2) | (three << 4) | (four << 6))


def _read_bins(message: Tensor) -> Tensor:
    wide = message.to(torch.int64)
    return torch.stack([(wide >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1)
