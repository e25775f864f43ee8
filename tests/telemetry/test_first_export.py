"""The file exporter, end to end in a process of its own."""

import json
import random
import subprocess
import sys
import textwrap

import pytest

from lens_core import NemoLensConfig, create_linked_span, inject_context, setup_telemetry
from lens_core.errors import SetupError


def read_spans(directory):
    spans = []
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            for resource_spans in json.loads(line).get("resourceSpans", ()):
                resource = {a["key"]: a["value"] for a in resource_spans["resource"]["attributes"]}
                for scope_spans in resource_spans["scopeSpans"]:
                    spans += [(span, resource) for span in scope_spans["spans"]]
    return spans


def test_file_holds_spans_links_and_resource(tmp_path):
    config = NemoLensConfig(enabled=True, exporter="file", output_dir=str(tmp_path), run_id="r")
    handle = setup_telemetry(
        config, resource_attributes={"nv.dl.rank": 3, "nv.dl.world_size": 4}, write_through=True
    )
    try:
        with pytest.raises(SetupError):
            setup_telemetry(config)
        random_state = random.getstate()
        carrier = {}
        with handle.tracer.start_as_current_span("outer"):
            inject_context(carrier)
            create_linked_span(handle.tracer, "inner", remote_carrier=carrier, x=1).end()
            assert [span["name"] for span, _ in read_spans(tmp_path / "r")] == ["inner"]
        assert random.getstate() == random_state
    finally:
        handle.shutdown()
    spans = {span["name"]: span for span, _ in read_spans(tmp_path / "r")}
    trace_id, span_id = carrier["traceparent"].split("-")[1:3]
    assert spans["inner"]["links"] == [{"traceId": trace_id, "spanId": span_id, "flags": 0x303}]
    assert spans["inner"]["parentSpanId"] == spans["outer"]["spanId"] == span_id
    assert spans["inner"]["attributes"] == [
        {"key": "x", "value": {"intValue": "1"}},
        {"key": "lens.carrier", "value": {"stringValue": "ok"}},
    ]
    _, resource = read_spans(tmp_path / "r")[0]
    assert resource["nv.dl.rank"] == {"intValue": "3"}
    assert resource["nemo.run.id"] == {"stringValue": "r"}
    assert resource["nemo.run.id.source"] == {"stringValue": "explicit"}


def test_core_and_disabled_set_up_do_not_import_the_sdk():
    code = """
        import sys
        from lens_core import NemoLensConfig, setup_telemetry
        from opentelemetry import trace
        before = trace.get_tracer_provider()
        handle = setup_telemetry(NemoLensConfig(enabled=False))
        assert not handle.is_exporting and handle.shutdown()
        assert trace.get_tracer_provider() is before
        loaded = [name for name in sys.modules if name.startswith("opentelemetry.sdk")]
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
