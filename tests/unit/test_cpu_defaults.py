import pytest

from sglang_psd.cpu.defaults import deal_cores


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "dealt"),
    [(2, 2, "0|1"), (2, 8, "0-3|4-7"), (2, 5, "0-1|2-3"), (4, 2, "0|1|0|1"), (2, 1, "0|0")],
)
def test_cores_are_dealt_to_ranks(num_ranks: int, num_cores: int, dealt: str) -> None:
    assert deal_cores(num_ranks, num_cores) == dealt
