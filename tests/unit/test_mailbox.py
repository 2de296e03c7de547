"""The mailbox between two mappings of one file; the GPU's is tested in ``tests/gpu``."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from sglang_psd.channel.mailbox import Mailbox, MailboxWriter
from sglang_psd.channel.messages import CudaHandle, FeatureRow, Features, Hello, MailboxHandle, decode, encode
from sglang_psd.errors import ChannelDamagedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_arrive(tmp_path: Path, dtype: torch.dtype) -> None:
    mailbox = Mailbox(8, 5, dtype, "cpu", str(tmp_path))
    writer = MailboxWriter(msgspec.msgpack.decode(msgspec.msgpack.encode(mailbox.handle()), type=MailboxHandle), None)
    rows = torch.arange(15.0).view(3, 5)
    writer.write(4, rows)
    read = mailbox.read(4, 3)
    assert read.dtype == dtype and torch.equal(read.float(), rows)
    writer.write(4, rows + 1)
    assert torch.equal(read.float(), rows), "what was read changed afterwards"
    assert mailbox.rows == 8 and writer.row_bytes == 5 * dtype.itemsize


def test_the_file_is_private(tmp_path: Path) -> None:
    path = Path(Mailbox(2, 2, torch.float32, "cpu", str(tmp_path)).handle().path)
    assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o600


def test_a_mailbox_that_is_gone_is_one_error(tmp_path: Path) -> None:
    handle = Mailbox(2, 2, torch.float32, "cpu", str(tmp_path)).handle()
    for broken in ({"path": handle.path + "-gone"}, {"dtype": "float64"}, {"rows": 0}, {"rows": 3}):
        with pytest.raises(ChannelDamagedError, match="mailbox cannot be opened"):
            MailboxWriter(msgspec.structs.replace(handle, **broken), None)


def test_a_closed_mailbox_is_unmapped(tmp_path: Path) -> None:
    handle = Mailbox(2, 2, torch.float32, "cpu", str(tmp_path)).handle()
    writer = MailboxWriter(handle, None)
    mapped = Path("/proc/self/maps").read_text().count(handle.path)
    writer.close()
    assert Path("/proc/self/maps").read_text().count(handle.path) == mapped - 1


def test_messages_survive_the_wire() -> None:
    features = Features(3, 10, [FeatureRow("a", 0, 5), FeatureRow("b", 7, 2)])
    assert decode(encode(features)) == features
    handle = MailboxHandle(4, 2, "bfloat16", cuda=CudaHandle(b"m", 1, 0, b"c", 2, b"e", True))
    assert handle.cuda is not None and handle.cuda.arguments() == (b"m", 1, 0, b"c", 2, b"e", True)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=MailboxHandle)
    assert decoded == handle
    assert "mailbox" in Hello.__struct_fields__
