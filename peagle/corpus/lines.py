"""The decompressed lines of a file, with line numbers and byte positions."""

import contextlib
from collections.abc import Callable, Iterator

from peagle.corpus.files import ForwardReaders, compression_of, decompress, open_raw, read_errors_as_input_error
from peagle.corpus.rows import Span
from peagle.errors import InputError

MAX_LINE_BYTES = 64 << 20
_MAGIC = {b"\x1f\x8b": "gzip (.gz)", b"\x28\xb5\x2f\xfd": "zstd (.zst)", b"PAR1": "Parquet (.parquet)"}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_SKIP_BYTES = 1 << 20


class Lines:
    """The lines of a file, including their newlines."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0  # bytes read from the beginning of the decompressed file
        self.number = 1  # number of the next line, from 1
        self.end: int | None = None  # position to stop at; None for the end of the file
        self.on_line: Callable[[bytes], object] | None = None  # called with each line
        with read_errors_as_input_error(path):
            self._raw = open_raw(path)
            self._stream = decompress(path, self._raw)

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines up to `end`; raises InputError if the file cannot be read, is not text, or has a huge line."""
        with read_errors_as_input_error(self.path):
            while self.end is None or self.position < self.end:
                line = self._stream.readline(MAX_LINE_BYTES)
                if not line:
                    return
                if self.position == 0:
                    _refuse_binary(self.path, line)
                if len(line) == MAX_LINE_BYTES:
                    raise InputError(
                        f"input {self.path} line {self.number}: longer than {MAX_LINE_BYTES >> 20} MiB",
                        hint="each row must end with a newline",
                    )
                self.position += len(line)
                self.number += 1
                if self.on_line is not None:
                    self.on_line(line)
                yield line

    def advance(self, position: int) -> None:
        """Skip to a later position."""
        with read_errors_as_input_error(self.path):
            if compression_of(self.path) is None:
                self._stream.seek(position)
                self.position = position
            while self.position < position:
                skipped = len(self._stream.read(min(_SKIP_BYTES, position - self.position)))
                if not skipped:
                    return  # the file has shrunk; `read_span` reports the missing rows
                self.position += skipped

    def close(self) -> None:
        self._stream.close()
        self._raw.close()


@contextlib.contextmanager
def open_span(span: Span) -> Iterator[Lines]:
    """Open the lines of a span."""
    lines = _readers.take(span.path, span.start) or Lines(span.path)
    try:
        lines.advance(span.start)
        lines.number, lines.end = span.line, span.end
        yield lines
    except BaseException:
        lines.close()
        raise
    if compression_of(span.path) is None:
        lines.close()
    else:
        _readers.put_back(span.path, lines)


_readers: ForwardReaders[Lines] = ForwardReaders()


def carriage_return_error(path: str) -> InputError:
    """Return the error for a file with the line ends of old Macs and some spreadsheets."""
    return InputError(
        f"input {path}: its lines end with only a carriage return (CR)",
        hint="convert it: tr '\\r' '\\n' < OLD > NEW",
    )


def _refuse_binary(path: str, first_line: bytes) -> None:
    for magic, name in _MAGIC.items():
        if first_line.startswith(magic):
            raise InputError(f"input {path}: this is {name}, not text", hint="rename it with the suffix of its format")
    if first_line.startswith(_UTF_16):
        raise InputError(f"input {path}: this is UTF-16", hint="convert it to UTF-8")
    if b"\r" in first_line.rstrip(b"\r\n") and not first_line.endswith(b"\n"):
        raise carriage_return_error(path)
