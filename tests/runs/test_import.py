import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lens_tools import read_run
from lens_tools.cli import main
from lens_tools.records import RunError
from lens_tools.runs import SPANS
from tests.runs.traces import pipeline_trace


@pytest.fixture
def imported(tmp_path):
    pipeline_trace(tmp_path / "trace-X.parquet")
    done = CliRunner().invoke(
        main, ["import", str(tmp_path / "trace-X.parquet"), "-o", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    return read_run(tmp_path / "run")


def test_a_trace_of_pipeline_operations_is_read_as_a_run(imported):
    assert imported.spans.schema.equals(SPANS)
    assert imported.run_id == "trace-X"
    assert imported.ranks == list(range(6))
    assert imported.steps == list(range(8))
    assert imported.reading.lines() == []
    spans = imported.spans.to_pylist()
    assert [s["start_ns"] for s in spans] == sorted(s["start_ns"] for s in spans)
    computed = [s for s in spans if s["kind"] == "compute"]
    assert len(computed) == 8 * 2 * 3 * 4 * 2
    assert {(s["phase"], s["dp"], s["stage"]) for s in computed if s["rank"] == 5} == {
        ("forward", 1, 2),
        ("backward", 1, 2),
    }


def test_both_ends_of_each_message_bear_its_name_and_each_other(imported):
    spans = imported.spans.to_pylist()
    ends = {}
    for span in spans:
        if span["hop_id"] is not None:
            ends.setdefault(span["hop_id"], {})[span["kind"]] = span
    assert len(ends) == 8 * 2 * 2 * 4 * 2
    for hop in ends.values():
        send, recv = hop["send"], hop["recv"]
        assert (send["peer_rank"], recv["peer_rank"]) == (recv["rank"], send["rank"])
        assert recv["stage"] - send["stage"] == {"forward": 1, "backward": -1}[recv["phase"]]
        assert recv["links"] == [send["trace"] + send["span"]]
        assert abs(send["end_ns"] - recv["end_ns"]) < 60_000


def test_members_of_a_collective_agree_on_group_and_number(imported):
    calls = {}
    for span in imported.spans.to_pylist():
        if span["kind"] == "collective":
            calls.setdefault((span["group_id"], span["seq_in_group"]), set()).add(span["rank"])
    assert len(calls) == 8 * 3
    assert all(len(ranks) == 2 for ranks in calls.values())


def test_what_is_no_trace_is_refused_and_said(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    for name, said in (("a", "no column dp_rank"), ("b", "no Parquet file")):
        done = CliRunner().invoke(
            main, ["import", str(tmp_path / f"{name}.parquet"), "-o", str(tmp_path / "out")]
        )
        assert (done.exit_code, said in done.output) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_table_of_another_schema_is_not_guessed_at(tmp_path):
    other = SPANS.empty_table().replace_schema_metadata({"lens.runs.schema": "0"})
    pq.write_table(other, tmp_path / "imported.parquet")
    assert "schema 0, not 1" in "\n".join(read_run(tmp_path).reading.lines())


def test_no_such_run_is_said(tmp_path):
    with pytest.raises(RunError, match="no file"):
        read_run(tmp_path)
