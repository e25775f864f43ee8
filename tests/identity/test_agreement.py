"""Agreement through a store: one verdict for all, within a deadline, whoever is missing."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from lens_contrib.torch.agreement import agree  # noqa: E402
from lens_core.errors import AgreementError  # noqa: E402


def _all_agree(ranks, world_size, *, store, timeout_s=0.3, delays=None, topic="t"):
    """What each rank got: its verdict, or its AgreementError; and how long each took."""
    results, times = {}, {}

    def work(rank):
        time.sleep((delays or {}).get(rank, 0.0))
        start = time.monotonic()
        try:
            results[rank] = agree(
                store,
                topic,
                rank=rank,
                world_size=world_size,
                report={"rank": rank},
                judge=lambda reports: {"present": sorted(reports)},
                timeout_s=timeout_s,
            )
        except AgreementError as error:
            results[rank] = error
        times[rank] = time.monotonic() - start

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results, times


def _stores(tmp_path):
    return {
        "hash": dist.HashStore(),
        "file": dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": dist.TCPStore("127.0.0.1", 0, 1, True),
    }


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_all_ranks_get_the_same_verdict(kind, tmp_path):
    results, _ = _all_agree(range(4), 4, store=_stores(tmp_path)[kind], timeout_s=5)
    assert list(results.values()) == [{"present": [0, 1, 2, 3]}] * 4


def test_a_rank_that_never_reports_costs_the_deadline_and_not_the_agreement():
    results, times = _all_agree([0, 1, 3], 4, store=dist.HashStore())
    assert results == {rank: {"present": [0, 1, 3]} for rank in (0, 1, 3)}
    assert max(times.values()) < 1.5


def test_without_rank_0_every_rank_gives_up_at_the_deadline():
    results, times = _all_agree([1, 2, 3], 4, store=dist.HashStore())
    assert all(isinstance(result, AgreementError) for result in results.values())
    assert max(times.values()) < 2


def test_when_one_rank_has_given_up_nobody_goes_ahead():
    # Rank 0 comes when rank 1's deadline (0.2 s) is over: too late to agree for anyone.
    results, _ = _all_agree(range(3), 3, store=dist.HashStore(), timeout_s=0.1, delays={0: 0.6})
    assert all(isinstance(result, AgreementError) for result in results.values())
    assert "had no verdict after" in str(results[0])


def test_a_late_rank_reads_the_verdict_that_was_made_without_it():
    results, _ = _all_agree(range(3), 3, store=dist.HashStore(), timeout_s=0.1, delays={2: 0.6})
    assert results == {rank: {"present": [0, 1]} for rank in range(3)}


def test_a_dead_store_is_an_agreement_error():
    server = dist.TCPStore("127.0.0.1", 0, 1, True)
    client = server.clone()
    del server
    with pytest.raises(AgreementError):
        agree(client, "t", rank=1, world_size=2, report={}, judge=dict, timeout_s=0.2)
