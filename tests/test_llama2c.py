"""llama2.c's files: read, refused, written."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hostile import damaged, refused_at_most, some
from hypothesis import given
from hypothesis import strategies as st
from truths import published

from xformer.pretrained import llama2c
from xformer.pretrained.llama2c import Header
from xformer.pretrained.reading import PretrainedError

TIED = Header(8, 11, 3, 4, 2, 13, 5, tied=True)
UNTIED = TIED._replace(tied=False)


def arrays(header: Header) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = llama2c.shapes(header)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("header", [TIED, UNTIED])
def test_a_checkpoint_comes_back(tmp_path: Path, header: Header) -> None:
    llama2c.write(tmp_path / "a.bin", header, arrays(header))
    found, tensors = llama2c.read(tmp_path / "a.bin")
    assert found == header
    assert list(tensors) == list(llama2c.shapes(header))
    for name, array in arrays(header).items():
        read = tensors[name].read("float32")
        np.testing.assert_array_equal(read, array)
        assert not read.flags.writeable


def test_the_layout_of_the_file(tmp_path: Path) -> None:
    """Seven sizes, then each kind of tensor for all layers; another sign where the head is free."""
    for header, vocab in ((TIED, 13), (UNTIED, -13)):
        llama2c.write(tmp_path / "a.bin", header, arrays(header))
        data = (tmp_path / "a.bin").read_bytes()
        assert struct.unpack("<7i", data[:28]) == (8, 11, 3, 4, 2, vocab, 5)
        floats = np.frombuffer(data, "<f4", offset=28)
        np.testing.assert_array_equal(floats[: 13 * 8], arrays(header)["token_embedding"].ravel())
        sizes = 13 * 8 + 3 * (8 + 64 + 32 + 32 + 64 + 8 + 3 * 88) + 8 + 2 * 5
        assert len(floats) == sizes + (0 if header.tied else 13 * 8)


def test_the_published_model_is_read_and_written_unchanged(tmp_path: Path) -> None:
    path = published("stories260K.bin")
    header, found = llama2c.read(path)
    tensors = {name: tensor.read("float32") for name, tensor in found.items()}
    assert header == Header(64, 172, 5, 8, 4, 512, 512, tied=True)
    llama2c.write(tmp_path / "a.bin", header, tensors)
    assert (tmp_path / "a.bin").read_bytes() == path.read_bytes()
    i, t = np.arange(4), np.arange(512)[:, None]  # what its turns are: cos(t 10000^(-2i / 8))
    np.testing.assert_allclose(tensors["freq_cis_real"], np.cos(t * 1e4 ** (-i / 4)), atol=4e-5)


def header(**sizes: int) -> bytes:
    names = ("dim", "hidden", "layers", "heads", "kv", "vocab", "context")
    whole = dict(zip(names, (8, 11, 3, 4, 2, 13, 5), strict=True)) | sizes
    return struct.pack("<7i", *whole.values())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no llama2.c checkpoint: it has 0 bytes"),
        (header()[:27], "is no llama2.c checkpoint: it has 27 bytes"),
        (header(), "makes 6[0-9]{3} bytes, it has 28"),
        (header(vocab=2**31 - 1, dim=2**31 - 8), "makes [0-9]{20,} bytes, it has 28"),
        (header(layers=0), "sizes must be at least 1"),
        (header(context=-1), "sizes must be at least 1"),
        (header(vocab=0), "sizes must be at least 1"),
        (header(heads=3), "heads must divide d_model, into even widths"),
        (header(heads=8, kv=8), "heads must divide d_model, into even widths"),
        (header(kv=3), "key heads must divide heads"),
        (struct.pack("<2i", 0x616B3432, 2) + bytes(248), "of llama2.c's version 2, only version 0"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    with refused_at_most(), pytest.raises(PretrainedError, match=message):
        llama2c.read(tmp_path / "a.bin")


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*a\.bin"):
        llama2c.read(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("header", "change", "message"),
    [
        (TIED, {"wq": np.ones((3, 8, 9))}, r"wq must have shape \(3, 8, 8\), got \(3, 8, 9\)"),
        (TIED, {"wcls": np.ones((13, 8))}, r"wcls must have shape None, got \(13, 8\)"),
        (UNTIED, {}, r"wcls must have shape \(13, 8\), got None"),
        (TIED._replace(n_heads=3), {}, "heads must divide d_model"),
        (TIED._replace(max_len=0), {}, "sizes must be at least 1"),
    ],
)
def test_what_does_not_fit_is_not_written(
    tmp_path: Path, header: Header, change: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llama2c.write(tmp_path / "a.bin", header, arrays(TIED) | change)
    assert not list(tmp_path.iterdir())


@some
@given(data=st.data())
def test_damaged_checkpoints_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    llama2c.write(tmp_path / "a.bin", TIED, arrays(TIED))
    whole = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(data.draw(damaged(whole[:28])) + whole[28:])
    with refused_at_most():
        llama2c.read(tmp_path / "a.bin")


# The tokenizer's file


def pieces(*more: tuple[float, bytes]) -> bytes:
    usual = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    rows = [(0.0, piece) for piece in usual] + list(more)
    return struct.pack("<i", 7) + b"".join(struct.pack("<fi", s, len(p)) + p for s, p in rows)


def test_pieces_are_read(tmp_path: Path) -> None:
    (tmp_path / "tok.bin").write_bytes(pieces((-0.5, b" a"), (-1.0, "é".encode())))
    found = llama2c.read_pieces(tmp_path / "tok.bin")
    assert [piece for piece, _ in found[:4]] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert found[259:] == [("\u2581a", -0.5), ("é", -1.0)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must begin with <unk>"),
        (pieces()[:-1], "a length of 6 before byte"),
        (pieces()[:-7], "unpack_from requires"),
        (pieces((0.0, b"")), "a length of 0 before byte"),
        (pieces((float("nan"), b"a")), "a score of nan"),
        (pieces((0.0, b"\xff")), "codec can't decode"),
        (pieces((0.0, b"a"), (0.0, b"a")), "no piece twice"),
        (pieces((0.0, b"a" * 257)), "a length of 257"),
        (pieces()[:4] + struct.pack("<fi", 0.0, -5) + b"abc", "a length of -5"),
        (pieces()[:4] + struct.pack("<fi", 0.0, 2**31 - 1) + b"abc", "a length of 2147483647"),
        (pieces()[:4], "must begin with <unk>"),
        (b"a" * ((2 << 20) + 1), "at most 2097152 bytes"),
    ],
)
def test_damaged_pieces_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "tok.bin").write_bytes(data)
    with refused_at_most(), pytest.raises(PretrainedError, match=message):
        llama2c.read_pieces(tmp_path / "tok.bin")
